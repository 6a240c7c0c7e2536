"""Text of others (a guest, a program, a pod) for messages and terminals, which must not obey it."""

from __future__ import annotations


def printable_text(text: str) -> str:
    """The same length, with a question mark for each control character and line break."""
    return "".join(char if char.isprintable() else "?" for char in text)


def escaped(text: str, longest: int) -> str:
    """At most about `longest` characters of it, with an escape for each that is not printable; says if it is cut."""
    cut = text[:longest]
    shown = cut if cut.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in cut)
    return shown if len(text) <= longest else f"{shown} ... ({len(text)} characters)"


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "replace").decode("ascii")
