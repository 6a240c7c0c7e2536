"""Bridges, taps and what hangs on them, in one pod's namespace. Each public function must run inside it (netns.run_inside).

pyroute2 has no types: its `Any` stays here and in `host_links`. All of `build` can be undone by `restore` from the
plan alone, from any half-made state.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tapmanager.errors import internal, unavailable
from tapmanager.links import dhcp_guard, neighbours, netlink, policy_rules, tap
from tapmanager.links.nic_plan import KernelLink, KernelRoute
from tapmanager.pod import Nic, Route

_ARPHRD_ETHER = 1
_ARPHRD_LOOPBACK = 772
_IFF_NOARP = 0x80
_TABLE_MAIN = 254
_UNICAST = 1
_SCOPE_LINK = 253
_GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENXIO})
_NETLINK_NETFILTER = 12


def random_mac() -> str:
    """Locally administered, unicast."""
    octets = bytearray(secrets.token_bytes(6))
    octets[0] = octets[0] & 0xFC | 0x02
    return ":".join(f"{octet:02x}" for octet in octets)


@contextlib.contextmanager
def netlink_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as exc:
        raise internal(f"{doing}: the kernel refused: {os.strerror(exc.code)}") from exc


def read() -> list[KernelLink]:
    """All links here, with their addresses and main-table routes; not loopback, nor other devices' than Ethernet cards."""
    with netlink_errors("reading the pod's links"), IPRoute() as ipr:
        links = [link for link in ipr.get_links() if _counts(link)]
        addresses = list(ipr.get_addr())
        routes = list(ipr.get_routes(table=_TABLE_MAIN))
        permanent, rules = neighbours.read(ipr), policy_rules.read(ipr)
        return [
            KernelLink(
                name=link.get_attr("IFLA_IFNAME"),
                kind=_kind(link),
                mac=link.get_attr("IFLA_ADDRESS") or "",
                mtu=link.get_attr("IFLA_MTU"),
                addresses=tuple(_address(one) for one in addresses if _is_of(one, link["index"])),
                routes=tuple(found for one in routes for found in _route(one, link["index"])),
                parent=_pci_parent(link),
                leads_out=_leads_out(link),
                alias=link.get_attr("IFLA_IFALIAS") or "",
                frames=_carries_frames(link),
                neighbours=permanent.get(link["index"], ()),
                rules=rules.get(link["index"], ()),
            )
            for link in links
        ]


def _kind(link: Any) -> str:
    info = link.get_attr("IFLA_LINKINFO")
    return str(info.get_attr("IFLA_INFO_KIND") or "") if info is not None else ""


def _counts(link: Any) -> bool:
    """InfiniBand's are not the guest's as links, but as what kubelet granted."""
    ethernet = link["ifi_type"] == _ARPHRD_ETHER
    return ethernet or (link["ifi_type"] != _ARPHRD_LOOPBACK and not _pci_parent(link))


def _carries_frames(link: Any) -> bool:
    """netkit is an Ethernet link by its type also where it takes packets alone, which is its default; then it has no ARP."""
    mute = _kind(link) == "netkit" and link["flags"] & _IFF_NOARP
    return link["ifi_type"] == _ARPHRD_ETHER and not mute


def _pci_parent(link: Any) -> str:
    """Its device's PCI address, "" for others; Linux 5.14 and newer tell."""
    return (
        str(link.get_attr("IFLA_PARENT_DEV_NAME") or "") if link.get_attr("IFLA_PARENT_DEV_BUS_NAME") == "pci" else ""
    )


def _leads_out(link: Any) -> bool:
    """A veth's other end, or what a VLAN is on, is in the namespace with that number; a device is of the machine."""
    return link.get_attr("IFLA_LINK_NETNSID") is not None or bool(link.get_attr("IFLA_PARENT_DEV_NAME"))


def _is_of(address: Any, index: int) -> bool:
    return bool(address["index"] == index and address["scope"] < _SCOPE_LINK)


def _address(message: Any) -> str:
    # IFA_LOCAL is the address, IFA_ADDRESS the peer's on a point-to-point link; IPv6 has IFA_ADDRESS only.
    ip = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    return str(ipaddress.ip_interface(f"{ip}/{message['prefixlen']}"))


