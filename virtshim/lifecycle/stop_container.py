"""StopContainer: ACPI power button, wait for the event, destroy after the grace period."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field

import structlog

from virtshim.domain.container import Container, ContainerPhase
from virtshim.domain.errors import InternalError
from virtshim.domain.ids import ContainerId
from virtshim.lifecycle.boot_progress import BootProgress
from virtshim.lifecycle.record_exit import ExitRecorder
from virtshim.lifecycle.termination_message import TerminationMessages
from virtshim.passthrough.assembly import DeviceServices
from virtshim.ports.clock import Clock
from virtshim.ports.hypervisor import Hypervisor
from virtshim.ports.records import Records
from virtshim.primitives.pod_locks import PodLocks

log = structlog.get_logger(__name__)

# A guest that is still booting may not listen to its power button yet, so the button is pressed again now and then.
_PRESS_AGAIN = 5.0


@dataclass(slots=True)
class _Stop:
    """One stop under way. `until` is a point of the monotonic clock; a later caller may bring it forward."""

    until: float
    grace: float
    wake: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class StopContainer:
    def __init__(
        self,
        records: Records,
        hypervisor: Hypervisor,
        exits: ExitRecorder,
        clock: Clock,
        locks: PodLocks,
        *,
        termination_messages: TerminationMessages,
        devices: DeviceServices,
        boots: BootProgress,
    ) -> None:
        self._records = records
        self._hypervisor = hypervisor
        self._exits = exits
        self._clock = clock
        self._locks = locks
        self._termination_messages = termination_messages
        self._unplug = devices.unplug
        self._boots = boots
        self._releases = devices.releases
        self._lock = threading.Lock()
        self._stops: dict[ContainerId, _Stop] = {}

    def stop(self, container: Container, grace: float) -> None:
        """Returns when the container is not running any more, and its devices are free or known to be broken: kubelet may
        grant them anew. `grace` in seconds, 0 ends it at once. Overlapping calls share one stop and the shortest grace wins."""
        with self._locks.held(container.sandbox_id):  # behind a StartContainer that is under way
            found = self._records.containers.get(container.id)
            # Of one whose record cannot be read a VM may run.
            may_run = found is not None and found.phase in (ContainerPhase.RUNNING, ContainerPhase.UNKNOWN)
        if found is not None and may_run:
            self._stop(found, grace)
        self._releases.try_to_finish(container.id)

    def _stop(self, container: Container, grace: float) -> None:
        until = self._clock.monotonic() + grace
        with self._lock:
            running = self._stops.get(container.id)
            if running is not None and until < running.until:
                running.until, running.grace = until, grace
                running.wake.set()
            mine = None if running is not None else self._stops.setdefault(container.id, _Stop(until, grace))
        if mine is not None:
            self._lead(container, mine)
        elif running is not None:
            running.done.wait()
            if running.error is not None:
                raise running.error

    def kill(self, container: Container, message: str) -> None:
        """Ends its VM now, whoever else is stopping it. Waits for no other stop and for no devices, so it may be called with the
        pod's lock held; `stop` may not: what it joins needs that lock."""
        self._unplug.before_kill(container, message)
        self._hypervisor.destroy(container.domain_uuid, container.id)
        self._settled(container, message)

    def _lead(self, container: Container, stop: _Stop) -> None:
        try:
            self._termination_messages.collect(container, stop.until - self._clock.monotonic())
            self._shut_down(container, stop)
        except Exception as exc:
            stop.error = exc
            raise
        finally:
            with self._lock:
                del self._stops[container.id]
            stop.done.set()

    def _shut_down(self, container: Container, stop: _Stop) -> None:
        domain = container.domain_uuid
        message = ""
        if stop.grace and self._boots.is_before_kernel(container):
            message = "killed: the guest had not begun to boot its kernel"
        elif not self._went_by_itself(container.id, domain, stop):
            message = (
                f"killed: the guest did not shut down within {stop.grace:g} s"
                if stop.grace
                else "killed: no grace period"
            )
        if message:
            log.info("vm.destroy", container=container.id.short, grace_s=stop.grace)
            self._exits.note_kill(container.id, message)
            self._unplug.before_kill(container, message)
            self._hypervisor.destroy(domain, container.id)
        self._settled(container, message)

    def _settled(self, container: Container, message: str) -> None:
        after = self._exits.record_if_ended(container.id, message)
        if after is not None and after.is_running:
            raise InternalError(
                f"the virtual machine of container {container.id} is still running after it was destroyed"
            )

    def _went_by_itself(self, container: ContainerId, domain: uuid.UUID, stop: _Stop) -> bool:
        """True once the VM is off; False when the grace period is over first."""
        with self._hypervisor.watching(domain) as changed:
            with self._lock:
                # One event for both the domain and a caller with a shorter grace period: one wait is enough.
                stop.wake = changed
            pressed = float("-inf")
            while True:
                changed.clear()  # before the reads below: what happens after them is not missed
                if not self._hypervisor.power(domain).is_on:
                    return True
                now = self._clock.monotonic()
                if now >= stop.until:
                    return False
                if now - pressed >= _PRESS_AGAIN:
                    log.info("vm.shutdown.asked", container=container.short, grace_s=stop.grace)
                    self._hypervisor.ask_to_shut_down(domain)
                    pressed = now
                self._clock.wait(changed, min(stop.until - now, _PRESS_AGAIN))
