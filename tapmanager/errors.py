"""tapmanager's one exception: a kind of `protocol.KINDS` and a message for users (what, why, what to do)."""

from __future__ import annotations


class TapmanagerError(Exception):
    """`kind` tells the caller how to react. The message is shown to users unchanged."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def invalid(message: str) -> TapmanagerError:
    """The request is wrong, and repeating it would not help."""
    return TapmanagerError("invalid", message)


def wrong_state(message: str) -> TapmanagerError:
    """The object exists, but cannot do this now."""
    return TapmanagerError("failed-precondition", message)


def unavailable(message: str) -> TapmanagerError:
    """Something external is not available now; the same request may work later."""
    return TapmanagerError("unavailable", message)


def internal(message: str) -> TapmanagerError:
    """An outside program, or the kernel, failed."""
    return TapmanagerError("internal", message)


def deadline(message: str) -> TapmanagerError:
    """The caller's time limit, or that of a step, has expired."""
    return TapmanagerError("deadline", message)
