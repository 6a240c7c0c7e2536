"""A console without a CRI log: only the last part of its raw log is kept, for administrators. Thread-safe."""

from __future__ import annotations

import contextlib
import threading
from typing import Final

import structlog

from virtshim.crilog.files import RawLog
from virtshim.crilog.tail import Turn
from virtshim.domain.ids import ContainerId

log = structlog.get_logger(__name__)

# Bytes that stay at least; one MiB more at most, as space is given back in pieces of that size.
KEEP_BYTES: Final = 16 * 1024 * 1024


class RawTail:
    """Has a Tail's methods. The file stays as long as QEMU made it: what is given back reads as zeros."""

    def __init__(self, container: ContainerId, raw_path: str) -> None:
        self._container = container
        self._raw = RawLog(raw_path)
        self._lock = threading.Lock()
        self._failing = False
        self._closed = False

    @property
    def raw_path(self) -> str:
        return self._raw.path

    @property
    def is_closed(self) -> bool:
        return self._closed

    def turn(self) -> Turn:
        with self._lock:
            if not self._closed:
                self._trim()
        return Turn()

    def reopen(self) -> None:
        """There is no log to be renamed."""

    def note(self, line: str) -> None:
        """There is no log to write it to."""

    def finish(self) -> None:
        """Nothing will follow."""
        with self._lock, contextlib.ExitStack() as last:
            last.callback(self._close)
            if not self._closed:
                self._trim()

    def close(self) -> None:
        """A later one goes on."""
        with self._lock:
            self._close()

    # --- below: with the lock held --------------------------------------------------------------------------------------

    def _trim(self) -> None:
        try:
            if self._raw.open():
                self._raw.free_before(self._raw.status().st_size - KEEP_BYTES)
                if self._raw.status().st_nlink == 0:
                    self._raw.close()
            self._failing = False
        except OSError as error:
            if not self._failing:  # logged once, however often it is tried again
                log.warning("console.raw.failed", container=self._container.short, error=str(error))
            self._failing = True

    def _close(self) -> None:
        self._closed = True
        self._raw.close()
