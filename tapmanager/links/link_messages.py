"""Builds the rtnetlink messages of `pod_links` between CNI ADD and the answer, as one batch. Pods wait for it, and pyroute2 takes
longer to build one message than the kernel to process all. Pure.

Numbers and structures are from linux/rtnetlink.h, linux/if_link.h and linux/if_addr.h.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tapmanager.links.netlink import ACK, REQUEST, attribute, message
from tapmanager.network_values import mac_bytes

_RTM_SETLINK, _RTM_DELADDR, _RTM_DELROUTE = 19, 21, 25
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER = 1, 3, 4, 10
_IFA_LOCAL = 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_IFF_UP = 1
_TABLE_MAIN = 254
_SCOPE_NOWHERE = 255  # removes a route of any scope

# Errors for objects that have already gone, maybe with an earlier change.
GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENXIO})


@dataclass(frozen=True, slots=True)
class Change:
    """`kind` and `payload` of one message. `doing`: a description for errors. Errors in `fine` count as success."""

    doing: str
    kind: int
    payload: bytes
    fine: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """A value of "" or 0 means no change."""

    name: str = ""
    mac: str = ""
    mtu: int = 0
    master: int = 0


def set_link(doing: str, index: int, wanted: LinkSettings) -> Change:
    """Changes the link and brings it up. The kernel sets address, MTU and name before the master, and brings it up last."""
    parts = [struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, _IFF_UP, _IFF_UP)]
    if wanted.mac:
        parts.append(attribute(_IFLA_ADDRESS, mac_bytes(wanted.mac)))
    if wanted.mtu:
        parts.append(attribute(_IFLA_MTU, struct.pack("=I", wanted.mtu)))
    if wanted.name:
        parts.append(attribute(_IFLA_IFNAME, wanted.name.encode() + b"\0"))
    if wanted.master:
        parts.append(attribute(_IFLA_MASTER, struct.pack("=I", wanted.master)))
    return Change(doing, _RTM_SETLINK, b"".join(parts))


def remove_address(doing: str, index: int, cidr: str) -> Change:
    interface = ipaddress.ip_interface(cidr)
    family = socket.AF_INET if interface.version == 4 else socket.AF_INET6
    head = struct.pack("=BBBBI", family, interface.network.prefixlen, 0, 0, index)
    return Change(doing, _RTM_DELADDR, head + attribute(_IFA_LOCAL, interface.ip.packed), GONE)


def remove_route(doing: str, index: int, destination: str, gateway: str | None) -> Change:
    network = ipaddress.ip_network(destination)
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    head = struct.pack("=BBBBBBBBI", family, network.prefixlen, 0, 0, _TABLE_MAIN, 0, _SCOPE_NOWHERE, 0, 0)
    body = [head, attribute(_RTA_DST, network.network_address.packed), attribute(_RTA_OIF, struct.pack("=I", index))]
    if gateway:
        body.append(attribute(_RTA_GATEWAY, ipaddress.ip_address(gateway).packed))
    return Change(doing, _RTM_DELROUTE, b"".join(body), GONE)


def batch(changes: Sequence[Change]) -> bytes:
    """The bytes of all messages. The kernel processes all of them even if one fails, and acknowledges each in turn."""
    numbered = enumerate(changes, start=1)
    return b"".join(message(change.kind, REQUEST | ACK, number, change.payload) for number, change in numbered)
