"""Calls that a VM's monitor must answer, with a time limit: libvirt would wait for ever. A call that hangs is left
behind on its thread; until it comes back, calls of its kind for that VM fail at once."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable
from typing import TypeVar, cast

import structlog

from virtshim.domain.errors import DeadlineExceeded

log = structlog.get_logger(__name__)

T = TypeVar("T")


class BoundedCalls:
    """Thread-safe. One object a kind of call."""

    def __init__(self, what: str) -> None:
        """`what` is being done, for people: "change the memory of"."""
        self._what = what
        self._lock = threading.Lock()
        self._left_behind: set[uuid.UUID] = set()

    def call(self, domain: uuid.UUID, act: Callable[[], T], seconds: float) -> T:
        """What `act` returns or raises. DeadlineExceeded if it takes longer, or an earlier call still does."""
        with self._lock:
            if domain in self._left_behind:
                raise self._late(domain)
        ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            result, error = None, None
            try:
                result = act()
            except BaseException as exc:  # noqa: BLE001  told to the caller
                error = exc
            finally:
                with self._lock:
                    self._left_behind.discard(domain)
                    ended.put((result, error))

        threading.Thread(target=run, name="bounded-call", daemon=True).start()
        try:
            result, error = ended.get(timeout=seconds)
        except queue.Empty:
            with self._lock:
                if ended.empty():
                    self._left_behind.add(domain)
            log.warning("vm.no_answer", domain=str(domain), what=self._what, seconds=seconds)
            raise self._late(domain) from None
        if error is not None:
            raise error
        return cast("T", result)

    def _late(self, domain: uuid.UUID) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._what} VM {domain}: its QEMU does not answer; stop the container if this persists"
        )
