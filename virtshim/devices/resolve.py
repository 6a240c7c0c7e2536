"""Finds the devices that a VM gets for its container's grants.

Device nodes, CDI names and kubelet's list say what the container was granted. Environment variables only choose among
them. A variable that names more is refused and logged as a security event: the pod's author asks for somebody else's
hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.config.settings import Settings
from virtshim.devices.attachable import AttachChecker, AttachRules, lockable
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.grants import (
    Authority,
    Hint,
    Meaning,
    NoDevice,
    Unusable,
    VfioDirectory,
    VfioFunction,
    VfioGroup,
    VfioMdev,
    chosen,
    classify,
    forged,
    hints,
    in_order,
)
from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus, addresses_of, is_uuid, last_address
from virtshim.devices.ports import PodResources
from virtshim.devices.values import (
    BlockDevice,
    CriDevice,
    DeviceRequest,
    GrantedDevices,
    KubeletGrant,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)
from virtshim.model.errors import InvalidRequest, Unavailable, WrongState

# Collects the granted devices from nodes, CDI addresses and kubelet's list. Reads sysfs.


@dataclass(slots=True)
class GrantCollector:
    """Collects source by source; `authority` is the result. `faults`: (node or name, why it cannot be used)."""

    files: HostFiles
    faults: list[tuple[str, str]] = field(default_factory=list)
    _wants_mdev: bool = False
    _groups: dict[int, set[PciAddress]] = field(default_factory=dict)
    _named: set[PciAddress] = field(default_factory=set)
    _unconditional: set[PciAddress] = field(default_factory=set)
    _if_hinted: set[PciAddress] = field(default_factory=set)
    _mdevs: set[str] = field(default_factory=set)
    _used: set[PciAddress] = field(default_factory=set)
    _others: set[UsbDevice | VdpaDevice] = field(default_factory=set)

    def node(self, path: str, meaning: Meaning) -> None:
        """Adds a granted node. The caller handles nodes that are not devices to pass."""
        if isinstance(meaning, VfioGroup):
            self._group(path, meaning.number)
        elif isinstance(meaning, VfioFunction):
            self._function(meaning.address)
        elif isinstance(meaning, VfioMdev):
            self._mdevs.add(meaning.uuid)
        elif isinstance(meaning, VfioDirectory):
            self._wants_mdev = True
        elif isinstance(meaning, UsbDevice):
            self._others.add(meaning)
        elif isinstance(meaning, VdpaDevice):
            self._others.add(meaning)
            node = self.files.node(meaning.path)
            parent = last_address(self.files.target(f"/sys/dev/char/{node.major}:{node.minor}"))
            self._used.update([parent] if parent is not None else ())

    def cdi(self, addresses: Iterable[PciAddress]) -> None:
        for address in addresses:
            if PciBus(self.files).function(address) is None:
                self.faults.append(("CDI", f"PCI function {address}, which a specification names (bdf), is missing"))
            self._named.add(address)
            self._unconditional.add(address)

    def kubelet(self, grants: Iterable[KubeletGrant]) -> None:
        """A VF without a node has a kernel driver, and the VM gets it. Another function might have been granted for its
        driver's sake, so it also needs a hint."""
        bus = PciBus(self.files)
        for grant in grants:
            for address in addresses_of(grant.ids):
                facts = bus.function(address)
                if facts is None or facts.is_bridge:
                    continue
                self._named.add(address)
                is_vf = facts.physical is not None
                (self._unconditional if is_vf and not grant.of_pod else self._if_hinted).add(address)
            if self._wants_mdev:
                self._mdevs.update(uuid for uuid in grant.ids if is_uuid(uuid))

    @property
    def lacks_mdev(self) -> bool:
        """Whether a node grants some mediated device, but nothing says which."""
        return self._wants_mdev and not self._mdevs

    def authority(self) -> Authority:
        behind = {address for functions in self._groups.values() for address in functions}
        return Authority(
            groups={number: tuple(sorted(functions)) for number, functions in self._groups.items()},
            named=frozenset(self._named),
            unconditional=frozenset(self._unconditional - behind),
            if_hinted=frozenset(self._if_hinted - behind),
            mdevs=frozenset(self._mdevs),
            used=frozenset(self._used),
            others=frozenset(self._others),
        )

    def _group(self, path: str, number: int) -> None:
        bus = PciBus(self.files)
        members = bus.members(number)
        mdevs = {name for name in members if is_uuid(name)}
        facts = [bus.function(address) for address in addresses_of(members)]
        functions = {one.address for one in facts if one is not None and not one.is_bridge}
        if not mdevs and not functions:
            what = "holds nothing that a VM can have" if members else "is not there"
            self.faults.append(
                (path, f"IOMMU group {number} {what}; check that the device plugin still runs, then delete the pod")
            )
            return
        self._mdevs |= mdevs
        if functions:
            self._groups.setdefault(number, set()).update(functions)

    def _function(self, address: PciAddress) -> None:
        facts = PciBus(self.files).function(address)
        if facts is None or facts.group is None:
            self._unconditional.add(address)
        else:
            self._groups.setdefault(facts.group, set()).add(address)


