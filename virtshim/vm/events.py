"""libvirt's event thread, and delivery of life-cycle events. Must not call libvirt from the event thread.

`libvirt thread -> Lifecycle.happened -> waiters are set at once, callbacks get it from a worker thread`. An event is
a hint: whoever gets one reads the state again. So several events of one domain that wait together are told once. Those
of one domain are told one after the other, those of several beside each other: a callback that hangs holds up its own
domain and one thread.
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

# Domains that are told of at once. More than ever end in one moment.
_MAX: Final = 16


@functools.cache
def start_event_loop() -> None:
    """Registers libvirt's own event loop and runs it on a daemon thread; libvirt has one a process, so once.
    Must come before the first connection is opened. Also stops libvirt from printing every error to stderr:
    they are raised as well."""
    libvirt.registerErrorHandler(_ignore_error, None)
    libvirt.virEventRegisterDefaultImpl()
    lasting(_run_events, "libvirt-events")


def _ignore_error(_context: object, _error: object) -> None:
    """libvirt's handler for errors that are raised anyway."""


def _run_events() -> None:
    while True:
        try:
            libvirt.virEventRunDefaultImpl()
        except libvirt.libvirtError:
            log.exception("libvirt.event_loop.failed")  # and it goes on


class Lifecycle:
    """Hands life-cycle events to waiters and callbacks. `everything` lists the domains to tell about when
    events may have been lost (after a reconnect); it is called from a worker thread and may call libvirt."""

    def __init__(self, everything: Callable[[], Iterable[uuid.UUID]]) -> None:
        self._everything = everything
        self._lock = threading.Lock()
        self._waiters: dict[uuid.UUID, list[threading.Event]] = {}
        self._pending: dict[uuid.UUID | None, None] = {}  # None: every domain, which is still to be listed
        self._told: set[uuid.UUID | None] = set()  # by a worker each, now
        self._closing = False
        self._callbacks: tuple[Callable[[uuid.UUID], None], ...] = ()
        self._working = 0
        self._workers = Workers(_MAX, "power-events")

    @contextlib.contextmanager
    def watching(self, domain: uuid.UUID) -> Iterator[threading.Event]:
        """An event that is set at each life-cycle event of `domain`, and with `wake`, until the block is left."""
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
        """Called on libvirt's thread: sets, notes, returns."""
        with self._lock:
            for event in self._waiters.get(domain, ()):
                event.set()
            self._tell(domain)

    def wake(self, domain: uuid.UUID) -> None:
        """Something about it has changed, but not its life. Called on libvirt's thread."""
        with self._lock:
            for event in self._waiters.get(domain, ()):
                event.set()

    def events_were_lost(self) -> None:
        """Wakes every waiter and tells the callbacks about every domain."""
        with self._lock:
            for events in self._waiters.values():
                for event in events:
                    event.set()
            self._tell(None)

    def close(self) -> None:
        """Ends the workers after the callbacks that they are in."""
        with self._lock:
            self._closing = True
        self._workers.shutdown()

    def _tell(self, *domains: uuid.UUID | None) -> None:
        """The lock is held."""
        if not self._callbacks or self._closing:
            return
        self._pending.update(dict.fromkeys(domains))
        for _ in range(min(len(self._pending.keys() - self._told), _MAX - self._working)):
            self._workers.submit(self._work)
            self._working += 1

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            (domain,) = taken
            if domain is None:
                every = self._all_domains()
                with self._lock:
                    self._tell(*every)
            else:
                for callback in self._callbacks:
                    _call(callback, domain)
            with self._lock:
                self._told.discard(domain)

    def _next(self) -> tuple[uuid.UUID | None] | None:
        """The longest pending that no other worker is at; without one, None, and this one is through."""
        with self._lock:
            for domain in self._pending if not self._closing else ():
                if domain not in self._told:
                    del self._pending[domain]
                    self._told.add(domain)
                    return (domain,)
            self._working -= 1
            return None

    def _all_domains(self) -> list[uuid.UUID]:
        try:
            return list(self._everything())
        except ShimError as exc:  # the connection is gone again: its return brings the next round
            log.warning("libvirt.list.failed", error=str(exc))
        except Exception:  # the edge of a thread: the next round must find a worker
            log.exception("libvirt.list.crashed")
        return []


def _call(callback: Callable[[uuid.UUID], None], domain: uuid.UUID) -> None:
    try:
        callback(domain)
    except Exception:  # the edge of a thread: one bad callback must not end the events of all VMs
        log.exception("vm.power_event.crashed", domain=str(domain))
