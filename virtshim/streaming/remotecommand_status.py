"""A session's outcome, as clients read it on the error stream. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

# The most bytes of an error text for the user.
_MAX_TEXT: Final = 8000


@dataclass(frozen=True, slots=True)
class Exited:
    code: int


@dataclass(frozen=True, slots=True)
class Failed:
    message: str


Outcome = Exited | Failed


def as_status(outcome: Outcome) -> bytes:
    """A metav1.Status, for protocols from v4. Clients read the exit code from the cause named ExitCode."""
    status: dict[str, Any]
    match outcome:
        case Exited(0):
            status = {"metadata": {}, "status": "Success"}
        case Exited(code):
            status = {
                "metadata": {},
                "status": "Failure",
                "message": f"command terminated with exit code {code}",
                "reason": "NonZeroExitCode",
                "details": {"causes": [{"reason": "ExitCode", "message": str(code & 0xFF)}]},
            }
        case Failed(message):
            status = {
                "metadata": {},
                "status": "Failure",
                "message": message[:_MAX_TEXT],
                "reason": "InternalError",
                "details": {"causes": [{"message": message[:_MAX_TEXT]}]},
                "code": 500,
            }
    return json.dumps(status).encode()


def from_status(content: bytes) -> Outcome:
    """Reads what `as_status` wrote. Unreadable content is a failure."""
    try:
        status = json.loads(content)
        if status["status"] == "Success":
            return Exited(0)
        for cause in status.get("details", {}).get("causes", ()):
            if cause.get("reason") == "ExitCode":
                return Exited(int(cause["message"]))
        return Failed(str(status["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Failed(f"the node sent an unreadable end status: {content[:200]!r}")


def as_text(outcome: Outcome) -> bytes:
    """For the protocols before v4; empty means success."""
    match outcome:
        case Exited(0):
            return b""
        case Exited(code):
            return f"command terminated with exit code {code}".encode()
        case Failed(message):
            return message[:_MAX_TEXT].encode(errors="replace")
