"""Reads the links, addresses, routes, neighbours and rules of a pod's namespace after CNI ADD, and makes a bridge answer for
neighbours. Reads by raw netlink, because the pod waits and pyroute2 takes ten times as long. Must run inside the namespace.

Numbers and structures are from linux/if_link.h, linux/if_addr.h, linux/rtnetlink.h and linux/neighbour.h.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tapmanager.links import netlink
from tapmanager.links.netlink import Attributes
from tapmanager.links.nic_plan import KernelLink, KernelRoute
from tapmanager.links.policy_routes import kernel_policies_of_link, read_kernel_policies
from tapmanager.pod import Neighbour, Nic

# Permanent neighbours that a plugin made in the pod's namespace, and that nothing answers for on the network: AWS's VPC CNI and
# Azure's plugin store the gateway's MAC there. The guest asks for it, so the kernel's bridge answers, without any process.
#
# pyroute2 has no types, so these functions use `Any`.

_NUD_PERMANENT = 0x80
_NUD_NOARP = 0x40
_NTF_ROUTER = 0x80


def answer_for(ipr: Any, nic: Nic, neighbours: Sequence[Neighbour]) -> None:
    """Makes the bridge answer. It answers for addresses that are its own neighbours, and whose MAC is known behind a port."""
    bridge, guest, outside = (socket.if_nametoindex(name) for name in (nic.bridge, nic.tap, nic.link))
    if any(":" not in neighbour.address for neighbour in neighbours):
        ipr.brport("set", index=guest, proxyarp=1)
    if any_ipv6(neighbours):
        ipr.brport("set", index=outside, neigh_suppress=1)
    for neighbour in neighbours:
        # A guest drops its router if an answer says that it is not one.
        _set_permanent(ipr, bridge, neighbour, _NTF_ROUTER if ":" in neighbour.address else 0)
        ipr.fdb("replace", ifindex=outside, lladdr=neighbour.mac, state=_NUD_NOARP)


def add_stand_in(ipr: Any, nic: Nic, neighbour: Neighbour, port: str) -> None:
    """Like `answer_for`, for a neighbour behind `port`. This is not the network's port, because a port with
    neigh_suppress does not get the guest's unsolicited advertisements."""
    bridge, nowhere = socket.if_nametoindex(nic.bridge), socket.if_nametoindex(port)
    ipr.link("set", index=nowhere, mtu=nic.mtu, master=bridge)
    # The bridge does not flood frames of the other two ports to it.
    ipr.brport("set", index=nowhere, neigh_suppress=1, unicast_flood=0, mcast_flood=0, bcast_flood=0)
    ipr.link("set", index=nowhere, state="up")
    ipr.fdb("replace", ifindex=nowhere, lladdr=neighbour.mac, state=_NUD_NOARP)
    _set_permanent(ipr, bridge, neighbour, _NTF_ROUTER)


def any_ipv6(neighbours: Sequence[Neighbour]) -> bool:
    return any(":" in neighbour.address for neighbour in neighbours)


def restore_neighbours(ipr: Any, nic: Nic, link: int) -> None:
    for neighbour in nic.neighbours:
        _set_permanent(ipr, link, neighbour)


def _set_permanent(ipr: Any, link: int, neighbour: Neighbour, flags: int = 0) -> None:
    ipr.neigh("replace", dst=neighbour.address, lladdr=neighbour.mac, ifindex=link, state=_NUD_PERMANENT, flags=flags)


_GETLINK, _GETADDR, _GETROUTE, _GETNEIGH = 18, 22, 26, 30
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 16}

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_IFALIAS = 1, 3, 4, 18, 20
_IFLA_LINK_NETNSID, _IFLA_PARENT_DEV_NAME, _IFLA_PARENT_DEV_BUS_NAME = 37, 56, 57
_IFLA_INFO_KIND = 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_METRICS, _RTA_TABLE = 1, 4, 5, 6, 8, 15
_RTAX_MTU = 2
_NDA_DST, _NDA_LLADDR = 1, 2

_ARPHRD_ETHER, _ARPHRD_LOOPBACK = 1, 772
_IFF_NOARP = 0x80
_SCOPE_LINK = 253
_UNICAST = 1
_CLONED = 0x200
_TABLE_MAIN = 254
_ETHERNET_ADDRESS = 6  # bytes


@dataclass(frozen=True, slots=True)
class _Route:
    family: int
    table: int
    link: int
    is_unicast: bool
    route: KernelRoute


