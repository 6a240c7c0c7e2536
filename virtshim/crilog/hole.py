"""fallocate(2) with FALLOC_FL_PUNCH_HOLE: the standard library has only the form that allocates."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch_hole(descriptor: int, offset: int, size: int) -> None:
    """Frees `size` bytes from `offset`; they read as zeros and the file stays as long. Does nothing on a file system
    without holes. Raises OSError."""
    if _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, size) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
