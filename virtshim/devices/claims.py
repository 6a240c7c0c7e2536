"""Which container has which device of the host. Each device has a claim key that only one container can hold."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from virtshim.devices.guest_view import refuse_too_many_functions
from virtshim.devices.ports import DeviceDrivers, Devices
from virtshim.devices.releases import DeviceReleases
from virtshim.devices.resets import DeviceResets
from virtshim.devices.values import VFIO_PCI, BorrowedDevice, DeviceRequest, GrantedDevices, PciFunction, is_vfio_driver
from virtshim.model.container import Container, ContainerConfig, ContainerName, ContainerPhase
from virtshim.model.errors import DeadlineExceeded, NotFound, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.network import PodNetwork, nics_of, passed_through
from virtshim.model.sandbox import Sandbox
from virtshim.model.vm import VmSize
from virtshim.store.ports import Records, Table
from virtshim.vm.ports import Hypervisor

# PCI functions that virtshim takes from their drivers for a VM, and gives back when no container holds them.

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BorrowedDevices:
    """`binds`: whether virtshim takes devices at all; otherwise a device plugin or libvirt does. `timeout`: seconds for
    each call to tapmanager. Each device has a lock, so that a device whose driver hangs delays no other."""

    records: Records
    table: Table[str, BorrowedDevice]
    drivers: DeviceDrivers
    timeout: float
    binds: bool
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def take(self, granted: GrantedDevices) -> None:
        """Takes the devices; the caller's container already holds their claims. The row is written before the driver
        changes, so that the device finds its way back after a crash."""
        if not self.binds:
            return
        for device in granted.passthrough:
            if isinstance(device, PciFunction):
                with self._lock(device.claim):
                    self._take(device)

    def _take(self, device: PciFunction) -> None:
        address = device.address
        if self.table.get(device.claim) is None:
            driver = self.drivers.driver(address, self.timeout)
            # A plugin, or the machine's set-up, has bound it, maybe to a vendor's VFIO driver.
            if is_vfio_driver(driver):
                return
            self.table.add(BorrowedDevice(address, driver))
        self.drivers.bind(address, VFIO_PCI, self.timeout)
        log.info("device.taken", device=str(address))

    def idle(self) -> Sequence[BorrowedDevice]:
        """The devices that no container holds and that must still be given back."""
        held = {claim for container in self.records.containers.all() for claim in container.claims}
        return [device for device in self.table.all() if device.claim not in held]

    def give_back_of(self, container: Container) -> None:
        """Gives back the devices of a container that is gone. What cannot be given back now, including everything after
        a device whose driver hangs, is left to the reconciler and the next start."""
        had = {*container.granted.claims, *container.claims}
        for device in self.idle():
            if device.claim in had:
                try:
                    self.give_back(device)
                except DeadlineExceeded:
                    return
                except ShimError:  # logged by give_back
                    continue

    def give_back(self, device: BorrowedDevice) -> None:
        """Gives the device back, unless a container holds it now. Raises ShimError."""
        with self._lock(device.claim):
            if all(device.claim != idle.claim for idle in self.idle()):
                return
            try:
                with contextlib.suppress(NotFound):  # the device was unplugged
                    self.drivers.bind(device.address, device.driver, self.timeout)
                self.table.delete(device.claim)
            except ShimError as exc:
                log.warning("device.not_given_back", device=str(device.address), driver=device.driver, error=str(exc))
                raise
        log.info("device.given_back", device=str(device.address), driver=device.driver)

    def _lock(self, claim: str) -> threading.Lock:
        return self._locks.setdefault(claim, threading.Lock())


class NotYetFree(WrongState):
    """An ended VM has the device, which will soon be free."""

    def __init__(self, message: str, container: ContainerId) -> None:
        super().__init__(message)
        self.container = container


@dataclass(frozen=True, slots=True)
class DeviceClaims:
    """A claim is held from CreateContainer until the VM is off for good. An ended container keeps its record, often as
    long as its pod, but not its claims, because kubelet grants its devices to others. A container that never started
    holds its claims until its sandbox is stopped, but not against a later container of that sandbox."""

    records: Records
    hypervisor: Hypervisor
    devices: Devices
    resets: DeviceResets
    releases: DeviceReleases

    def resolve(self, sandbox: Sandbox, name: ContainerName, config: ContainerConfig) -> GrantedDevices:
        """The devices behind the request. Raises InvalidRequest, Unavailable."""
        request = DeviceRequest(
            namespace=sandbox.key.namespace,
            pod=sandbox.key.name,
            container=name.name,
            devices=config.devices,
            cdi=config.cdi,
            envs=_joined(config.envs),
        )
        granted = _with_nics(self.devices.resolve(request), sandbox.network)
        refuse_too_many_functions(granted)
        return granted

    def check(self, granted: GrantedDevices, size: VmSize) -> None:
        """Raises WrongState if a device cannot be attached now, NotYetFree if it waits for its reset."""
        if granted.passthrough:
            for other in self.records.containers.all():
                if other.owes_devices and (shared := set(other.claims).intersection(granted.claims)):
                    raise self._held(other, sorted(shared))
            self.devices.check(granted.passthrough, guest_memory=size.max_memory_bytes)
            self.resets.refuse_broken(granted)

    def end_earlier(self, granted: GrantedDevices, sandbox: Sandbox) -> frozenset[ContainerId]:
        """Ends the VMs of this sandbox's other containers that hold some of the devices and can no longer start.
        Returns those containers. Waits for libvirt; raises if a VM stays on."""
        earlier = [other for other, _ in self._holders(granted.claims) if _may_give_way(other, sandbox)]
        for other in earlier:
            self.hypervisor.destroy(other.domain_uuid, other.id)
        return frozenset(other.id for other in earlier)

    def add(self, container: Container, ended: frozenset[ContainerId]) -> None:
        """Writes the new container's record with its claims, and takes these claims from the `ended` containers. Raises
        WrongState, naming the holder, if another container has a device."""
        for other, shared in self._holders(container.claims):
            if other.id not in ended:
                raise self._held(other, shared)
            self.records.containers.replace(other.with_claims(()))
        # Other containers have only files and a definition on this node before CREATED is synced. After a power cut these are
        # leftovers, which recovery removes without a row, too; kubelet creates the container again.
        is_reserved = bool(container.claims or container.spec.pod_disk or container.granted != GrantedDevices())
        self.records.containers.add(container, survives_power_cuts=is_reserved)

    def await_free(self, held: NotYetFree, left: float) -> None:
        """Returns when the devices are free; raises `held` if they are not within `left` seconds. The caller must not
        hold the pod's lock."""
        try:
            self.releases.finish(held.container, timeout=left)
        except ShimError as exc:
            raise WrongState(f"{held} ({exc})") from exc

    def _holders(self, claims: Collection[str]) -> Iterator[tuple[Container, list[str]]]:
        """The containers that hold some of these claims, each with those it holds."""
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
            f"{held} is held by container {other.name.name} ({other.id}, {other.phase.value}) of pod {pod}: only one "
            f"virtual machine can have a device. {when}"
        )
        return NotYetFree(message, other.id) if other.owes_devices else WrongState(message)


def _may_give_way(other: Container, sandbox: Sandbox) -> bool:
    """kubelet makes the next attempt of a container that never started, or whose failed start could not be undone, and
    removes the old record later. The caller holds the sandbox's lock. Pure."""
    at_rest = other.phase in (ContainerPhase.CREATED, ContainerPhase.EXITED)
    return other.sandbox_id == sandbox.id and at_rest and not other.owes_devices


def _joined(envs: Sequence[tuple[str, bytes]]) -> dict[str, str]:
    """Name -> value. A variable that occurs twice gets both values, because kubelet appends a pod author's to a device
    plugin's."""
    values: dict[str, list[str]] = {}
    for name, value in envs:
        values.setdefault(name, []).append(value.decode(errors="replace"))
    return {name: ",".join(several) for name, several in values.items()}


def _with_nics(granted: GrantedDevices, network: PodNetwork | None) -> GrantedDevices:
    """Adds the pod's NICs that are functions of the host's cards, unless kubelet has granted them too. Pure."""
    nics = [passed_through(nic) for nic in nics_of(network, granted) if nic.function]
    new = [nic for nic in nics if nic.claim not in granted.claims]
    return dataclasses.replace(granted, passthrough=(*granted.passthrough, *new))
