"""Texts that make a backtracking search slow. For each repetition in a pattern: its prefix, very many repeated pieces,
then something that no pattern expects."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

_parser: Any = sys.modules["re._parser"]  # the only one that knows what a pattern consists of
_SAMPLES = "a1A0-_./:=\"' \t\n\\[({@,+~#é"


def texts(pattern: re.Pattern[Any], length: int) -> Iterator[str]:
    """The texts, each about that long."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    flags = pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags
    for before, unit in dict.fromkeys(_pumps(_parser.parse(source, flags), "")):
        for repeated in (unit, before + unit, unit + "\n"):
            if repeated:
                yield before + repeated * (length // len(repeated)) + "\0"


def _pumps(items: Any, before: str) -> Iterator[tuple[str, str]]:
    """The prefix and one piece of each repetition."""
    yield "", before
    for kind, value in items:
        name = str(kind)
        if "REPEAT" in name:
            yield from _pumps(value[2], before)
            yield before, _text(value[2])
        elif name == "BRANCH":
            for branch in value[1]:
                yield from _pumps(branch, before)
        elif name in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT"):
            yield from _pumps(value if name == "ATOMIC_GROUP" else value[-1], before)
        before += _text([(kind, value)])
    yield "", before


def _text(items: Any) -> str:
    """A text that they match."""
    found = ""
    for kind, value in items:
        name = str(kind)
        if name == "LITERAL":
            found += chr(value)
        elif name in ("NOT_LITERAL", "IN", "ANY"):
            found += _character(kind, value)
        elif "REPEAT" in name:
            found += _text(value[2]) * max(value[0], 1)
        elif name == "BRANCH":
            found += _text(value[1][0])
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            found += _text(value if name == "ATOMIC_GROUP" else value[-1])
    return found


def _character(kind: Any, value: Any) -> str:
    name = str(kind)
    if name == "ANY":
        return "a"
    if name == "NOT_LITERAL":
        return "a" if value != ord("a") else "b"
    refused = str(value[0][0]) == "NEGATE"
    wanted = value[1:] if refused else value
    for character in _SAMPLES:
        if any(_is_in(character, member) for member in wanted) is not refused:
            return character
    first = wanted[0]
    return chr(first[1] if isinstance(first[1], int) else first[1][0])


_CLASSES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdigit,
    "SPACE": str.isspace,
    "WORD": lambda one: one.isalnum() or one == "_",
}


def _is_in(character: str, member: Any) -> bool:
    name, value = str(member[0]), member[1]
    if name == "LITERAL":
        return ord(character) == int(value)
    if name == "RANGE":
        return bool(value[0] <= ord(character) <= value[1])
    category = str(value).removeprefix("CATEGORY_")
    return bool(_CLASSES[category.removeprefix("NOT_")](character)) is not category.startswith("NOT_")