def resources(grants: Sequence[KubeletGrant], authority: Authority) -> dict[str, str]:
    """Claim -> kubelet's name of the resource, as far as its list says. Plugins that use numbers of IOMMU groups come
    last, because small numbers may mean anything."""
    names: dict[str, str] = {}
    for grant in grants:
        for address in addresses_of(grant.ids):
            names.setdefault(f"pci:{address}", grant.resource)
        for name in grant.ids:
            if is_uuid(name):
                names.setdefault(f"mdev:{name}", grant.resource)
    for number, functions in authority.groups.items():
        owners = [grant.resource for grant in grants if str(number) in grant.ids]
        for address in functions if len(owners) == 1 else ():
            names.setdefault(f"pci:{address}", owners[0])
    return names


log = structlog.get_logger(__name__)

# How many hints without a grant are reported; a pod's author may write any number of them.
_MAX_REPORTED: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """kubelet's answer. `trouble`: why there is none. `is_to_come`: whether asking again may help."""

    grants: tuple[KubeletGrant, ...] = ()
    trouble: str = ""
    is_to_come: bool = False

    @property
    def resources(self) -> str:
        """The resources in brackets, to follow a node's name."""
        names = sorted({grant.resource for grant in self.grants})
        return f" ({' or '.join(names)})" if names else ""


class Resolver:
    """`kubelet`: None if kubelet is not asked."""

    def __init__(self, files: HostFiles, cdi: CdiDirectories, kubelet: PodResources | None) -> None:
        self._files = files
        self._cdi = cdi
        self._kubelet = kubelet

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        cdi = self._cdi.find(request.cdi)
        nodes = [(node, classify(node, self._files)) for node in dict.fromkeys((*request.devices, *cdi.nodes))]
        hinted = hints([*((name, value, "") for name, value in request.envs.items()), *cdi.envs])
        answer = self._ask(request, nodes, hinted)
        collector = GrantCollector(self._files)
        for node, meaning in nodes:
            collector.node(node.host_path, meaning)
        collector.cdi(cdi.addresses)
        collector.kubelet(answer.grants)
        authority = collector.authority()
        # Variables are judged after all nodes and names: one that is not understood yet may be what a variable names.
        outside = forged(authority, hinted)
        faults = [*cdi.faults, *_unusable(nodes, collector, answer)]
        if not faults:
            if (outside or collector.lacks_mdev) and answer.is_to_come:
                raise Unavailable(f"the devices that the container was granted are unknown: {answer.trouble}")
            faults = _not_granted(request, outside, answer)
        if faults:
            raise InvalidRequest(f"devices of {request.namespace}/{request.pod}: {'; '.join(faults)}")
        names = resources(answer.grants, authority)
        only = answer.grants[0].resource if len({grant.resource for grant in answer.grants}) == 1 else ""
        devices = [
            self._placed(dataclasses.replace(device, resource=names.get(device.claim, only)))
            for device in chosen(authority, hinted)
        ]
        if not devices and any(node.host_path == "/dev/vfio/vfio" for node, _ in nodes):
            log.warning("devices.vfio_without_device", namespace=request.namespace, pod=request.pod)
        if cdi.not_given:
            log.warning("cdi.not_for_vms", namespace=request.namespace, pod=request.pod, not_given=list(cdi.not_given))
        return GrantedDevices(in_order(devices), _blocks(nodes), cdi.not_given)

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        if self._kubelet is None:
            return None
        try:
            return self._kubelet.own_containers(namespace, pod)
        except Unavailable as exc:
            log.warning("devices.kubelet_not_asked", namespace=namespace, pod=pod, error=str(exc))
            return None

    def _placed(self, device: Passthrough) -> Passthrough:
        bus = PciBus(self._files)
        facts = bus.function(device.address) if isinstance(device, PciFunction) else None
        return (
            dataclasses.replace(device, place=bus.place(facts)) if facts and isinstance(device, PciFunction) else device
        )

    def _ask(
        self, request: DeviceRequest, nodes: Sequence[tuple[CriDevice, Meaning]], hinted: Sequence[Hint]
    ) -> _Answer:
        """Asks kubelet, unless nothing about the pod hints at a device: an ordinary pod must not wait."""
        if not (hinted or request.cdi or any(not isinstance(meaning, BlockDevice | NoDevice) for _, meaning in nodes)):
            return _Answer()
        if self._kubelet is None:
            return _Answer(trouble="kubelet is not asked (devices.pod_resources_socket is empty)")
        try:
            return _Answer(self._kubelet.granted(request.namespace, request.pod, request.container))
        except Unavailable as exc:
            log.warning("devices.kubelet_not_asked", namespace=request.namespace, pod=request.pod, error=str(exc))
            return _Answer(trouble=str(exc), is_to_come=True)


