"""tapmanager's one exception: a kind of `protocol.KINDS` and a message for users (what, why, what to do)."""

from __future__ import annotations


class TapmanagerError(Exception):
    """`kind` decides what a caller may do about it; the message is shown to users as it is."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def invalid(message: str) -> TapmanagerError:
    """The request is wrong, and would be wrong again."""
    return TapmanagerError("invalid", message)


def unavailable(message: str) -> TapmanagerError:
    """Something external is not available now; the same request may work later."""
    return TapmanagerError("unavailable", message)


def internal(message: str) -> TapmanagerError:
    """An outside program, or the kernel, failed."""
    return TapmanagerError("internal", message)


def deadline(message: str) -> TapmanagerError:
    """The caller's time, or a step's own limit, is over."""
    return TapmanagerError("deadline", message)
