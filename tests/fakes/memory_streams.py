"""Memory that moves between the VMs of two worlds. A guest's memory is the UUID of its VM."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

from fakes.hypervisor import FakeHypervisor

from virtshim.model.errors import NotFound, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power
from virtshim.vm.guest_needs import GuestNeeds, QemuHere, SavedMemory
from virtshim.vm.streams import StreamState

_WAIT_LIMIT = 30.0


class FakeMemoryStreams:
    """Implements `virtshim.vm.ports.MemoryStreams`. A guest is stopped as soon as its memory is asked for."""

    def __init__(self, vms: FakeHypervisor) -> None:
        self._vms = vms
        self.blocked: tuple[str, ...] = ()
        # Whether QEMU cannot use what it reads.
        self.refuses_memory = False
        # What a guest of this node needs of the next one, and what this node has.
        self.needed = GuestNeeds("pc-q35-7.2", (7, 2), None, (1,))
        self.has = QemuHere((7, 2))
        self.finds_all_writes = True
        # VMs whose devices alone move.
        self._devices_alone: set[uuid.UUID] = set()
        self._out: dict[uuid.UUID, int] = {}
        self._states: dict[uuid.UUID, StreamState] = {}
        self._reading: dict[uuid.UUID, threading.Thread] = {}

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        self._power(domain)
        return f"<domain type='fake'><uuid>{domain}</uuid></domain>"

    def can_copy_while_running(self, domain: uuid.UUID, container: ContainerId) -> bool:
        self._power(domain)
        return self.finds_all_writes

    def blockers(self, domain: uuid.UUID, container: ContainerId) -> tuple[str, ...]:
        self._power(domain)
        return self.blocked

    def needs(self, domain: uuid.UUID, container: ContainerId) -> GuestNeeds:
        self._power(domain)
        return self.needed

    def saved(self, memory: str) -> SavedMemory:
        content = Path(memory).read_bytes()
        domain = uuid.UUID(bytes=content)
        return SavedMemory(f"<domain type='fake'><uuid>{domain}</uuid></domain>", self.needed, 1 << 30, 0)

    def here(self, needs: GuestNeeds) -> QemuHere:
        return self.has

    def leave_memory_out(self, domain: uuid.UUID, container: ContainerId, *, left_out: bool) -> None:
        self._power(domain)
        (self._devices_alone.add if left_out else self._devices_alone.discard)(domain)

    def _content(self, domain: uuid.UUID) -> bytes:
        return b"devices" if domain in self._devices_alone else domain.bytes

    def send(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        if self._power(domain) is Power.RUNNING:
            self._vms.pause(domain, container)
        self._out[domain] = os.dup(pipe)
        self._states[domain] = StreamState(stopped=True)

    def go_on(self, domain: uuid.UUID, container: ContainerId) -> None:
        if self._power(domain) is not Power.PAUSED:
            raise WrongState(f"VM {domain} is off")
        pipe = self._out.pop(domain)
        try:
            os.write(pipe, self._content(domain))
        finally:
            os.close(pipe)
        self._states[domain] = StreamState(done=True)

    def receive(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        if domain not in self._vms.awaiting:
            raise WrongState(f"VM {domain} does not wait for memory")
        own = os.dup(pipe)
        self._reading[domain] = threading.Thread(target=self._read, args=(domain, own), daemon=True)
        self._reading[domain].start()

    def _read(self, domain: uuid.UUID, pipe: int) -> None:
        with open(pipe, "rb") as source:
            found = source.read()
        if found == self._content(domain) and not self.refuses_memory:
            self._vms.awaiting.discard(domain)
            self._states[domain] = StreamState(done=True)
        else:
            self._states[domain] = StreamState(failed="QEMU could not move the guest's memory: Invalid argument")

    def state(self, domain: uuid.UUID, container: ContainerId) -> StreamState:
        self._power(domain)
        if (reading := self._reading.get(domain)) is not None:
            reading.join(_WAIT_LIMIT)
        return self._states.get(domain, StreamState())

    def cancel(self, domain: uuid.UUID, container: ContainerId) -> None:
        self._power(domain)
        if (pipe := self._out.pop(domain, None)) is not None:
            os.close(pipe)
            self._vms.resume(domain, container)

    def _power(self, domain: uuid.UUID) -> Power:
        state = self._vms.power(domain)
        if state.power is Power.ABSENT:
            raise NotFound(f"no VM {domain}")
        if not state.is_on:
            raise WrongState(f"VM {domain} is off")
        return state.power
