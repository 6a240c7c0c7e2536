"""Bridges, taps and their filters in one pod's namespace. Each public function must run inside the namespace (netns.run_inside).

pyroute2 has no types: its `Any` stays here and in `host_links`. All of `build` can be undone by `restore` from the
plan alone, from any half-made state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from ipaddress import IPv6Address
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tapmanager.errors import internal, unavailable
from tapmanager.ipv6.frame import stand_in_mac, stand_in_number_of
from tapmanager.links import kernel_links, netlink, nft, tap
from tapmanager.links.filters import (
    dhcp_guard,
    dhcp_guard_exceptions,
    gateway_rewrite_rules,
    reflections_rules,
    spoof_filter_rules,
)
from tapmanager.links.link_messages import GONE, Change, LinkSettings, batch, remove_address, remove_route, set_link
from tapmanager.links.nic_plan import KernelLink
from tapmanager.pod import Neighbour, Nic, Route

_TABLE_MAIN = 254
_SCOPE_LINK = 253
_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12
# Names of the bridge and the tap before a NIC uses them.
_BRIDGE, _TAP = "virtshim-bridge", "virtshim-tap"


def random_mac() -> str:
    """A random MAC: locally administered, unicast."""
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
    """All links of the namespace that `prepare` did not make; see `kernel_links.read`. Raises TapmanagerError."""
    try:
        return kernel_links.read(ours=(_BRIDGE, _TAP))
    except OSError as exc:
        raise internal(f"reading the pod's links: {exc.strerror or exc}") from exc


def prepare(tap_owner: int, *, multi_queue: bool) -> None:
    """Makes the parts of a pod's first NIC that do not depend on CNI's result: a bridge, a tap and the DHCP guard. They have
    names that no plugin uses, and are down, because plugins run at the same time. `build` uses them; a pod without such a NIC
    leaves them unused. Raises TapmanagerError, OSError."""
    _filter(dhcp_guard())
    with IPRoute() as ipr:
        _make_pair(ipr, tap_owner, multi_queue=multi_queue)


def renew_guard(nics: Sequence[Nic]) -> None:
    """Replaces the guard of an earlier version, which let more through, so that no other server reaches the guest. Raises
    TapmanagerError."""
    _filter([*dhcp_guard(), *_dhcp_exceptions(nics)])


def _make_pair(ipr: Any, tap_owner: int, *, multi_queue: bool) -> None:
    with netlink_errors(f"making {_BRIDGE}"):
        ipr.link(
            "add",
            ifname=_BRIDGE,
            kind="bridge",
            br_stp_state=0,
            br_forward_delay=0,
            br_ageing_time=0,  # two ports: each frame leaves at the other port, whatever its MAC
            br_mcast_snooping=0,  # there is no querier, so snooping would drop neighbour discovery
        )
    tap.create(_TAP, tap_owner, multi_queue=multi_queue)


def build(nics: Sequence[Nic], tap_owner: int) -> None:
    """Gives each CNI interface's MAC and addresses to the guest, and bridges the interface to a tap. `prepare` has made the first
    bridge and tap. Raises TapmanagerError, OSError."""
    _filter([*_dhcp_exceptions(nics), *spoof_filter_rules(nics), *reflections_rules(nics)])
    _quiet_namespace()
    for nic in nics:
        if _index(_TAP) is None:
            with IPRoute() as ipr:
                _make_pair(ipr, tap_owner, multi_queue=nic.multi_queue)
        _build_one(nic)


def _build_one(nic: Nic) -> None:
    link, bridge, guest = _index(nic.link), _index(_BRIDGE), _index(_TAP)
    if link is None:
        raise internal(f"interface {nic.link} vanished while it was being bridged")
    if bridge is None or guest is None:
        raise internal(f"{_BRIDGE} and {_TAP} vanished while {nic.link} was being bridged")
    doing = f"bridging {nic.link} to {nic.tap}"
    # Removes the addresses, with which the kernel removes their routes, and then device routes that do not depend on an address.
    routes = [remove_route(doing, link, route.destination, route.gateway) for route in reversed(nic.link_routes)]
    addresses = [remove_address(doing, link, address) for address in nic.link_addresses]
    joins = LinkSettings(mac=nic.link_mac, master=bridge)
    codes = _carry_out(
        *routes,
        *addresses,
        set_link(doing, bridge, LinkSettings(nic.bridge, nic.bridge_mac, nic.mtu)),
        set_link(doing, guest, LinkSettings(nic.tap, mtu=nic.mtu, master=bridge)),
        dataclasses.replace(set_link(doing, link, joins), fine={errno.EBUSY}),
    )
    if codes[-1] == errno.EBUSY:
        with netlink_errors(doing), IPRoute() as ipr:
            _set_mac(ipr, link, nic.link_mac)
            ipr.link("set", index=link, master=bridge, state="up")
    if nic.neighbours:
        answer_for(nic, nic.neighbours)


def answer_for(nic: Nic, wanted: Sequence[Neighbour]) -> None:
    """Makes the NIC's bridge answer the guest for these neighbours. Raises TapmanagerError, OSError."""
    if kernel_links.any_ipv6(wanted):
        _let_know_ipv6(nic.bridge)
    with netlink_errors(f"answering for {', '.join(one.address for one in wanted)}"), IPRoute() as ipr:
        kernel_links.answer_for(ipr, nic, wanted)


