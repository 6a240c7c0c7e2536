"""tapmanager's one exception: a kind of `protocol.KINDS` and a message for users (what, why, what to do)."""

from __future__ import annotations


class NetError(Exception):
    """`kind` decides what a caller may do about it; the message is shown to users as it is."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def invalid(message: str) -> NetError:
    """The request is wrong, and would be wrong again."""
    return NetError("invalid", message)


def unavailable(message: str) -> NetError:
    """Something external is not available now; the same request may work later."""
    return NetError("unavailable", message)


def internal(message: str) -> NetError:
    """An outside program, or the kernel, failed."""
    return NetError("internal", message)


def deadline(message: str) -> NetError:
    """The caller's time, or a step's own limit, is over."""
    return NetError("deadline", message)
