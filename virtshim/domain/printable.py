"""Text of others (a guest, a program, a pod) for messages and terminals, which must not obey it."""

from __future__ import annotations


def printable_text(text: str) -> str:
    """The same length, with a question mark for each control character and line break."""
    return "".join(char if char.isprintable() else "?" for char in text)
