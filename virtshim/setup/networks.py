"""The cluster's networks, as far as this node's files tell them: from these hosts who names an image should have nothing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from virtshim.devices.host_files import HostFiles
from virtshim.neighbours.kubelet import KubeletSetup

_MANIFESTS: Final = "/etc/kubernetes/manifests"
# Flags of the API server and the controller manager, on a node that runs them; services' networks first.
_FLAG: Final = re.compile(r"--(?:service-cluster-ip-range|cluster-cidr)=([0-9a-fA-F:./,]+)")
_SUBNET: Final = re.compile(r'"(?:subnet|podCIDR|Network|cidr)"\s*:\s*"([0-9a-fA-F:./]+)"')
_LONGEST: Final = 1 << 16
# Fields of /proc/net/route.
_DESTINATION, _GATEWAY, _MASK = 1, 2, 7
# Of /proc/net/ipv6_route, whose numbers are hexadecimal.
_DESTINATION6, _LENGTH6, _GATEWAY6 = 0, 1, 4


def networks(files: HostFiles, kubelet: KubeletSetup, cni_configuration: str) -> tuple[str, ...]:
    """As CIDR texts: of services and pods, and those that this node is in. What lies in another one of them is left out."""
    said = list(_said(files, kubelet.fields, cni_configuration))
    found = {network for text in said if (network := _network(text))}
    wide = [one for one in found if not any(one != other and _is_in(one, other) for other in found)]
    return tuple(map(str, sorted(wide, key=lambda one: (one.version, one))))


def services_beyond(found: Sequence[str], kubelet: KubeletSetup) -> str:
    """The address of the cluster's resolver, which is a service, if it is in none of these networks; else ""."""
    said = kubelet.given("cluster-dns", "clusterDNS")
    texts = said.value if said is not None else ()
    for text in texts if isinstance(texts, list) else str(texts).split(",") if texts else ():
        service = _network(str(text))
        if service is not None and service.prefixlen == service.max_prefixlen:
            return "" if any(_is_in(service, ipaddress.ip_network(one)) for one in found) else str(service[0])
    return ""


def _said(files: HostFiles, fields: Mapping[str, Any], cni_configuration: str) -> Iterator[str]:
    for name in files.names(_MANIFESTS):
        for flag in _FLAG.findall(files.text(f"{_MANIFESTS}/{name}")[:_LONGEST]):
            yield from flag.split(",")
    if "podCIDR" in fields:
        yield from str(fields["podCIDR"].value).split(",")
    if cni_configuration:
        yield from _SUBNET.findall(files.text(cni_configuration)[:_LONGEST])
    for line in files.text("/proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > _MASK and words[_GATEWAY] == "0" * 8:
            yield f"{_address(words[_DESTINATION])}/{_address(words[_MASK])}"
    for line in files.text("/proc/net/ipv6_route").splitlines():
        words = line.split()
        if len(words) > _GATEWAY6 and words[_GATEWAY6] == "0" * 32:
            yield _network6(words[_DESTINATION6], words[_LENGTH6])


def _address(word: str) -> str:
    """The kernel shows it as this machine has it in memory."""
    try:
        return str(ipaddress.IPv4Address(bytes.fromhex(word)[::-1]))
    except ValueError:
        return ""


def _network6(address: str, length: str) -> str:
    """ "" for the address of this node alone, which is in a network of its own, or is nobody else's."""
    try:
        bits = int(length, 16)
        return f"{ipaddress.IPv6Address(bytes.fromhex(address))}/{bits}" if bits < ipaddress.IPV6LENGTH else ""
    except ValueError:
        return ""


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        found = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    is_own = found.is_loopback or found.is_link_local or found.is_multicast or not found.prefixlen
    return None if is_own else found


def _is_in(
    one: ipaddress.IPv4Network | ipaddress.IPv6Network, other: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> bool:
    return one.version == other.version and one.network_address in other and one.broadcast_address in other
