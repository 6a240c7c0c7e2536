"""Makes the host devices of an ended VM fit for the next one. Runs outside the pod's lock, on threads that record no
ends.

The claims are the journal. An ended container keeps them until its devices are clean, or recorded as broken, so that
nobody else gets a device before, even after a crash. Unfinished releases start again.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.devices.health import with_devices
from virtshim.devices.resets import DeviceResets
from virtshim.devices.unplug import UsbReprobe
from virtshim.model.container import Container, ContainerPhase
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.store.ports import Records
from virtshim.system.locks import Inflight, PodLocks, new_lock
from virtshim.system.threads import started

log = structlog.get_logger(__name__)

# Releases in the background at once, each of another container. A caller that waits for a queued release makes it
# itself.
_MAX: Final = 8
# Seconds that running releases get when the daemon stops. The next start repeats the unfinished ones.
_CLOSE: Final = 5.0


@dataclass(slots=True)
class DeviceReleases:
    """`resets`: whether virtshim resets functions. `timeout`: seconds for each call to tapmanager. Thread-safe."""

    records: Records
    resetting: DeviceResets
    usb: UsbReprobe
    locks: PodLocks
    timeout: float
    resets: bool
    _running: Inflight[None] = field(default_factory=Inflight[None])
    _lock: threading.Lock = field(default_factory=new_lock)
    _waiting: dict[ContainerId, None] = field(default_factory=dict)
    _threads: set[threading.Thread] = field(default_factory=set)
    _closing: bool = False

    def begin(self, container: ContainerId) -> None:
        """Queues the release and returns at once. Does nothing if it is queued or running."""
        with self._lock:
            if self._closing or container in self._waiting or self._running.is_running(_key(container)):
                return
            if len(self._threads) < _MAX and not self._has_another_thread():
                return
            self._waiting[container] = None

    def _has_another_thread(self) -> bool:
        """Starts a thread; the caller holds the lock. If the system has no thread, the next look at all pods starts the
        release."""
        try:
            self._threads.add(started(threading.Thread(target=self._work, name="device-release", daemon=True)))
        except RuntimeError as exc:
            log.warning("devices.release_not_begun", error=str(exc))
            return False
        return True

    def begin_all(self) -> None:
        """Queues all unfinished releases: virtshim was killed, or a record could not be written."""
        for container in self.records.containers.all():
            if container.owes_devices:
                self.begin(container.id)

    def finish(self, container: ContainerId, timeout: float | None = None) -> None:
        """Releases the devices, or waits for a running release. On return the devices are free, and failed resets are
        recorded. `timeout`: seconds to wait; None sets no limit. The caller must not hold the pod's lock, because the
        last step takes it. After a ShimError the claims stay."""
        found = self.records.containers.get(container)
        if found is not None and _is_due(found):
            longest = self.timeout * (1 + len(found.claims)) if timeout is None else timeout
            self._running.run(_key(container), None, lambda: self._release(container), longest)

    def try_to_finish(self, container: ContainerId) -> None:
        """Like `finish`, but only logs a failure: it is repeated soon, and until then the claims keep the devices."""
        try:
            self.finish(container)
        except ShimError as exc:
            log.warning("devices.unreleased", container=container.short, error=str(exc))

    def close(self) -> None:
        """Starts no more releases, and waits briefly for running ones."""
        with self._lock:
            self._closing = True
            self._waiting.clear()
            threads = tuple(self._threads)
        until = time.monotonic() + _CLOSE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (container := self._next()) is not None:
            if self._running.is_running(_key(container)):
                continue  # a caller that waits for it has made it
            try:
                self.try_to_finish(container)
            except BaseException:  # any error: the thread must serve the other containers
                log.exception("devices.release_broken", container=container.short)

    def _next(self) -> ContainerId | None:
        """None ends the thread."""
        with self._lock:
            for container in self._waiting:
                del self._waiting[container]
                return container
            self._threads.discard(threading.current_thread())
            return None

    def _release(self, wanted: ContainerId) -> None:
        found = self.records.containers.get(wanted)
        if found is None or not _is_due(found):
            return
        self.usb.after(found)
        wrong = self.resetting.after(found) if self.resets else []
        with self.locks.held(found.sandbox_id):
            now = self.records.containers.get(wanted)
            if now is not None:
                self.records.containers.replace(_without_devices(now, wrong))
        log.info("devices.released", container=wanted.short, devices=list(found.claims), wrong=wrong)


def _key(container: ContainerId) -> str:
    return f"release of the devices of container {container}"


def _is_due(container: Container) -> bool:
    """Whether devices wait for release. RemoveContainer asks after it has ended the VM. Pure."""
    removed = container.phase is ContainerPhase.REMOVING and container.status.started_at > 0 and container.claims != ()
    return container.owes_devices or removed


def _without_devices(container: Container, wrong: list[str]) -> Container:
    """The record without claims; its exit's message lists the faults of its devices. Pure."""
    how = container.exit
    told = how and dataclasses.replace(how, message=with_devices(how.message, wrong))
    return Container(container.spec, dataclasses.replace(container.status, exit=told, claims=()))
