"""Valid names of a guest's users."""

from __future__ import annotations

import re
from typing import Final

from virtshim.domain.errors import InvalidRequest

# As useradd(8) takes them, and dots, which directories of users allow.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


def check_user(name: str) -> None:
    """Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name[:80]!r} is not a user name; use letters, digits, '_', '.' and '-'")
