"""`virtshim serve`."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

from virtshim import config

# malloc.h
_M_ARENA_MAX: Final = -8


def serve_command(file: str | None) -> None:
    _share_one_heap()
    # structlog takes rich, where it is installed, for tracebacks in colour, which the daemon's log never shows: 6 MiB.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    from virtshim.logsetup import set_up_logging
    from virtshim.serve import serve

    settings = config.load(file)
    set_up_logging(settings.log.level, settings.log.format)
    serve(settings)
    sys.stderr.flush()
    # A StopContainer may still wait out its grace period on a pool thread, which the interpreter would join. The journal
    # is right at any point, so nothing is lost by leaving now.
    os._exit(0)


def _share_one_heap() -> None:
    """glibc gives threads heaps of their own, against contention. Ours seldom run at once (one holds Python's lock), and each
    heap keeps what it once held: 7 MiB with a handful of pods."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
