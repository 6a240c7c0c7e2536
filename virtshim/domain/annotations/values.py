"""What readers of annotations have in common. Pure."""

from __future__ import annotations

from collections.abc import Callable

from virtshim.domain.annotations.options import VmOptions
from virtshim.domain.errors import InvalidRequest

# A reader takes the options so far and the annotation's text, and gives the options with it; InvalidRequest carries what
# is wrong and the remedy, the caller adds the annotation's name.
Reader = Callable[[VmOptions, str], VmOptions]


def shown(text: str) -> str:
    """Printable, and short enough to be one of several in a message."""
    return repr(text[:80])


def flag(text: str) -> bool:
    if text not in ("true", "false", ""):
        raise InvalidRequest(f"{shown(text)} is neither true nor false; write true, or remove it")
    return text == "true"