def _let_know_ipv6(bridge: str) -> None:
    """Turns on IPv6 on the bridge, because it needs IPv6 to have IPv6 neighbours. It gets no address, so it sends nothing."""
    for name, value in (("accept_ra", "0"), ("addr_gen_mode", "1"), ("disable_ipv6", "0")):
        _write_sysctl(f"net/ipv6/conf/{bridge}/{name}", value)


def stand_in_for(nic: Nic, router: IPv6Address, gateway: bytes) -> None:
    """Makes `router` (see `ipv6.frame`) stand for the gateway with this MAC, for the NIC's guest. If the stand-in exists,
    only the gateway's MAC changes, and frames pass meanwhile. Raises TapmanagerError, OSError."""
    number = stand_in_number_of(router)
    mac = stand_in_mac(number)
    _filter(gateway_rewrite_rules(nic.tap, number, mac, gateway))
    if str(router) in answered_for(nic):  # the last step below is done
        return
    port = f"virtshim-{nic.tap}"
    if _index(port) is None:
        tap.create(port, 0)
    _let_know_ipv6(nic.bridge)
    with netlink_errors(f"answering for {router}"), IPRoute() as ipr:
        kernel_links.add_stand_in(ipr, nic, Neighbour(str(router), mac.hex(":")), port)


def answered_for(nic: Nic) -> Collection[str]:
    """The addresses that the NIC's bridge answers for. Raises OSError."""
    return kernel_links.permanent_neighbours(socket.if_nametoindex(nic.bridge))


def _carry_out(*changes: Change) -> list[int]:
    """Sends the changes. Returns the kernel's answer to each; raises for an answer that is not fine."""
    try:
        codes = list(netlink.exchange(_NETLINK_ROUTE, batch(changes), len(changes)))
    except OSError as exc:
        raise internal(f"{changes[-1].doing}: no answer from the kernel: {exc}") from exc
    for change, code in zip(changes, codes, strict=True):
        if code and code not in change.fine:
            raise internal(f"{change.doing}: the kernel refused: {os.strerror(code)}")
    return codes


@contextlib.contextmanager
def _ignore_missing(*more: int) -> Iterator[None]:
    """Ignores errors for objects that have gone. `more`: other errors to ignore."""
    try:
        yield
    except NetlinkError as exc:
        if exc.code not in (*GONE, *more):
            raise


def _route_change(ipr: Any, command: str, route: Route, link: int) -> None:
    extra = {"gateway": route.gateway} if route.gateway else {"scope": _SCOPE_LINK}
    if ipaddress.ip_network(route.destination).version == 6:
        extra.pop("scope", None)
    with _ignore_missing(errno.EEXIST):
        ipr.route(command, dst=route.destination, oif=link, table=_TABLE_MAIN, **extra)


def _set_mac(ipr: Any, link: int, mac: str) -> None:
    """Sets the MAC, with the link down, because some drivers require that."""
    try:
        ipr.link("set", index=link, address=mac)
    except NetlinkError as exc:
        if exc.code != errno.EBUSY:
            raise
        ipr.link("set", index=link, state="down")
        ipr.link("set", index=link, address=mac)
        ipr.link("set", index=link, state="up")


def restore(nics: Sequence[Nic]) -> list[str]:
    """Restores the CNI interfaces as the plugins left them, because DEL of bridge and ptp reads the addresses from the
    interface to find the masquerading rules to remove. Returns failures instead of raising, because DEL must be tried anyway.
    Bridge and tap vanish with the namespace: removing them here would take the kernel longer than everything else."""
    trouble: list[str] = []
    with IPRoute() as ipr:
        for nic in nics:
            _try(trouble, f"restoring {nic.link}", partial(_restore_if_there, ipr, nic))
    return trouble


