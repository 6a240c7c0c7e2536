"""The node's id once more, in a file of its own beside the database: without it this node's VMs would look foreign to it."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from virtshim.domain.errors import InternalError


def read(path: str) -> str | None:
    """None if there is none, or it is not one."""
    with contextlib.suppress(OSError, ValueError):
        return str(uuid.UUID(Path(path).read_text(encoding="ascii").strip()))
    return None


def write(path: str, node: str) -> None:
    """On disk, whole, when it returns. Raises InternalError."""
    new = f"{path}.new"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{node}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as exc:
        raise InternalError(f"the node's id cannot be written to {path}: {exc.strerror}") from exc
