"""Which paths the kernel accepts."""

from __future__ import annotations

from typing import Final

from virtshim.domain.errors import InvalidRequest

# linux/limits.h, PATH_MAX without its final NUL and NAME_MAX: bytes.
_LONGEST_PATH: Final = 4095
_LONGEST_NAME: Final = 255


def check_path(path: str, field: str) -> None:
    """Raises InvalidRequest, which names `field`, for a path that no file can have."""
    if "\0" in path:
        raise InvalidRequest(f"{field} contains a NUL byte: {path[:80]!r}")
    if len(path.encode()) > _LONGEST_PATH or any(len(name.encode()) > _LONGEST_NAME for name in path.split("/")):
        raise InvalidRequest(
            f"{field}: a path has at most {_LONGEST_PATH} bytes, and each name in it {_LONGEST_NAME}; "
            f"shorten {path[:80]!r}..."
        )