def make_substitutes(nics: Sequence[Nic]) -> list[str]:
    """In an empty namespace, makes interfaces with the names and addresses of the lost ones, but without a network. Returns
    failures like `restore`."""
    trouble: list[str] = []
    with IPRoute() as ipr:
        for nic in nics:
            _try(trouble, f"standing in for {nic.link}", partial(_stand_in_one, ipr, nic))
    return trouble


def _stand_in_one(ipr: Any, nic: Nic) -> None:
    ipr.link("add", ifname=nic.link, kind="bridge", address=nic.mac)
    _add_addresses(ipr, _index(nic.link), nic.link_addresses)


def _try(trouble: list[str], doing: str, work: Callable[[], None]) -> None:
    try:
        work()
    except (NetlinkError, OSError) as exc:
        trouble.append(f"{doing}: {exc}")


def _restore_if_there(ipr: Any, nic: Nic) -> None:
    if (link := _index(nic.link)) is not None:
        _restore_one(ipr, nic, link)


def _restore_one(ipr: Any, nic: Nic, link: int) -> None:
    ipr.link("set", index=link, master=0)
    bridge = _index(nic.bridge) if nic.neighbours else None
    if bridge is not None:
        ipr.link("set", index=bridge, state="down")  # it then forgets its neighbours
    _set_mac(ipr, link, nic.mac)
    ipr.link("set", index=link, state="up")
    put_addresses(ipr, link, nic.link, nic.link_addresses)
    for subnet in {str(ipaddress.ip_interface(address).network) for address in nic.link_addresses}:
        # If the plugin had removed the route that the kernel makes with an address, it is removed again.
        if Route(subnet) not in nic.link_routes:
            _route_change(ipr, "del", Route(subnet), link)
    for route in nic.link_routes:
        # Adds the route beside those of other links, because each network's plugin may set a default route.
        _route_change(ipr, "append" if route.gateway else "replace", route, link)
    kernel_links.restore_neighbours(ipr, nic, link)


def put_addresses(ipr: Any, index: int, name: str, addresses: Sequence[str]) -> None:
    """Adds addresses to a link of the pod's namespace, where `build` has turned off IPv6 for new links."""
    if any(":" in address for address in addresses):
        _write_sysctl(f"net/ipv6/conf/{name}/disable_ipv6", "0")
    _add_addresses(ipr, index, addresses)


def _add_addresses(ipr: Any, index: int | None, addresses: Sequence[str]) -> None:
    for address in addresses:
        ip, _, prefix = address.partition("/")
        ipr.addr("replace", index=index, address=ip, prefixlen=int(prefix))


def _index(name: str) -> int | None:
    """None if there is no such link. Raises OSError. (`if_nametoindex` says the same when it gets no descriptor.)"""
    return next((index for index, there in socket.if_nameindex() if there == name), None)


def _quiet_namespace() -> None:
    """Makes the namespace itself silent, because only the guest may appear as the pod.

    No IPv6 (no link-local address, no MLD, no router solicitations of bridge and ports), and no ARP answers. Bridged frames
    do not pass the namespace's own iptables, which is on in each new namespace if br_netfilter is loaded.
    """
    for name in ("all", "default"):
        _write_sysctl(f"net/ipv6/conf/{name}/disable_ipv6", "1")
    _write_sysctl("net/ipv4/conf/all/arp_ignore", "8")
    for name in ("iptables", "ip6tables", "arptables"):
        _write_sysctl(f"net/bridge/bridge-nf-call-{name}", "0")


def _write_sysctl(name: str, value: str) -> None:
    """Writes a sysctl, unless the kernel lacks it. /proc/sys/net shows the namespace of the thread that opens the file."""
    try:
        with open(f"/proc/sys/{name}", "w", encoding="ascii") as file:
            file.write(value)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise internal(f"sysctl {name}={value}: {exc.strerror}") from exc


def _dhcp_exceptions(nics: Sequence[Nic]) -> Sequence[bytes]:
    """Lets DHCP pass for NICs without IPAM, whose addresses come from the network's own DHCP server."""
    return dhcp_guard_exceptions([port for nic in nics if not nic.addresses for port in (nic.link, nic.tap)])


def _filter(messages: Sequence[bytes]) -> None:
    if not messages:
        return
    try:
        for code in netlink.exchange(_NETLINK_NETFILTER, *nft.batch(messages)):
            if code not in (0, errno.EEXIST):
                raise OSError(code, os.strerror(code))  # noqa: TRY301  reported like a failed exchange
    except OSError as exc:
        raise unavailable(
            f"the guest's frames cannot be filtered: {exc.strerror or exc}; the kernel needs nf_tables with the bridge family "
            "(CONFIG_NF_TABLES_BRIDGE)"
        ) from exc
