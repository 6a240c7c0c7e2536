"""Calls to libvirt that are not always waited for. `BoundedCalls` have a time limit: they need a VM's monitor, for
which libvirt would wait for ever. `EarlyCalls` may take effect before they return. An abandoned call stays on its
thread."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar, cast

import structlog

from virtshim.model.errors import DeadlineExceeded, ResourceExhausted
from virtshim.system.threads import started

log = structlog.get_logger(__name__)

T = TypeVar("T")


class BoundedCalls:
    """Thread-safe. One object for each kind of call. Until a hung call returns, others for its VM fail at once."""

    def __init__(self, what: str) -> None:
        """`what`: the call in words, such as "change the memory of"."""
        self._what = what
        self._lock = threading.Lock()
        self._left_behind: set[uuid.UUID] = set()

    def call(self, domain: uuid.UUID, act: Callable[[], T], seconds: float) -> T:
        """Returns or raises what `act` does. DeadlineExceeded if it takes longer, or if an earlier call has not returned.
        ResourceExhausted if the system has no thread for it."""
        with self._lock:
            if domain in self._left_behind:
                raise self._late(domain)
        ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            result, error = None, None
            try:
                result = act()
            except BaseException as exc:  # noqa: BLE001  passed on to the caller
                error = exc
            finally:
                with self._lock:
                    self._left_behind.discard(domain)
                    ended.put((result, error))

        try:
            started(threading.Thread(target=run, name="bounded-call", daemon=True))
        except RuntimeError as exc:
            raise ResourceExhausted(f"no thread to {self._what} VM {domain}: {exc}; repeat the call") from exc
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


class EarlyCalls:
    """Thread-safe. An action that must come after such calls of a VM uses `wait`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[threading.Thread, uuid.UUID] = {}

    def call(
        self,
        domain: uuid.UUID,
        act: Callable[[], object],
        has_come_about: Callable[[], bool],
        news: threading.Event,
        patience: float = 0.0,
    ) -> None:
        """Returns or raises when `act` does, or earlier: `patience` seconds after `has_come_about` is true. That is
        checked whenever `news` is set."""
        ended: list[BaseException | None] = []

        def run() -> None:
            error = None
            try:
                act()
            except BaseException as exc:  # noqa: BLE001  passed on to the caller, if it still waits
                error = exc
            finally:
                with self._lock:
                    del self._under_way[threading.current_thread()]
                ended.append(error)
                news.set()

        thread = threading.Thread(target=run, name="early-call", daemon=True)
        with self._lock:
            self._under_way[started(thread)] = domain
        while not ended and not has_come_about():
            news.wait()
            news.clear()
        if patience:
            thread.join(patience)
        if ended and ended[0] is not None:
            raise ended[0]

    def wait(self, domain: uuid.UUID) -> None:
        with self._lock:
            threads = [thread for thread, whose in self._under_way.items() if whose == domain]
        for thread in threads:
            thread.join()

    def close(self, seconds: float) -> None:
        """Waits that long for running calls."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = list(self._under_way)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
