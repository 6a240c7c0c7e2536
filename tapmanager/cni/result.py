"""Parses CNI results strictly: the description of the pod's network on a plugin's standard output. Pure.

Supports CNI 0.3.0 to 1.1.0, and the ip4/ip6 form of older plugins, which names no interfaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tapmanager.fields import BadField, Json, as_object, each, text, texts
from tapmanager.network_values import Dns, address, cidr, link_name, network


@dataclass(frozen=True, slots=True)
class CniInterface:
    """`sandbox` is "" for an interface that is not in the pod. `mac`, `pci` (CNI 1.1's pciID) and `mtu` are "" or 0 if
    missing."""

    name: str
    sandbox: str
    mac: str = ""
    pci: str = ""
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class CniAddress:
    """`interface`: an index into the result's interfaces; None if the plugin names none."""

    address: str
    gateway: str | None
    interface: int | None


@dataclass(frozen=True, slots=True)
class CniRoute:
    destination: str
    gateway: str | None


@dataclass(frozen=True, slots=True)
class CniResult:
    interfaces: tuple[CniInterface, ...]
    ips: tuple[CniAddress, ...]
    routes: tuple[CniRoute, ...]
    dns: Dns


def parse_result(raw: Json) -> CniResult:
    """Raises BadField, which names the wrong field."""
    interfaces = each(raw, "interfaces", "result", _interface)
    if "ips" in raw or not ("ip4" in raw or "ip6" in raw):
        ips = each(raw, "ips", "result", partial(_ip, len(interfaces)))
        routes = each(raw, "routes", "result", _route)
    else:
        families = [as_object(raw[name], name) for name in ("ip4", "ip6") if raw.get(name)]
        ips = tuple(_old_ip(item) for item in families)
        routes = tuple(route for item in families for route in each(item, "routes", "result", _route))
    return CniResult(interfaces, ips, routes, _dns(as_object(raw.get("dns") or {}, "dns")))


def _interface(item: Json, where: str) -> CniInterface:
    mtu, sandbox = item.get("mtu"), text(item, "sandbox", where, "")
    return CniInterface(
        link_name(text(item, "name", where), f"{where}.name"),
        # AWS's plugin stores a number for its DEL here, with an interface that does not exist.
        "" if sandbox.isdecimal() else sandbox,
        text(item, "mac", where, "").lower(),
        text(item, "pciID", where, "").lower(),
        mtu if isinstance(mtu, int) and 68 <= mtu <= 65535 else 0,
    )


def _ip(interfaces: int, item: Json, where: str) -> CniAddress:
    index = item.get("interface")
    if index is not None and not (isinstance(index, int) and -1 <= index < interfaces):
        raise BadField(f"{where}.interface: {index!r} is not an index of the result's interfaces")
    return CniAddress(
        cidr(text(item, "address", where), f"{where}.address"),
        _gateway(item, "gateway", where),
        None if index is None or index < 0 else index,
    )


def _old_ip(item: Json) -> CniAddress:
    return CniAddress(cidr(text(item, "ip", "ip4/ip6"), "ip4/ip6.ip"), _gateway(item, "gateway", "ip4/ip6"), None)


def _route(item: Json, where: str) -> CniRoute:
    return CniRoute(network(text(item, "dst", where), f"{where}.dst"), _gateway(item, "gw", where))


def _gateway(item: Json, name: str, where: str) -> str | None:
    value = text(item, name, where, "")
    return address(value, f"{where}.{name}") if value else None


def _dns(item: Json) -> Dns:
    """A name server that is not an address is skipped, because guests can only get addresses. The plugin's domain comes first."""
    servers = tuple(found for one in texts(item, "nameservers", "dns") for found in _addresses(one))
    searches = texts(item, "search", "dns")
    domain = text(item, "domain", "dns", "")
    if domain and domain not in searches:
        searches = (domain, *searches)
    return Dns(servers, searches, texts(item, "options", "dns"))


def _addresses(value: str) -> tuple[str, ...]:
    try:
        return (address(value, "dns"),)
    except BadField:
        return ()
