"""How glibc keeps this process's memory; nothing happens with another C library. Before threads are started."""

from __future__ import annotations

import ctypes
from typing import Final

# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_LARGE: Final = 32 << 20


def share_one_heap() -> None:
    """glibc gives threads heaps of their own, against contention. Ours seldom run at once (one holds Python's lock), and each
    heap keeps what it once held: 7 MiB with a handful of pods."""
    _mallopt(_M_ARENA_MAX, 1)


def keep_large_blocks() -> None:
    """What is given back to the system for each message has to be faulted in and cleared for the next: a list of 500 pods, of
    640 KiB, cost half as much again. Up to 32 MiB are kept instead."""
    _mallopt(_M_MMAP_THRESHOLD, _LARGE)
    _mallopt(_M_TRIM_THRESHOLD, _LARGE)


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