def read(ours: Sequence[str] = ()) -> list[KernelLink]:
    """All links of this namespace with their addresses and routes, without loopback, devices other than Ethernet cards, and
    `ours`. Raises OSError."""
    addresses, routes = list(_addresses()), list(_routes())
    neighbours, policies = list(_permanent_neighbours()), read_kernel_policies()
    return [
        KernelLink(
            name=name,
            kind=_kind(of),
            mac=_mac(of.get(_IFLA_ADDRESS, b"")),
            mtu=netlink.number(of, _IFLA_MTU),
            addresses=tuple(address for link, address in addresses if link == index),
            routes=tuple(one.route for one in routes if one.link == index and _is_the_guests(one)),
            parent=netlink.text(of, _IFLA_PARENT_DEV_NAME) if _is_pci(of) else "",
            # The other end of a veth, or the base of a VLAN, is in the namespace with that number; a device belongs to the
            # machine.
            leads_out=_IFLA_LINK_NETNSID in of or _IFLA_PARENT_DEV_NAME in of,
            alias=netlink.text(of, _IFLA_IFALIAS),
            frames=_carries_frames(kind, flags, of),
            neighbours=tuple(neighbour for link, neighbour in neighbours if link == index),
            policies=kernel_policies_of_link(policies, index),
        )
        for index, kind, flags, of in _links()
        if _counts(kind, of) and (name := netlink.text(of, _IFLA_IFNAME)) not in ours
    ]


def _links() -> Iterator[tuple[int, int, int, Attributes]]:
    for data in netlink.dump(_GETLINK, struct.pack("=16x")):
        kind, index, flags = struct.unpack_from("=2xHiI", data)
        yield index, kind, flags, netlink.attributes(data, 16)


def _counts(kind: int, of: Attributes) -> bool:
    """Whether the link counts. InfiniBand links do not: the guest gets them as devices that kubelet granted."""
    return kind == _ARPHRD_ETHER or (kind != _ARPHRD_LOOPBACK and not _is_pci(of))


def _is_pci(of: Attributes) -> bool:
    """Whether a PCI device is behind the link. Linux reports that since 5.14."""
    return netlink.text(of, _IFLA_PARENT_DEV_BUS_NAME) == "pci"


def _carries_frames(kind: int, flags: int, of: Attributes) -> bool:
    """Whether the link carries Ethernet frames. netkit has the type Ethernet even in its default mode, which carries only
    packets; it then has no ARP."""
    mute = _kind(of) == "netkit" and flags & _IFF_NOARP
    return kind == _ARPHRD_ETHER and not mute


def _kind(of: Attributes) -> str:
    return netlink.text(netlink.attributes(of.get(_IFLA_LINKINFO, b""), 0), _IFLA_INFO_KIND)


def _addresses() -> Iterator[tuple[int, str]]:
    for data in netlink.dump(_GETADDR, struct.pack("=8x")):
        family, prefix, scope, index = struct.unpack_from("=BBxBI", data)
        of = netlink.attributes(data, 8)
        # IFA_LOCAL is the address, IFA_ADDRESS the peer's on a point-to-point link; IPv6 has IFA_ADDRESS only.
        packed = of.get(_IFA_LOCAL) or of.get(_IFA_ADDRESS)
        if family in _FAMILIES and scope < _SCOPE_LINK and packed:
            yield index, str(ipaddress.ip_interface((packed, prefix)))


def _routes() -> Iterator[_Route]:
    for data in netlink.dump(_GETROUTE, struct.pack("=12x")):
        family, length, table, kind, flags = struct.unpack_from("=BB2xB2xBI", data)
        if family not in _FAMILIES or flags & _CLONED:
            continue
        of = netlink.attributes(data, 12)
        gateway = of.get(_RTA_GATEWAY)
        route = KernelRoute(
            str(ipaddress.ip_network((of.get(_RTA_DST, bytes(_FAMILIES[family])), length))),
            str(ipaddress.ip_address(gateway)) if gateway else None,
            netlink.number(of, _RTA_PRIORITY),
            netlink.number(netlink.attributes(of.get(_RTA_METRICS, b""), 0), _RTAX_MTU),
        )
        yield _Route(
            family, netlink.number(of, _RTA_TABLE) or table, netlink.number(of, _RTA_OIF), kind == _UNICAST, route
        )


def _is_the_guests(one: _Route) -> bool:
    """Whether the route matters to the guest. fe80::/64 exists on every link anyway."""
    on_every_link = one.family == socket.AF_INET6 and ipaddress.ip_network(one.route.destination).is_link_local
    return one.table == _TABLE_MAIN and one.is_unicast and not on_every_link


def permanent_neighbours(index: int) -> Collection[str]:
    """The addresses of the link's permanent neighbours. Raises OSError."""
    return {neighbour.address for link, neighbour in _permanent_neighbours() if link == index}


def _permanent_neighbours() -> Iterator[tuple[int, Neighbour]]:
    for data in netlink.dump(_GETNEIGH, struct.pack("=12x")):
        family, index, state = struct.unpack_from("=B3xiH", data)
        of = netlink.attributes(data, 12)
        address, mac = of.get(_NDA_DST), of.get(_NDA_LLADDR, b"")
        if state & _NUD_PERMANENT and family in _FAMILIES and address and _is_unicast(mac):
            yield index, Neighbour(str(ipaddress.ip_address(address)), _mac(mac))


def _is_unicast(mac: bytes) -> bool:
    return len(mac) == _ETHERNET_ADDRESS and not mac[0] & 1


def _mac(data: bytes) -> str:
    return data.hex(":")
