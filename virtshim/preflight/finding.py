"""The result of a check: one line for people, and a remedy. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """ERROR: a VM cannot start, or will silently become unable to. WARNING: VMs start, but something is worse than necessary."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject`: what was checked, in a word or two. `remedy`: "" for OK. `check`: the name of the check, for programs; the
    runner sets it."""

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
