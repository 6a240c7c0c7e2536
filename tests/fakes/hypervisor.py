"""Virtual machines in memory."""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtshim.devices.guest_view import guest_buses
from virtshim.model.errors import Aborted, AlreadyExists, NotFound, ShimError, Unavailable, WrongState
from virtshim.model.hardware import Firmware, FirmwareFiles
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import OffReason, OwnedDomain, PauseReason, Power, PowerState, VmSpec
from virtshim.store.ports import DomainInventory, DomainMetadata

_ABSENT = PowerState(Power.ABSENT)
_WAIT_LIMIT = 30.0


@dataclass
class FakeDomain:
    """`spec` is None for a foreign domain. `boots` counts starts. `plugged`: the host devices of the running VM."""

    name: str
    spec: VmSpec | None
    state: PowerState = PowerState(Power.OFF)
    boots: int = 0
    plugged: tuple[str, ...] = ()


class FakeHypervisor:
    """Implements `virtshim.vm.ports.Hypervisor`. Definitions and running VMs stay when the process that made them dies
    (`forget`). Guests obey the power button unless their UUID is in `deaf`. `why_not` makes every call Unavailable.
    They let go of devices unless their UUID is in `keeps_devices`.
    `unreadable` are domains that a listing cannot read, `other_nodes` and `other_sandboxes` what it sees of others."""

    def __init__(self) -> None:
        self.domains: dict[uuid.UUID, FakeDomain] = {}
        self.deaf: set[uuid.UUID] = set()
        self.keeps_devices: set[uuid.UUID] = set()
        self.full: set[uuid.UUID] = set()
        self.saved: dict[str, uuid.UUID] = {}
        self.restored: list[uuid.UUID] = []
        # VMs whose QEMU waits for a guest of another node.
        self.awaiting: set[uuid.UUID] = set()
        self.why_not = ""
        # The machine type of a new VM; an upgraded QEMU has another one.
        self.machine_type = "pc-q35-7.2"
        # The CPUs of each NUMA node of the host.
        self.host_nodes = {0: frozenset(range(4))}
        # Bytes that programs of the node can still get.
        self.free_memory = 1 << 40
        # Ended VMs that libvirt has not processed yet: if one is destroyed now, that counts as its end.
        self.lingering: set[uuid.UUID] = set()
        # The TPM state of removed VMs.
        self.left_tpms: set[uuid.UUID] = set()
        # The firmware of the node's packages.
        self.firmware = {kind: FirmwareFiles(f"/{kind.value}/code", f"/{kind.value}/vars") for kind in Firmware}
        # The paths of UEFI variables, which the first start creates.
        self.variables: set[str] = set()
        # The links that were set, with the power of the VM at that moment.
        self.links: list[tuple[uuid.UUID, bool, Power]] = []
        self.agent_callbacks: list[Callable[[uuid.UUID], None]] = []
        # VMs whose guests have the agent's port open.
        self.with_agent: set[uuid.UUID] = set()
        self.unreadable: set[str] = set()
        # The records in definitions of earlier versions.
        self.carried: dict[uuid.UUID, str] = {}
        self.other_nodes: dict[ContainerId, str] = {}
        self.other_sandboxes: frozenset[SandboxId] = frozenset()
        self._lock = threading.RLock()
        self._waiters: list[tuple[uuid.UUID, threading.Event]] = []
        self._callbacks: list[Callable[[uuid.UUID], None]] = []
        self._events: queue.SimpleQueue[uuid.UUID | threading.Event | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    # the port

    def define(self, spec: VmSpec) -> None:
        self._reach("define")
        with self._lock:
            there = self.domains.get(spec.uuid)
            if there is not None and there.spec is None:
                raise AlreadyExists(f"VM {spec.name}: a foreign domain with UUID {spec.uuid} exists")
            if there is not None and there.state.is_on:
                raise WrongState(f"VM {spec.name} is running")
            if spec.hardware.tpm and not spec.owns_tpm and spec.uuid in self.left_tpms:
                raise AlreadyExists(f"VM {spec.name}: an earlier VM's TPM is there")
            if any(d.name == spec.name for u, d in self.domains.items() if u != spec.uuid):
                raise AlreadyExists(f"VM {spec.name}: a domain of that name exists")
            self.domains[spec.uuid] = FakeDomain(spec.name, spec)
        self._tell(spec.uuid)

    def firmware_of(self, kind: Firmware) -> FirmwareFiles | None:
        return self.firmware.get(kind)

    def start(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        self._reach("start")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container):
                raise NotFound(f"no VM {domain}")
            if there.state.is_on:
                raise WrongState(f"VM {domain} is running already")
            there.boots += 1
            if there.spec is not None:
                self.variables |= {there.spec.nvram} - {""}
                there.plugged = tuple(f"ua-host-pci{bus}" for bus, _ in guest_buses(there.spec.granted.passthrough))
        self._change(domain, PowerState(Power.RUNNING))

    def restore(self, domain: uuid.UUID, container: ContainerId, memory: str, moved: Mapping[str, str]) -> None:
        """Counts as no boot."""
        self._reach("restore")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container):
                raise NotFound(f"no VM {domain}")
            if there.state.is_on:
                raise WrongState(f"VM {domain} is running already")
            if Path(memory).read_bytes() != domain.bytes:
                raise WrongState(f"the saved state in {memory} is not that of VM {domain}")
            self.restored.append(domain)
        self._change(domain, PowerState(Power.PAUSED))

    def use_network(self, domain: uuid.UUID) -> None:
        """A start uses up the pod's network, if somebody gives pods one."""

    def await_memory(self, domain: uuid.UUID, container: ContainerId, theirs: str, moved: Mapping[str, str]) -> None:
        """Counts as no boot."""
        self._reach("await memory")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container):
                raise NotFound(f"no VM {domain}")
            if there.state.is_on:
                raise WrongState(f"VM {domain} is running already")
            if str(domain) not in theirs:
                raise WrongState(f"the definition is not that of VM {domain}")
            self.awaiting.add(domain)
        self._change(domain, PowerState(Power.PAUSED))

    def accept_disks(self, domain: uuid.UUID, container: ContainerId, their_images: str, images: str) -> None:
        self._reach("accept disks")

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        self._reach("shut down")
        if domain not in self.deaf:
            self._end(domain, OffReason.SHUTDOWN)

    def destroy(self, domain: uuid.UUID, container: ContainerId) -> None:
        self._reach("destroy")
        if self._is_of(domain, container):
            self._end(domain, OffReason.DESTROYED)
            if domain in self.lingering:
                self.lingering.discard(domain)
                self._change(domain, PowerState(Power.OFF, OffReason.DESTROYED))

    def unplug(self, domain: uuid.UUID, container: ContainerId, timeout: float) -> Sequence[str]:
        """Implements `virtshim.vm.ports.VmUnplugging`."""
        self._reach("unplug")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container) or not there.state.is_on:
                return ()
            if there.state.power is Power.RUNNING and domain not in self.keeps_devices:
                there.plugged = ()
            return there.plugged

    def undefine(self, domain: uuid.UUID, container: ContainerId) -> None:
        self._reach("undefine")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container):
                return
            if there.state.is_on:
                raise WrongState(f"VM {domain} is running")
            del self.domains[domain]
        self._tell(domain)

    def reset(self, domain: uuid.UUID) -> None:
        """Implements `virtshim.vm.ports.VmControl`, with the next two."""
        self._reach("reset")
        with self._lock:
            there = self._ours(domain)
            if there is None:
                raise NotFound(f"no VM {domain}")
            if not there.state.is_on:
                raise WrongState(f"VM {domain} is off")
            there.boots += 1
        self._tell(domain)

    def definition(self, domain: uuid.UUID) -> str:
        self._reach("read")
        there = self._ours(domain)
        if there is None:
            raise NotFound(f"no VM {domain}")
        return f"<domain type='fake'><name>{there.name}</name></domain>\n"

    def on_agent(self, callback: Callable[[uuid.UUID], None]) -> None:
        self.agent_callbacks.append(callback)

    def look_for_agent(self, domain: uuid.UUID) -> None:
        self._reach("look for agent")
        if self._ours(domain) is None:
            raise NotFound(f"no VM {domain}")
        for tell in self.agent_callbacks if domain in self.with_agent else ():
            tell(domain)

    def out_of_space(self, domain: uuid.UUID) -> bool:
        self._reach("disk errors")
        return domain in self.full

    def pause(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        self._reach("pause")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container):
                raise NotFound(f"no VM {domain}")
            if there.state.power is not Power.RUNNING:
                raise WrongState(f"VM {domain} is not running")
        self._change(domain, PowerState(Power.PAUSED))

    def save_memory(
        self,
        domain: uuid.UUID,
        path: str,
        timeout: float,
        container: ContainerId | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        self._reach("save")
        if self.power(domain).power is not Power.PAUSED or not self._is_of(domain, container):
            raise Aborted(f"VM {domain} ended")
        self.saved[path] = domain
        if Path(path).parent.is_dir():
            Path(path).write_bytes(domain.bytes)

    def resume(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        self._reach("resume")
        with self._lock:
            there = self._ours(domain)
            is_its = self._is_of(domain, container)
            paused = is_its and there is not None and there.state.power is Power.PAUSED
        if paused:
            self.full.discard(domain)
            self._change(domain, PowerState(Power.RUNNING))

    def set_links(self, domain: uuid.UUID, container: ContainerId, *, up: bool) -> None:
        self._reach("set links")
        with self._lock:
            there = self._ours(domain)
            if there is None or not self._is_of(domain, container):
                raise NotFound(f"no VM {domain}")
            if not there.state.is_on:
                raise WrongState(f"VM {domain} is off")
            self.links.append((domain, up, there.state.power))

    def power(self, domain: uuid.UUID) -> PowerState:
        self._reach("power")
        with self._lock:
            there = self._ours(domain)
            return _ABSENT if there is None else there.state

    def owned(self) -> Sequence[OwnedDomain]:
        self._reach("list")
        return self.owned_now()

    def owned_now(self) -> Sequence[OwnedDomain]:
        """The owned VMs, even when libvirt cannot be reached."""
        with self._lock:
            return [
                OwnedDomain(found, d.name, d.spec.container_id, d.spec.sandbox_id, d.state)
                for found, d in self.domains.items()
                if d.spec is not None
            ]

    def take(self) -> DomainInventory:
        """Implements `virtshim.store.ports.VmInventory`, with the next."""
        self._reach("list")
        owned = [domain for domain in self.owned_now() if domain.name not in self.unreadable]
        return DomainInventory(owned, tuple(self.unreadable), dict(self.other_nodes), self.other_sandboxes)

    def take_records_out(self, keep: Callable[[ContainerId, str], None]) -> None:
        self._reach("list")
        with self._lock:
            carried = [
                (found, d.spec.container_id) for found, d in self.domains.items() if d.spec and found in self.carried
            ]
        for found, container in carried:
            with contextlib.suppress(ShimError):
                keep(container, self.carried[found])
                del self.carried[found]

    def domain_metadata(self, domain: uuid.UUID) -> DomainMetadata:
        self._reach("read")
        with self._lock:
            there = self._ours(domain)
            if there is None or there.spec is None:
                raise NotFound(f"no VM {domain}")
            spec = there.spec
            return DomainMetadata(spec.title, spec.fetch_key, there.boots > 0, spec.uid)

    @contextlib.contextmanager
    def watching(self, domain: uuid.UUID) -> Iterator[threading.Event]:
        entry = (domain, threading.Event())
        with self._lock:
            self._waiters.append(entry)
        try:
            yield entry[1]
        finally:
            with self._lock:
                self._waiters = [waiter for waiter in self._waiters if waiter is not entry]

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="fake-power-events", daemon=True)
                self._worker.start()

    def trouble(self) -> str:
        return self.why_not

    # events without a call of ours

    def crash(self, domain: uuid.UUID) -> None:
        """Makes QEMU die."""
        self._end(domain, OffReason.CRASHED)

    def panic(self, domain: uuid.UUID) -> None:
        """Makes the guest's kernel panic; QEMU stays."""
        self._change(domain, PowerState(Power.CRASHED))

    def halt(self, domain: uuid.UUID, why: PauseReason = PauseReason.IO_ERROR) -> None:
        """Pauses the VM from outside. IO_ERROR: the node's disk is full."""
        if why is PauseReason.IO_ERROR:
            self.full.add(domain)
        self._change(domain, PowerState(Power.PAUSED, pause=why))

    def add_foreign(self, domain: uuid.UUID, name: str) -> None:
        """Adds a running VM of somebody else."""
        self.domains[domain] = FakeDomain(name, None, PowerState(Power.RUNNING))

    def reboot_host(self) -> None:
        """Reboots the host: all VMs are off without a known reason; definitions stay."""
        for there in self.domains.values():
            there.state = PowerState(Power.OFF)

    def forget(self) -> None:
        """Forgets the process that watched; the VMs stay."""
        with self._lock:
            self._waiters.clear()
            self._callbacks.clear()

    def settle(self) -> None:
        """Waits until all callbacks so far have run."""
        if self._worker is not None:
            done = threading.Event()
            self._events.put(done)
            assert done.wait(_WAIT_LIMIT), "a power event callback does not return"

    def close(self) -> None:
        if self._worker is not None:
            self._events.put(None)
            self._worker.join(_WAIT_LIMIT)
            self._worker = None

    # inside

    def _reach(self, what: str) -> None:
        if self.why_not:
            raise Unavailable(f"{what}: {self.why_not}")

    def _ours(self, domain: uuid.UUID) -> FakeDomain | None:
        there = self.domains.get(domain)
        return there if there is not None and there.spec is not None else None

    def _is_of(self, domain: uuid.UUID, container: ContainerId | None) -> bool:
        there = self._ours(domain)
        if container is None:
            return True
        return there is not None and there.spec is not None and there.spec.container_id == container

    def _end(self, domain: uuid.UUID, reason: OffReason) -> None:
        with self._lock:
            there = self._ours(domain)
            is_on = there is not None and there.state.is_on
        if is_on:
            self._change(domain, PowerState(Power.OFF, reason))

    def _change(self, domain: uuid.UUID, state: PowerState) -> None:
        with self._lock:
            self.domains[domain].state = state
        self._tell(domain)

    def _tell(self, domain: uuid.UUID) -> None:
        with self._lock:
            for watched, event in self._waiters:
                if watched == domain:
                    event.set()
        self._events.put(domain)

    def _work(self) -> None:
        while (item := self._events.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            for callback in list(self._callbacks):
                # Like the real one: a failing callback does not end the events.
                with contextlib.suppress(Exception):
                    callback(item)
