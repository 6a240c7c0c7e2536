"""The fake hypervisor with scripted guests and power events that a test delivers."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fakes.cgroups import FakeVmCgroups
from fakes.clock import FakeClock
from fakes.hypervisor import FakeDomain, FakeHypervisor

from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason, Power, PowerState, VmSpec


class FakeVms(FakeHypervisor):
    """`shuts_down_after`: seconds of the clock between power button and shutdown, None: the guest ignores it. Power
    events wait for `deliver`; with `by_itself` a thread delivers them, as with libvirt."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.shuts_down_after: float | None = 0.0
        self.ends_at_once = False
        self.by_itself = False
        self.pressed: list[tuple[uuid.UUID, float]] = []
        self._clock = clock
        # The cgroups of the same node: tapmanager gives a sandbox's network to one QEMU for each `make`.
        self.cgroups: FakeVmCgroups | None = None

    def start(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        super().start(domain, container)
        self.use_network(domain)
        if self.ends_at_once:
            self.end(domain, OffReason.SHUTDOWN)

    def power_on(self, domain: uuid.UUID) -> None:
        """Starts the VM while tapmanager has the pod's network open."""
        super().start(domain)

    def restore(self, domain: uuid.UUID, container: ContainerId, memory: str, moved: Mapping[str, str]) -> None:
        super().restore(domain, container, memory, moved)
        self.use_network(domain)

    def await_memory(self, domain: uuid.UUID, container: ContainerId, theirs: str, moved: Mapping[str, str]) -> None:
        super().await_memory(domain, container, theirs, moved)
        self.use_network(domain)

    def use_network(self, domain: uuid.UUID) -> None:
        spec = self.spec(domain)
        if self.cgroups is None or not spec.fetch_key:
            return
        if spec.sandbox_id not in self.cgroups.armed:
            self._end(domain, OffReason.FAILED)
            raise InternalError(f"the network of sandbox {spec.sandbox_id} is not open")
        self.cgroups.armed.discard(spec.sandbox_id)

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        self.pressed.append((domain, self._clock.monotonic()))
        if self.shuts_down_after == 0:
            super().ask_to_shut_down(domain)
        elif self.shuts_down_after is not None:
            self._clock.at(self.shuts_down_after, lambda: self.end(domain, OffReason.SHUTDOWN))

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        if self.by_itself:
            super().on_power_event(callback)
        else:
            self._callbacks.append(callback)

    def deliver(self) -> None:
        """Calls the callbacks for each event so far."""
        if self.by_itself:
            self.settle()
            return
        with contextlib.suppress(queue.Empty):
            while True:
                domain = self._events.get_nowait()
                assert isinstance(domain, uuid.UUID)
                for callback in list(self._callbacks):
                    callback(domain)

    def forget(self) -> None:
        """Forgets the process that listened; undelivered events are lost."""
        super().forget()
        with contextlib.suppress(queue.Empty):
            while not self.by_itself:
                self._events.get_nowait()

    def end(self, domain: uuid.UUID, reason: OffReason) -> None:
        """Ends the VM. Does nothing if it is off."""
        self._end(domain, reason)

    def running(self) -> list[VmSpec]:
        return [d.spec for d in self.domains.values() if d.spec is not None and d.state.is_on]

    def spec(self, domain: uuid.UUID) -> VmSpec:
        spec = self.domains[domain].spec
        assert spec is not None
        return spec

    def add_stray(self, like: VmSpec, power: Power = Power.RUNNING, **changes: Any) -> None:
        """Adds a VM with our mark but without a record."""
        spec = dataclasses.replace(like, uuid=uuid.uuid4(), **changes)
        self.domains[spec.uuid] = FakeDomain(spec.name, spec, PowerState(power))
