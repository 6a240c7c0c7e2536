"""libvirt's event thread, and delivery of life-cycle events. Must not call libvirt from the event thread.

libvirt's thread calls `Lifecycle.happened`, which wakes waiters at once and calls callbacks from worker threads. An event
is a hint, after which the receiver reads the state again. So several pending events of one domain are delivered once. Events
of one domain are delivered in turn, those of several domains in parallel: a callback that hangs only blocks its own domain and
one thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import libvirt
import structlog

from virtshim.model.errors import ShimError
from virtshim.system.threads import Workers, lasting

log = structlog.get_logger(__name__)

# Domains whose events are delivered at the same time; more than ever end in one moment.
_MAX: Final = 16


@functools.cache
def start_event_loop() -> None:
    """Runs libvirt's event loop on a daemon thread. Only once, because libvirt has one loop per process, and before the first
    connection is opened. Also stops libvirt from printing errors to stderr, because they are raised as well."""
    libvirt.registerErrorHandler(_ignore_error, None)
    libvirt.virEventRegisterDefaultImpl()
    lasting(_run_events, "libvirt-events")


def _ignore_error(_context: object, _error: object) -> None:
    """A handler that prints nothing."""


def _run_events() -> None:
    while True:
        try:
            libvirt.virEventRunDefaultImpl()
        except libvirt.libvirtError:
            log.exception("libvirt.event_loop.failed")  # the loop continues


class Lifecycle:
    """Passes life-cycle events to waiters and callbacks. `everything` lists all domains, for when events may have been lost
    (after a reconnect). It is called from a worker thread and may call libvirt."""

    def __init__(self, everything: Callable[[], Iterable[uuid.UUID]]) -> None:
        self._everything = everything
        self._lock = threading.Lock()
        self._waiters: dict[uuid.UUID, list[threading.Event]] = {}
        self._pending: dict[uuid.UUID | None, None] = {}  # None: all domains, which a worker has to list
        self._in_delivery: set[uuid.UUID | None] = set()  # a worker has each of them now
        self._closing = False
        self._callbacks: tuple[Callable[[uuid.UUID], None], ...] = ()
        self._working = 0
        self._workers = Workers(_MAX, "power-events")

    @contextlib.contextmanager
    def watching(self, domain: uuid.UUID) -> Iterator[threading.Event]:
        """Yields an event that is set at each life-cycle event of `domain`, and by `wake`, until the block ends."""
        event = threading.Event()
        with self._lock:
            self._waiters.setdefault(domain, []).append(event)
        try:
            yield event
        finally:
            with self._lock:
                left = [other for other in self._waiters.get(domain, ()) if other is not event]
                if left:
                    self._waiters[domain] = left
                else:
                    self._waiters.pop(domain, None)

    def add_callback(self, callback: Callable[[uuid.UUID], None]) -> None:
        with self._lock:
            self._callbacks = (*self._callbacks, callback)

    def happened(self, domain: uuid.UUID) -> None:
        """Called on libvirt's thread, so it returns at once."""
        with self._lock:
            for event in self._waiters.get(domain, ()):
                event.set()
            self._enqueue(domain)

    def wake(self, domain: uuid.UUID) -> None:
        """Wakes waiters for a change that is no life-cycle event. Called on libvirt's thread."""
        with self._lock:
            for event in self._waiters.get(domain, ()):
                event.set()

    def events_were_lost(self) -> None:
        """Wakes every waiter, and calls the callbacks for every domain."""
        with self._lock:
            for events in self._waiters.values():
                for event in events:
                    event.set()
            self._enqueue(None)

    def close(self) -> None:
        """Ends the workers after their current callbacks."""
        with self._lock:
            self._closing = True
        self._workers.shutdown()

    def _enqueue(self, *domains: uuid.UUID | None) -> None:
        """The lock is held."""
        if not self._callbacks or self._closing:
            return
        self._pending.update(dict.fromkeys(domains))
        for _ in range(min(len(self._pending.keys() - self._in_delivery), _MAX - self._working)):
            self._workers.submit(self._work)
            self._working += 1

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            (domain,) = taken
            if domain is None:
                every = self._all_domains()
                with self._lock:
                    self._enqueue(*every)
            else:
                for callback in self._callbacks:
                    _call(callback, domain)
            with self._lock:
                self._in_delivery.discard(domain)

    def _next(self) -> tuple[uuid.UUID | None] | None:
        """The oldest pending domain that no other worker has; None ends this worker."""
        with self._lock:
            for domain in self._pending if not self._closing else ():
                if domain not in self._in_delivery:
                    del self._pending[domain]
                    self._in_delivery.add(domain)
                    return (domain,)
            self._working -= 1
            return None

    def _all_domains(self) -> list[uuid.UUID]:
        try:
            return list(self._everything())
        except ShimError as exc:  # the connection is lost again; the next reconnect repeats this
            log.warning("libvirt.list.failed", error=str(exc))
        except Exception:  # any error: the next round needs a worker
            log.exception("libvirt.list.crashed")
        return []


def _call(callback: Callable[[uuid.UUID], None], domain: uuid.UUID) -> None:
    try:
        callback(domain)
    except Exception:  # any error: one bad callback must not end the events of all VMs
        log.exception("vm.power_event.crashed", domain=str(domain))
