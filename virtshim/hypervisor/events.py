"""libvirt's event thread, and delivery of life-cycle events. Must not call libvirt from the event thread.

`libvirt thread -> Lifecycle.happened -> waiters are set at once, callbacks get it from the worker thread`. An
event is a hint: whoever gets one reads the state again. So several events of one domain that wait together are
told once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator

import libvirt

from virtshim.domain.errors import ShimError

_log = logging.getLogger(__name__)


@functools.cache
def start_event_loop() -> None:
    """Registers libvirt's own event loop and runs it on a daemon thread; libvirt has one a process, so once.
    Must come before the first connection is opened. Also stops libvirt from printing every error to stderr:
    they are raised as well."""
    libvirt.registerErrorHandler(_ignore_error, None)
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=_run_events, name="libvirt-events", daemon=True).start()


def _ignore_error(_context: object, _error: object) -> None:
    """libvirt's handler for errors that are raised anyway."""


def _run_events() -> None:
    while True:
        try:
            libvirt.virEventRunDefaultImpl()
        except libvirt.libvirtError:
            _log.exception("libvirt's event loop reported an error; it goes on")


class Lifecycle:
    """Hands life-cycle events to waiters and callbacks. `everything` lists the domains to tell about when
    events may have been lost (after a reconnect); it is called from the worker thread and may call libvirt."""

    def __init__(self, everything: Callable[[], Iterable[uuid.UUID]]) -> None:
        self._everything = everything
        self._changed = threading.Condition()
        self._waiters: dict[uuid.UUID, list[threading.Event]] = {}
        self._pending: dict[uuid.UUID, None] = {}
        self._some_lost = False
        self._closing = False
        self._callbacks: tuple[Callable[[uuid.UUID], None], ...] = ()
        self._worker: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, domain: uuid.UUID) -> Iterator[threading.Event]:
        """An event that is set at each life-cycle event of `domain`, and with `wake`, until the block is left."""
        event = threading.Event()
        with self._changed:
            self._waiters.setdefault(domain, []).append(event)
        try:
            yield event
        finally:
            with self._changed:
                left = [other for other in self._waiters.get(domain, ()) if other is not event]
                if left:
                    self._waiters[domain] = left
                else:
                    self._waiters.pop(domain, None)

    def add_callback(self, callback: Callable[[uuid.UUID], None]) -> None:
        with self._changed:
            self._callbacks = (*self._callbacks, callback)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="power-events", daemon=True)
                self._worker.start()

    def happened(self, domain: uuid.UUID) -> None:
        """Called on libvirt's thread: sets, notes, returns."""
        with self._changed:
            for event in self._waiters.get(domain, ()):
                event.set()
            if self._callbacks:
                self._pending[domain] = None
                self._changed.notify_all()

    def wake(self, domain: uuid.UUID) -> None:
        """Something about it has changed, but not its life. Called on libvirt's thread."""
        with self._changed:
            for event in self._waiters.get(domain, ()):
                event.set()

    def events_were_lost(self) -> None:
        """Wakes every waiter and tells the callbacks about every domain."""
        with self._changed:
            for events in self._waiters.values():
                for event in events:
                    event.set()
            if self._callbacks:
                self._some_lost = True
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the worker after the callback it is in."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._some_lost or self._closing)
                if self._closing:
                    return
                domains, self._pending = list(self._pending), {}
                lost, self._some_lost = self._some_lost, False
                callbacks = self._callbacks
            if lost:
                domains += [domain for domain in self._all_domains() if domain not in domains]
            for domain in domains:
                for callback in callbacks:
                    _call(callback, domain)

    def _all_domains(self) -> list[uuid.UUID]:
        try:
            return list(self._everything())
        except ShimError as exc:  # the connection is gone again: its return brings the next round
            _log.warning("cannot list the VMs after a reconnect: %s", exc)
            return []


def _call(callback: Callable[[uuid.UUID], None], domain: uuid.UUID) -> None:
    try:
        callback(domain)
    except Exception:  # noqa: BLE001  the edge of a thread: one bad callback must not end the events of all VMs
        _log.exception("a power event callback failed for domain %s", domain)