def _route(message: Any, index: int) -> Iterator[KernelRoute]:
    attr = message.get_attr
    field = message.__getitem__
    if (
        attr("RTA_OIF") != index
        or field("type") != _UNICAST
        or field("family") not in (socket.AF_INET, socket.AF_INET6)
    ):
        return
    any_address = "0.0.0.0" if field("family") == socket.AF_INET else "::"  # noqa: S104  a destination, nothing is bound
    destination = ipaddress.ip_network(f"{attr('RTA_DST') or any_address}/{field('dst_len')}")
    if destination.is_link_local and destination.version == 6:
        return  # fe80::/64 is on every link by itself
    gateway = attr("RTA_GATEWAY")
    metrics = attr("RTA_METRICS")
    mtu = metrics.get_attr("RTAX_MTU") if metrics is not None else None
    yield KernelRoute(str(destination), gateway, attr("RTA_PRIORITY") or 0, mtu or 0)


def build(nics: Sequence[Nic], tap_owner: int) -> None:
    """Makes bridges and taps; each CNI interface's MAC and addresses become the guest's. Raises TapmanagerError, OSError."""
    _guard_dhcp(nics)
    _quiet_namespace()
    with IPRoute() as ipr:
        for nic in nics:
            with netlink_errors(f"bridging {nic.link} to {nic.tap}"):
                _build_one(ipr, nic, tap_owner)


def _build_one(ipr: Any, nic: Nic, tap_owner: int) -> None:
    link = _index(nic.link)
    if link is None:
        raise internal(f"interface {nic.link} vanished while it was being bridged")
    _strip(ipr, link, nic)
    _set_mac(ipr, link, nic.link_mac)
    ipr.link(
        "add",
        ifname=nic.bridge,
        kind="bridge",
        address=nic.bridge_mac,
        br_stp_state=0,
        br_forward_delay=0,
        br_ageing_time=0,  # two ports: what comes in at one leaves at the other, whatever MAC it claims to have
        br_mcast_snooping=0,  # there is no querier; snooping would swallow neighbour discovery
    )
    tap.create(nic.tap, tap_owner)
    for name in (nic.link, nic.bridge, nic.tap):
        _disable_ipv6(name)
    bridge = _index(nic.bridge)
    ipr.link("set", index=_index(nic.tap), mtu=nic.mtu, master=bridge, state="up")
    ipr.link("set", index=link, master=bridge, state="up")
    ipr.link("set", index=bridge, mtu=nic.mtu, state="up")
    if nic.neighbours:
        if neighbours.any_ipv6(nic):  # a bridge without IPv6 cannot know them; without an address it is not heard
            _write_sysctl(f"net/ipv6/conf/{nic.bridge}/addr_gen_mode", "1")
            _write_sysctl(f"net/ipv6/conf/{nic.bridge}/disable_ipv6", "0")
        neighbours.answer_for(ipr, nic)


def _strip(ipr: Any, link: int, nic: Nic) -> None:
    """Addresses go, and the kernel takes their routes along; device routes without an address behind them too."""
    for route in reversed(nic.link_routes):
        _route_change(ipr, "del", route, link)
    for address in nic.link_addresses:
        ip, _, prefix = address.partition("/")
        with _ignore_missing():
            ipr.addr("del", index=link, address=ip, prefixlen=int(prefix))


@contextlib.contextmanager
def _ignore_missing(*more: int) -> Iterator[None]:
    """`more`: other errors that are fine as well."""
    try:
        yield
    except NetlinkError as exc:
        if exc.code not in (*_GONE, *more):
            raise


def _route_change(ipr: Any, command: str, route: Route, link: int) -> None:
    extra = {"gateway": route.gateway} if route.gateway else {"scope": _SCOPE_LINK}
    if ipaddress.ip_network(route.destination).version == 6:
        extra.pop("scope", None)
    with _ignore_missing(errno.EEXIST):
        ipr.route(command, dst=route.destination, oif=link, table=_TABLE_MAIN, **extra)


def _set_mac(ipr: Any, link: int, mac: str) -> None:
    """Some drivers change the address of a link that is down only."""
    try:
        ipr.link("set", index=link, address=mac)
    except NetlinkError as exc:
        if exc.code != errno.EBUSY:
            raise
        ipr.link("set", index=link, state="down")
        ipr.link("set", index=link, address=mac)
        ipr.link("set", index=link, state="up")


def restore(nics: Sequence[Nic]) -> list[str]:
    """Puts the CNI interfaces back as the plugins left them: DEL of bridge and ptp reads the addresses off the interface to
    know which masquerading rules to remove. What could not be put back is told, not raised: DEL must be tried anyway."""
    trouble: list[str] = []
    with IPRoute() as ipr:
        for nic in nics:
            for name in (nic.tap, nic.bridge):
                _try(trouble, f"removing {name}", partial(_remove, ipr, name))
            link = _index(nic.link)
            if link is not None:
                _try(trouble, f"restoring {nic.link}", partial(_restore_one, ipr, nic, link))
    return trouble