def _unusable(nodes: Sequence[tuple[CriDevice, Meaning]], collector: GrantCollector, answer: _Answer) -> Iterator[str]:
    """Faults of granted nodes."""
    for node, meaning in nodes:
        if isinstance(meaning, Unusable):
            yield f"{node.host_path}{answer.resources}: {meaning.why}"
    for where, why in collector.faults:
        yield f"{where}{answer.resources}: {why}"
    if collector.lacks_mdev and not answer.is_to_come:
        who = answer.trouble or "kubelet lists none for this container"
        yield (
            f"/dev/vfio{answer.resources}: nothing says which mediated device (vGPU) was granted: {who}; correct the device "
            "plugin, or let virtshim ask kubelet (devices.pod_resources_socket)"
        )


def _not_granted(request: DeviceRequest, outside: Sequence[Hint], answer: _Answer) -> list[str]:
    """Faults of variables. Those that the container sets itself are also logged as security events."""
    faults = []
    because = f" ({answer.trouble})" if answer.trouble else ""
    for hint in outside[:_MAX_REPORTED]:
        if hint.spec:
            what = f"CDI: {hint.spec} sets {hint.variable} to {hint.text}, which nothing grants"
            faults.append(f"{what}; correct the specification")
            continue
        log.warning(
            "security.forged_device",
            namespace=request.namespace,
            pod=request.pod,
            container=request.container,
            variable=hint.variable,
            device=hint.text,
        )
        faults.append(
            f"the variable {hint.variable} names {hint.text}, which this container was not granted{because}; remove it from "
            "the pod's spec, and request devices by resources.limits"
        )
    return faults


def _blocks(nodes: Sequence[tuple[CriDevice, Meaning]]) -> tuple[BlockDevice, ...]:
    """Each path in the pod once. The first node wins, as in kubelet."""
    blocks: dict[str, BlockDevice] = {}
    for _, meaning in nodes:
        if isinstance(meaning, BlockDevice):
            blocks.setdefault(meaning.container_path, meaning)
    return tuple(blocks.values())


# The port `Devices` over this node's files and kubelet.


class NodeDevices(Resolver):
    def __init__(
        self, files: HostFiles, cdi: CdiDirectories, kubelet: PodResources | None, attachable: AttachChecker
    ) -> None:
        super().__init__(files, cdi, kubelet)
        self._attachable = attachable

    def check(self, devices: Sequence[Passthrough], *, guest_memory: int = 0) -> None:
        faults = self._attachable.faults(devices, guest_memory)
        if faults:
            raise WrongState("; ".join(faults))
        for device in devices:
            facts = PciBus(self._files).function(device.address) if isinstance(device, PciFunction) else None
            if facts is not None and not facts.has_reset:
                # The device works, but the next VM gets it in the state in which this VM leaves it.
                log.warning("devices.no_reset", device=str(facts.address))


def device_rules(settings: Settings, files: HostFiles) -> AttachRules:
    keep = frozenset(PciAddress.parse(address) for address in settings.devices.keep)
    return AttachRules(settings.devices.bind, keep, lambda: lockable(files, settings.libvirt.uri))
