"""Virtual machines in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.fakes.clock import FakeClock
from tests.fakes.journal import PATIENCE
from virtshim.domain.errors import AlreadyExists, InternalError, NotFound, WrongState
from virtshim.domain.vm import OffReason, OwnedDomain, Power, PowerState, VmSpec

ABSENT = PowerState(Power.ABSENT)
ON = PowerState(Power.RUNNING)


@dataclass
class Vm:
    spec: VmSpec
    state: PowerState = PowerState(Power.OFF)
    boots: int = 0


class FakeVms:
    """Implements `virtshim.ports.Hypervisor`. `shuts_down_after` seconds a guest is off after the power button was pressed,
    None: it does not listen. Power events wait in a queue until `deliver`, or until a thread of `delivering` takes them."""

    def __init__(self, clock: FakeClock) -> None:
        self.vms: dict[uuid.UUID, Vm] = {}
        self.foreign: set[uuid.UUID] = set()
        self.shuts_down_after: float | None = 0.0
        self.ends_at_once = False
        self.why_not = ""
        self.pressed: list[tuple[uuid.UUID, float]] = []
        self._clock = clock
        self._lock = threading.RLock()
        self._watchers: list[tuple[uuid.UUID, threading.Event]] = []
        self._callbacks: list[Callable[[uuid.UUID], None]] = []
        self._events: queue.Queue[uuid.UUID | None] = queue.Queue()

    # --- the port

    def define(self, spec: VmSpec) -> None:
        with self._lock:
            if spec.uuid in self.foreign:
                raise AlreadyExists(f"a libvirt domain with UUID {spec.uuid} exists and is not this node's")
            self.end(spec.uuid, OffReason.DESTROYED)
            self.vms[spec.uuid] = Vm(spec)

    def start(self, domain: uuid.UUID) -> None:
        with self._lock:
            vm = self.vms.get(domain)
            if vm is None:
                raise NotFound(f"no VM {domain}")
            if vm.state.is_on:
                raise WrongState(f"VM {domain} runs already")
            vm.state, vm.boots = ON, vm.boots + 1
            self._tell(domain)
            if self.ends_at_once:
                self.end(domain, OffReason.SHUTDOWN)

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        self.pressed.append((domain, self._clock.monotonic()))
        if self.shuts_down_after == 0:
            self.end(domain, OffReason.SHUTDOWN)
        elif self.shuts_down_after is not None:
            self._clock.at(self.shuts_down_after, lambda: self.end(domain, OffReason.SHUTDOWN))

    def destroy(self, domain: uuid.UUID) -> None:
        self.end(domain, OffReason.DESTROYED)

    def undefine(self, domain: uuid.UUID) -> None:
        with self._lock:
            if self.power(domain).is_on:
                raise InternalError(f"VM {domain} was undefined while it ran: it would run on, unknown to anybody")
            self.vms.pop(domain, None)

    def power(self, domain: uuid.UUID) -> PowerState:
        vm = self.vms.get(domain)
        return ABSENT if vm is None else vm.state

    def owned(self) -> Sequence[OwnedDomain]:
        return [
            OwnedDomain(vm.spec.uuid, vm.spec.name, vm.spec.container_id, vm.spec.sandbox_id, vm.state)
            for vm in self.vms.values()
        ]

    @contextlib.contextmanager
    def watching(self, domain: uuid.UUID) -> Iterator[threading.Event]:
        watcher = (domain, threading.Event())
        with self._lock:
            self._watchers.append(watcher)
        try:
            yield watcher[1]
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        self._callbacks.append(callback)

    def trouble(self) -> str:
        return self.why_not

    # --- what tests do

    def end(self, domain: uuid.UUID, reason: OffReason) -> None:
        """The VM goes off. Nothing happens if it is off."""
        with self._lock:
            vm = self.vms.get(domain)
            if vm is not None and vm.state.is_on:
                vm.state = PowerState(Power.OFF, reason)
                self._tell(domain)

    def pause(self, domain: uuid.UUID) -> None:
        self.vms[domain].state = PowerState(Power.PAUSED)

    def running(self) -> list[Vm]:
        return [vm for vm in self.vms.values() if vm.state.is_on]

    def add_stray(self, spec: VmSpec, state: PowerState = ON) -> None:
        self.vms[spec.uuid] = Vm(spec, state)

    def reboot(self) -> None:
        """The host starts anew: definitions stay, nothing runs, nobody was told."""
        for vm in self.vms.values():
            vm.state = PowerState(Power.OFF, OffReason.UNKNOWN)

    def forget_callbacks(self) -> None:
        """The process that listened is gone, and what it did not hear is lost."""
        self._callbacks.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()

    def deliver(self) -> None:
        """Calls the callbacks for each event so far."""
        with contextlib.suppress(queue.Empty):
            while (domain := self._events.get_nowait()) is not None:
                self._call_back(domain)

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """One worker thread calls the callbacks, as with libvirt."""

        def work() -> None:
            while (domain := self._events.get()) is not None:
                self._call_back(domain)

        worker = threading.Thread(target=work, name="vm-events")
        worker.start()
        try:
            yield
        finally:
            self._events.put(None)
            worker.join(PATIENCE)
            assert not worker.is_alive(), "a power event is still being worked on"

    def spec_with(self, spec: VmSpec, **changes: object) -> VmSpec:
        return dataclasses.replace(spec, **changes)

    def _call_back(self, domain: uuid.UUID) -> None:
        for callback in list(self._callbacks):
            callback(domain)

    def _tell(self, domain: uuid.UUID) -> None:
        for watched, event in self._watchers:
            if watched == domain:
                event.set()
        self._events.put(domain)
