"""A system that refuses one request for a thread, a descriptor, a watched descriptor or a sync."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest.mock import patch

THREAD, OPEN, EPOLL, FSYNC = KINDS = ("thread", "open", "epoll_ctl", "fsync")
_ERRORS: dict[str, Callable[[], Exception]] = {
    THREAD: lambda: RuntimeError("can't start new thread"),
    OPEN: lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    EPOLL: lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    FSYNC: lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
}
# Frames between such a call and the product's own.
_NEAR = 6
# These modules read files and start threads by themselves, and work without them.
_NOT_OURS = ("importlib", "linecache", "traceback", "fakes", "grpc", "tempfile", "asyncio")
_hears: list[Scarcity] = []


def _audited(event: str, _arguments: object) -> None:
    """Uses Python's audit events, which report each opening before it happens. The hook cannot be removed again."""
    if _hears and event == "open":
        _hears[-1].asked(OPEN)


sys.addaudithook(_audited)


class Scarcity:
    """Counts the product's requests to the system by kind; refuses the `at`-th of `kind`, counted from 1, 0: none."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at = kind, at
        self.counts = dict.fromkeys(KINDS, 0)
        self.refused = ""
        """Where that was, once it was."""
        self._lock = threading.Lock()
        self._reigns = False

    @contextlib.contextmanager
    def reigning(self) -> Iterator[None]:
        """Inside the block, which is one of `installed`, requests are counted and refused."""
        self._reigns = True
        try:
            yield
        finally:
            self._reigns = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        sync, make, start = os.fsync, select.epoll, threading.Thread.start

        def begin(thread: threading.Thread) -> None:
            self.asked(THREAD)
            start(thread)

        def fsync(file: Any) -> None:
            self.asked(FSYNC)
            sync(file)

        _hears.append(self)
        try:
            with (
                patch("os.fsync", fsync),
                patch("select.epoll", lambda: _Epoll(self, make())),
                patch.object(threading.Thread, "start", begin),
            ):
                yield
        finally:
            _hears.remove(self)

    def asked(self, kind: str) -> None:
        place = _place() if self._reigns else ""
        if not place:
            return
        with self._lock:
            self.counts[kind] += 1
            if kind != self.kind or self.counts[kind] != self.at:
                return
            self.refused = place
        error = _ERRORS[kind]
        raise error()


class _Epoll:
    """Wraps epoll, because Python's own type cannot be patched."""

    def __init__(self, scarcity: Scarcity, real: Any) -> None:
        self.scarcity = scarcity
        self.real = real

    def register(self, *arguments: Any) -> None:
        self.scarcity.asked(EPOLL)
        self.real.register(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _place() -> str:
    """Where in the product the request is made; "" if it is elsewhere."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            return ""
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("virtshim.", "grpc._server")):
            return f"{module}:{frame.f_lineno}"
        if (module != __name__ and module.split(".", maxsplit=1)[0].lstrip("_") in _NOT_OURS) or module.startswith(
            "test"
        ):
            return ""
        frame = frame.f_back
    return ""
