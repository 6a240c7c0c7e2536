"""A container's granted devices -> what its VM gets.

Nodes, CDI names and kubelet's list say what the container was granted; environment variables only choose in it. A variable
that names more is refused and told as a security event: that is a pod whose author asks for another's hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import structlog

from virtshim.devices.authority import chosen, forged, in_order
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.classify import Meaning, NoDevice, Unusable, classify
from virtshim.devices.granted import GrantCollector, resources
from virtshim.devices.hints import Hint, hints
from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus
from virtshim.domain.devices.granted import (
    BlockDevice,
    CriDevice,
    DeviceRequest,
    GrantedDevices,
    KubeletGrant,
    Passthrough,
    PciFunction,
)
from virtshim.domain.errors import InvalidRequest, Unavailable
from virtshim.ports.devices import PodResources

log = structlog.get_logger(__name__)

# Hints at what was not granted: a pod's author may write any number of them.
_MAX_REPORTED: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """kubelet's. `trouble` is why there is none; `is_to_come` if asking again may help."""

    grants: tuple[KubeletGrant, ...] = ()
    trouble: str = ""
    is_to_come: bool = False

    @property
    def resources(self) -> str:
        """The resources in brackets, for behind a node's name."""
        names = sorted({grant.resource for grant in self.grants})
        return f" ({' or '.join(names)})" if names else ""


class Resolver:
    """`kubelet`: None if it is not to be asked."""

    def __init__(self, files: HostFiles, cdi: CdiDirectories, kubelet: PodResources | None) -> None:
        self._files = files
        self._cdi = cdi
        self._kubelet = kubelet

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        """See `virtshim.ports.devices.Devices`."""
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
        # Variables are judged when all nodes and names are understood: what one of them names may be behind what is not.
        outside = forged(authority, hinted)
        faults = [*cdi.faults, *_unusable(nodes, collector, answer)]
        if not faults:
            if (outside or collector.lacks_mdev) and answer.is_to_come:
                raise Unavailable(f"it is not known which devices the container was granted: {answer.trouble}")
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
        """See `virtshim.ports.devices.Devices`."""
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
        """Not for a pod without any sign of a device: an ordinary pod waits for nobody."""
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
    """Faults of variables; those of the container's own are told as security events, too."""
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
            "the pod's spec, and ask for devices by resources.limits"
        )
    return faults


def _blocks(nodes: Sequence[tuple[CriDevice, Meaning]]) -> tuple[BlockDevice, ...]:
    """Each place in the pod once; the first node wins, as kubelet has it."""
    blocks: dict[str, BlockDevice] = {}
    for _, meaning in nodes:
        if isinstance(meaning, BlockDevice):
            blocks.setdefault(meaning.container_path, meaning)
    return tuple(blocks.values())
