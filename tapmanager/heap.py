"""The memory of a daemon's process: settings of glibc's allocator. They do nothing with another C library."""

from __future__ import annotations

import ctypes
from typing import Final

# From malloc.h:
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_LARGE: Final = 32 << 20


def share_one_heap() -> None:
    """Turns off glibc's separate heaps for threads. They avoid contention, but our threads seldom run at once (Python's
    lock), and each heap keeps its memory: 7 MiB with a handful of pods. Must be called before threads are started."""
    _call("mallopt", _M_ARENA_MAX, 1)


def keep_large_blocks() -> None:
    """Keeps up to 32 MiB of freed memory. Otherwise glibc returns it to the kernel after each message and gets it again for
    the next, which made a list of 500 pods (640 KiB) half as slow again."""
    _call("mallopt", _M_MMAP_THRESHOLD, _LARGE)
    _call("mallopt", _M_TRIM_THRESHOLD, _LARGE)


def return_freed_memory() -> None:
    """Returns to the kernel what imports and recovery have freed: glibc keeps freed memory that lies below memory in use."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