def make_substitutes(nics: Sequence[Nic]) -> list[str]:
    """In an empty namespace: interfaces with the names and addresses of the lost ones, nothing behind them. As `restore`."""
    trouble: list[str] = []
    with IPRoute() as ipr:
        for nic in nics:
            _try(trouble, f"standing in for {nic.link}", partial(_stand_in_one, ipr, nic))
    return trouble


def _stand_in_one(ipr: Any, nic: Nic) -> None:
    ipr.link("add", ifname=nic.link, kind="bridge", address=nic.mac)
    index = _index(nic.link)
    for address in nic.link_addresses:
        ip, _, prefix = address.partition("/")
        ipr.addr("replace", index=index, address=ip, prefixlen=int(prefix))


def _try(trouble: list[str], doing: str, work: Callable[[], None]) -> None:
    try:
        work()
    except (NetlinkError, OSError) as exc:
        trouble.append(f"{doing}: {exc}")


def _remove(ipr: Any, name: str) -> None:
    index = _index(name)
    if index is not None:
        with _ignore_missing():
            ipr.link("del", index=index)


def _restore_one(ipr: Any, nic: Nic, link: int) -> None:
    _set_mac(ipr, link, nic.mac)
    ipr.link("set", index=link, state="up")
    put_addresses(ipr, link, nic.link, nic.link_addresses)
    for subnet in {str(ipaddress.ip_interface(address).network) for address in nic.link_addresses}:
        if Route(subnet) not in nic.link_routes:  # the plugin had taken away what the kernel makes with an address
            _route_change(ipr, "del", Route(subnet), link)
    for route in nic.link_routes:
        # Beside those of other links: several networks' plugins set a default route each.
        _route_change(ipr, "append" if route.gateway else "replace", route, link)
    neighbours.put_back(ipr, nic, link)


def put_addresses(ipr: Any, index: int, name: str, addresses: Sequence[str]) -> None:
    """On a link of the pod's namespace, where new ones have no IPv6 since `build`."""
    if any(":" in address for address in addresses):
        _write_sysctl(f"net/ipv6/conf/{name}/disable_ipv6", "0")
    for address in addresses:
        ip, _, prefix = address.partition("/")
        ipr.addr("replace", index=index, address=ip, prefixlen=int(prefix))


def _index(name: str) -> int | None:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return None


def _quiet_namespace() -> None:
    """The namespace itself must be neither seen nor heard: the guest is the pod.

    No IPv6 (no link-local address, no MLD, no router solicitation from bridge and ports), no ARP answers, and bridged frames
    do not pass the namespace's own iptables: where br_netfilter is loaded each new namespace starts with that on.
    """
    for name in ("all", "default"):
        _write_sysctl(f"net/ipv6/conf/{name}/disable_ipv6", "1")
    _write_sysctl("net/ipv4/conf/all/arp_ignore", "8")
    for name in ("iptables", "ip6tables", "arptables"):
        _write_sysctl(f"net/bridge/bridge-nf-call-{name}", "0")


def _disable_ipv6(link: str) -> None:
    _write_sysctl(f"net/ipv6/conf/{link}/disable_ipv6", "1")


def _write_sysctl(name: str, value: str) -> None:
    """A kernel without the feature has no such file. /proc/sys/net shows the namespace of the thread that opens it."""
    try:
        with open(f"/proc/sys/{name}", "w", encoding="ascii") as file:
            file.write(value)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise internal(f"sysctl {name}={value}: {exc.strerror}") from exc


def _guard_dhcp(nics: Sequence[Nic]) -> None:
    """On a network without IPAM addresses are the network's own matter, and those of its DHCP server."""
    unguarded = [port for nic in nics if not nic.addresses for port in (nic.link, nic.tap)]
    batch, acknowledgements = dhcp_guard.dhcp_guard(unguarded)
    try:
        for code in netlink.exchange(_NETLINK_NETFILTER, batch, acknowledgements):
            _raise_for(code)
    except OSError as exc:
        raise unavailable(_no_guard(exc.strerror or str(exc))) from exc


def _raise_for(code: int) -> None:
    if code not in (0, errno.EEXIST):
        raise unavailable(_no_guard(os.strerror(code)))


def _no_guard(why: str) -> str:
    needs = "the kernel needs nf_tables with the bridge family (CONFIG_NF_TABLES_BRIDGE)"
    return f"the DHCP guard cannot be set up: {why}; {needs}"
