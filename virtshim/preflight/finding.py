"""What a check says: one line for a person, and what to do. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """ERROR: a VM could not start, or the node comes to that unseen. WARNING: it could, but something is worse than need be."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is what was looked at, in a word or two; `remedy` is "" for OK; `check` is what programs know it by, the name of
    the check that found it, which the runner fills in."""

    level: Level
    subject: str
    text: str
    remedy: str = ""
    check: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, subject, text, remedy)


def error(subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, subject, text, remedy)
