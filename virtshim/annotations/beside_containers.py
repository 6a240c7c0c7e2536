"""What only pods with containers beside their VM may ask for, and what they may not. Pure.

passt carries the guest's network there. It takes the guest's ports in the pod's network namespace, which the containers use, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from virtshim.annotations.names import (
    ON_STOP_ANNOTATION,
    RESTORE_FROM_ANNOTATION,
    STATE_VOLUME_ANNOTATION,
    WARM_START_ANNOTATION,
)
from virtshim.annotations.options import Reader, VmOptions, sets, shown
from virtshim.model.errors import InvalidRequest
from virtshim.model.network import GuestPorts
from virtshim.model.sandbox import PortMapping

PORTS_ANNOTATION: Final = "virtshim.io/ports"
VM_CONTAINER_ANNOTATION: Final = "virtshim.io/vm-container"
NIC_QUEUES_ANNOTATION: Final = "virtshim.io/nic-queues"
NETWORK_FILTER_ANNOTATION: Final = "virtshim.io/network-filter"

_KUBELETS_PORTS: Final = "io.kubernetes.container.ports"
_MOST_PORTS: Final = 64
_PORT: Final = re.compile(r"([1-9][0-9]{0,4})(?:/(tcp|udp|sctp))?")
_CONTAINER_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
# The TCP ports of Istio's and of Linkerd's proxies, which a mesh declares for the pod and whose containers listen on them.
_OF_MESHES: Final = frozenset({*range(15000, 15010), 15020, 15021, 15053, 15090, 4140, 4143, 4190, 4191})


def _ports(text: str) -> GuestPorts:
    found = [_port(word.strip()) for word in text.split(",")] if text.strip() else []
    return _of_guest(found, "write each once")


def _port(word: str) -> tuple[int, str]:
    parsed = _PORT.fullmatch(word)
    if parsed is None or int(parsed[1]) > 65535:
        raise InvalidRequest(f"{shown(word)} is not a port; write them like 22,443,53/udp")
    if parsed[2] == "sctp":
        raise InvalidRequest(f"{shown(word)}: passt carries no SCTP; remove it, or use the RuntimeClass virtshim")
    return int(parsed[1]), parsed[2] or "tcp"


def _of_guest(found: Collection[tuple[int, str]], remedy: str) -> GuestPorts:
    by_protocol = {name: tuple(port for port, protocol in found if protocol == name) for name in ("tcp", "udp")}
    for name, ports in by_protocol.items():
        if twice := sorted({port for port in ports if ports.count(port) > 1}):
            raise InvalidRequest(f"port {twice[0]}/{name} is there twice; {remedy}")
    if len(found) > _MOST_PORTS:
        raise InvalidRequest(f"{len(found)} ports; a virtual machine has at most {_MOST_PORTS}")
    return GuestPorts(**by_protocol)


def _vm_container(text: str) -> str:
    if not _CONTAINER_NAME.fullmatch(text):
        raise InvalidRequest(f"{shown(text)} is not the name of a container; write that of the pod's VM")
    return text


READERS: Final[Mapping[str, Reader]] = {
    PORTS_ANNOTATION: sets("ports", _ports),
    VM_CONTAINER_ANNOTATION: sets("vm_container", _vm_container),
}


def guest_ports(options: VmOptions, declared: Iterable[PortMapping]) -> GuestPorts:
    """The guest's ports: those of the annotation, or the pod's declared ones without those of a mesh. Raises InvalidRequest."""
    declared = list(declared)
    if sctp := [one.container_port for one in declared if one.protocol == "sctp"]:
        raise InvalidRequest(
            f"config.port_mappings: port {sctp[0]} is SCTP, which passt does not carry; remove it, or use the RuntimeClass "
            "virtshim"
        )
    if options.ports is not None:
        return options.ports
    found = {(one.container_port, one.protocol): None for one in declared if one.container_port not in _OF_MESHES}
    try:
        return _of_guest(list(found), "")
    except InvalidRequest as exc:
        raise InvalidRequest(
            f"config.port_mappings: {exc}; name the guest's in the annotation {PORTS_ANNOTATION}"
        ) from exc


def own_ports(annotations: Mapping[str, str]) -> tuple[PortMapping, ...]:
    """The VM's own ports, from the annotations that kubelet gives its container: the pod's port mappings lack those of init
    containers and native sidecars."""
    try:
        found = json.loads(annotations.get(_KUBELETS_PORTS) or "[]")
        return tuple(
            PortMapping((one.get("protocol") or "TCP").lower(), int(one["containerPort"]), 0, "") for one in found
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()


def refuse_beside_containers(options: VmOptions) -> None:
    """Raises InvalidRequest for what a VM with containers beside it cannot have."""
    if faults := list(_impossible(options)):
        raise InvalidRequest("; ".join(faults))


def _impossible(options: VmOptions) -> Iterator[str]:
    remedy = "in a pod with containers beside its VM; remove it, or use the RuntimeClass virtshim"
    if options.network_filter:
        yield f"annotation {NETWORK_FILTER_ANNOTATION}: the guest has no tap to filter {remedy}"
    if options.nic_queues > 1:
        yield f"annotation {NIC_QUEUES_ANNOTATION}: the guest's NIC has one queue {remedy}"
    for asked, name in (
        (options.save_on_stop, ON_STOP_ANNOTATION),
        (options.state_volume, STATE_VOLUME_ANNOTATION),
        (options.restore_from, RESTORE_FROM_ANNOTATION),
        (options.warm_start, WARM_START_ANNOTATION),
    ):
        if asked:
            yield f"annotation {name}: a guest's memory is not kept {remedy}"


def refuse_alone(options: VmOptions) -> None:
    """Raises InvalidRequest for what a VM without containers beside it cannot have."""
    remedy = "is for pods with containers beside their VM; remove it, or use the RuntimeClass virtshim-pod"
    if options.ports is not None:
        raise InvalidRequest(f"annotation {PORTS_ANNOTATION}: it {remedy}: all ports of the guest are the pod's")
    if options.vm_container:
        raise InvalidRequest(f"annotation {VM_CONTAINER_ANNOTATION}: it {remedy}")
