"""Kernels beside root disks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

from virtshim.domain.errors import InternalError, NotFound, ResourceExhausted
from virtshim.files import sync

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class KernelFileStore:
    """Implements `virtshim.ports.disks.KernelFiles`."""

    def is_there(self, path: str) -> bool:
        return os.path.lexists(path)

    def copy(self, source: str, path: str) -> None:
        beside = f"{path}.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            with open(source, "rb") as original, open(beside, "xb", opener=_private) as half:
                shutil.copyfileobj(original, half, 1 << 20)
                half.flush()
                os.fsync(half.fileno())
            os.rename(beside, path)
            sync(os.path.dirname(path))
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            if exc.errno == errno.ENOENT and not os.path.exists(source):
                raise NotFound(f"a kernel of the image, {source}, is gone; pull the image again") from exc
            if exc.errno in _NO_SPACE:
                raise ResourceExhausted(f"{path} cannot be written: {exc.strerror}; free space there") from exc
            raise InternalError(f"{path} cannot be written: {exc.strerror}") from exc


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
