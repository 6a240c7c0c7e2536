"""Which container has which device of the host: granted, checked, taken under a key that only one can have."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import structlog

from virtshim.devices.guest_view import guest_view_refuse_too_many
from virtshim.devices.ports import BorrowedTable, DeviceDrivers, Devices
from virtshim.devices.releases import DeviceReleases
from virtshim.devices.resets import DeviceResets
from virtshim.devices.values import VFIO_PCI, BorrowedDevice, DeviceRequest, GrantedDevices, PciFunction, is_vfio_driver
from virtshim.model.container import Container, ContainerConfig, ContainerName, ContainerPhase
from virtshim.model.errors import DeadlineExceeded, NotFound, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.network import PodNetwork, nics_of, passed_through
from virtshim.model.sandbox import Sandbox
from virtshim.model.vm import VmSize
from virtshim.store.ports import Records
from virtshim.vm.ports import Hypervisor

# PCI functions that are taken from their drivers for a VM, and given back when no container holds them.

log = structlog.get_logger(__name__)


class BorrowedDevices:
    """`binds`: whether devices are taken at all; elsewhere a device plugin, or libvirt, does it. `timeout`: seconds for each call
    to tapmanager. Taking and giving back one device exclude each other; a device whose driver hangs delays no other."""

    def __init__(
        self, records: Records, table: BorrowedTable, drivers: DeviceDrivers, timeout: float, *, binds: bool
    ) -> None:
        self._records = records
        self._table = table
        self._drivers = drivers
        self._timeout = timeout
        self._binds = binds
        self._locks: dict[str, threading.Lock] = {}

    def take(self, granted: GrantedDevices) -> None:
        """The caller's container holds the claims already. The row is written before the driver changes, so that after a crash
        the device finds its way back."""
        if not self._binds:
            return
        for device in granted.passthrough:
            if isinstance(device, PciFunction):
                with self._lock(device.claim):
                    self._take(device)

    def _take(self, device: PciFunction) -> None:
        address = device.address
        if self._table.get(device.claim) is None:
            driver = self._drivers.driver(address, self._timeout)
            # A plugin, or the machine's own set-up, has bound it: maybe to a variant of its vendor's.
            if is_vfio_driver(driver):
                return
            self._table.add(BorrowedDevice(address, driver))
        self._drivers.bind(address, VFIO_PCI, self._timeout)
        log.info("device.taken", device=str(address))

    def idle(self) -> Sequence[BorrowedDevice]:
        """Those that no container holds, and that are still to be given back."""
        held = {claim for container in self._records.containers.all() for claim in container.claims}
        return [device for device in self._table.all() if device.claim not in held]

    def give_back_of(self, container: Container) -> None:
        """What that container had, which is gone. What cannot be given back now is left to the reconciler, and to the next start;
        so are all that follow one whose driver hangs."""
        had = {*container.granted.claims, *container.claims}
        for device in self.idle():
            if device.claim in had:
                try:
                    self.give_back(device)
                except DeadlineExceeded:
                    return
                except ShimError:  # told
                    continue

    def give_back(self, device: BorrowedDevice) -> None:
        """Nothing happens if a container holds it now. Raises ShimError."""
        with self._lock(device.claim):
            if all(device.claim != idle.claim for idle in self.idle()):
                return
            try:
                with contextlib.suppress(NotFound):  # unplugged
                    self._drivers.bind(device.address, device.driver, self._timeout)
                self._table.delete(device.claim)
            except ShimError as exc:
                log.warning("device.not_given_back", device=str(device.address), driver=device.driver, error=str(exc))
                raise
        log.info("device.given_back", device=str(device.address), driver=device.driver)

    def _lock(self, claim: str) -> threading.Lock:
        return self._locks.setdefault(claim, threading.Lock())


class NotYetFree(WrongState):
    """Of an ended VM, and about to be free."""

    def __init__(self, message: str, container: ContainerId) -> None:
        super().__init__(message)
        self.container = container


@dataclass(frozen=True, slots=True)
class DeviceClaims:
    """A claim is held from CreateContainer until the VM is off for good: an ended container keeps its record, often for as
    long as its pod, while kubelet has given its devices to others. A container that was never started holds its claims too,
    until its sandbox is stopped, but not against a later one of that sandbox."""

    records: Records
    hypervisor: Hypervisor
    devices: Devices
    resets: DeviceResets
    releases: DeviceReleases

    def resolve(self, sandbox: Sandbox, name: ContainerName, config: ContainerConfig) -> GrantedDevices:
        """What is behind the request. Raises InvalidRequest, Unavailable."""
        request = DeviceRequest(
            namespace=sandbox.key.namespace,
            pod=sandbox.key.name,
            container=name.name,
            devices=config.devices,
            cdi=config.cdi,
            envs=_joined(config.envs),
        )
        granted = _with_nics(self.devices.resolve(request), sandbox.network)
        guest_view_refuse_too_many(granted)
        return granted

    def check(self, granted: GrantedDevices, size: VmSize) -> None:
        """WrongState if one of them cannot be attached now; NotYetFree for one that waits for its reset."""
        if granted.passthrough:
            for other in self.records.containers.all():
                if other.owes_devices and (shared := set(other.claims).intersection(granted.claims)):
                    raise self._held(other, sorted(shared))
            self.devices.check(granted.passthrough, guest_memory=size.max_memory_bytes)
            self.resets.refuse_broken(granted)

    def end_earlier(self, granted: GrantedDevices, sandbox: Sandbox) -> frozenset[ContainerId]:
        """VMs of this sandbox's other containers that hold some of them, and are not started any more, are off; or this raises.
        It waits for libvirt. Which containers those are."""
        earlier = [other for other, _ in self._holders(granted.claims) if _may_give_way(other, sandbox)]
        for other in earlier:
            self.hypervisor.destroy(other.domain_uuid, other.id)
        return frozenset(other.id for other in earlier)

    def add(self, container: Container, ended: frozenset[ContainerId]) -> None:
        """Writes the new container's record, and its claims with it, which are taken from those that have `ended`. WrongState,
        naming who has it, for a device that is another one's."""
        for other, shared in self._holders(container.claims):
            if other.id not in ended:
                raise self._held(other, shared)
            self.records.containers.replace(other.with_claims(()))
        self.records.containers.add(container)

    def await_free(self, held: NotYetFree, left: float) -> None:
        """Returns when what is held is free, or raises that it is not within `left` seconds. Not to be called with the lock of
        its pod held."""
        try:
            self.releases.finish(held.container, timeout=left)
        except ShimError as exc:
            raise WrongState(f"{held} ({exc})") from exc

    def _holders(self, claims: Collection[str]) -> Iterator[tuple[Container, list[str]]]:
        """Containers that hold some of them, with which."""
        for other in self.records.containers.all():
            if shared := set(other.claims).intersection(claims):
                yield other, sorted(shared)

    def _held(self, other: Container, claims: list[str]) -> WrongState:
        owner = self.records.sandboxes.get(other.sandbox_id)
        places = {device.claim: device.place for device in other.granted.passthrough if isinstance(device, PciFunction)}
        held = ", ".join(f"{claim} ({places[claim]})" if places.get(claim) else claim for claim in claims)
        pod = f"{owner.key.namespace}/{owner.key.name}" if owner else f"of sandbox {other.sandbox_id}"
        when = "It is being reset" if other.owes_devices else "It becomes free when that container ends or is removed"
        message = (
            f"{held} is held by container {other.name.name} ({other.id}, {other.phase.value}) of pod {pod}: one "
            f"device, one virtual machine. {when}"
        )
        return NotYetFree(message, other.id) if other.owes_devices else WrongState(message)


def _may_give_way(other: Container, sandbox: Sandbox) -> bool:
    """kubelet makes the next attempt of one that was never started, or whose failed start could not be undone, and leaves the
    row for later. Asked with the sandbox's lock held. Pure."""
    at_rest = other.phase in (ContainerPhase.CREATED, ContainerPhase.EXITED)
    return other.sandbox_id == sandbox.id and at_rest and not other.owes_devices


def _joined(envs: Sequence[tuple[str, bytes]]) -> dict[str, str]:
    """By name; of one that is there twice both values: kubelet appends a pod author's to a device plugin's."""
    values: dict[str, list[str]] = {}
    for name, value in envs:
        values.setdefault(name, []).append(value.decode(errors="replace"))
    return {name: ",".join(several) for name, several in values.items()}


def _with_nics(granted: GrantedDevices, network: PodNetwork | None) -> GrantedDevices:
    """The pod's NICs that are functions of the host's cards, behind the others; kubelet may have granted them too. Pure."""
    nics = [passed_through(nic) for nic in nics_of(network, granted) if nic.function]
    new = [nic for nic in nics if nic.claim not in granted.claims]
    return dataclasses.replace(granted, passthrough=(*granted.passthrough, *new))
