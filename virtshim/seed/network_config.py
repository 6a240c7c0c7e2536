"""The script that writes /etc/resolv.conf where nobody else does. Pure.

cloud-init hands the name servers to what configures the NICs. netplan and networkd hand them on to systemd-resolved, ifupdown to
the package resolvconf; in a guest without those nobody writes the file. The script looks first, so it changes nothing where
somebody does: a link is somebody's, and so is a file with the pod's name server in it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any, Final

from virtshim.model.network import Dns, Interface, Route

# cloud-init network configuration for the NICs of a pod. No I/O.
#
# Version 1, for it is what all five of cloud-init's renderers understand the same way: a subnet's `gateway` becomes
# ifupdown's `gateway`, which is set on-link, Red Hat's GATEWAY, and in newer versions GatewayOnLink and netplan's
# on-link. Of version 2 only netplan gets all; elsewhere `on-link` and `scope` are lost, and a route without a gateway
# is an error.

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# How a route without a gateway is written: renderers demand one, and all below them take this for none.
_NO_GATEWAY: Final = {4: "0.0.0.0", 6: "::"}  # noqa: S104  nothing is bound


def network_config(interfaces: Sequence[Interface], dns: Dns) -> dict[str, Any] | None:
    """None if there is nothing to configure. A NIC is found by its MAC and named as in the pod's network. Of several
    default routes the first of each address family is kept: only one of them could work."""
    if not interfaces:
        return None
    families_with_default: set[int] = set()
    config: list[dict[str, Any]] = []
    dns_is_told = False
    for interface in interfaces:
        link = _link(interface)
        if subnets := _subnets(interface, families_with_default):
            link["subnets"] = subnets
            if not dns_is_told:
                subnets[0] |= _named(dns, "dns_nameservers", "dns_search")
                dns_is_told = True
        config.append(link)
    if not dns_is_told and (found := _named(dns, "address", "search")):
        config.append({"type": "nameserver", **found})
    return {"version": 1, "config": config}


def _link(interface: Interface) -> dict[str, Any]:
    link: dict[str, Any] = {"type": "physical", "name": interface.name, "mac_address": interface.mac.lower()}
    if interface.mtu > 0:
        link["mtu"] = interface.mtu
    return link


def _named(dns: Dns, servers: str, searches: str) -> dict[str, list[str]]:
    found = {servers: list(dns.servers), searches: list(dns.searches)}
    return {name: values for name, values in found.items() if values}


def _subnets(interface: Interface, families_with_default: set[int]) -> list[dict[str, Any]]:
    """One for each address; the first of a family carries that family's routes."""
    subnets: list[dict[str, Any]] = []
    families: set[int] = set()
    for text in interface.addresses:
        # Also for IPv6: not each renderer of each version knows "static6".
        subnet: dict[str, Any] = {"type": "static", "address": text}
        address = ipaddress.ip_interface(text)
        if address.version not in families:
            families.add(address.version)
            subnet |= _routing(interface, address, families_with_default)
        subnets.append(subnet)
    return subnets


def _routing(
    interface: Interface, address: ipaddress.IPv4Interface | ipaddress.IPv6Interface, families_with_default: set[int]
) -> dict[str, Any]:
    """The keys of that address's subnet."""
    own = [ipaddress.ip_interface(text).network for text in interface.addresses]
    routes = [route for route in interface.routes if _destination(route).version == address.version]
    default = next((route for route in routes if _is_default(route)), None)
    if address.version in families_with_default:
        default = None
    result: dict[str, Any] = {}
    told = [route for route in routes if not _is_default(route) and not _is_the_kernels(route, own)]
    if default:
        families_with_default.add(address.version)
        if default.gateway is None:
            told.append(default)
        else:
            result["gateway"] = default.gateway
            if address.version == 4 and address.network.prefixlen == 32 and default.gateway != str(address.ip):
                result["pointopoint"] = default.gateway  # ifupdown makes the way to it of this; others do not look
    gateways = [route.gateway for route in (default, *told) if route and route.gateway]
    on_link = [route for route in told if route.gateway is None]
    through = [route for route in told if route.gateway is not None]
    written = [_route(route) for route in (*_ways(gateways, own, on_link), *on_link, *through)]
    return {**result, "routes": written} if written else result


def _is_the_kernels(route: Route, own: Sequence[_Network]) -> bool:
    """It makes that one together with the address."""
    return route.gateway is None and _destination(route) in own


def _ways(gateways: Iterable[str], own: Sequence[_Network], on_link: Sequence[Route]) -> Iterable[Route]:
    """Routes to the gateways that are in none of the NIC's subnets, which is usual for addresses that are a host's (/32): the
    guest's kernel would refuse a route through them."""
    near = [*own, *(_destination(route) for route in on_link if not _is_default(route))]
    for gateway in dict.fromkeys(gateways):
        address = ipaddress.ip_address(gateway)
        everywhere = address.version == 6 and address.is_link_local  # fe80::/10 is on every link
        if not everywhere and not any(address in network for network in near):
            yield Route(str(ipaddress.ip_network(address)))


def _destination(route: Route) -> _Network:
    return ipaddress.ip_network(route.destination, strict=False)


def _is_default(route: Route) -> bool:
    return _destination(route).prefixlen == 0


def _route(route: Route) -> dict[str, Any]:
    destination = _destination(route)
    result = {"network": str(destination), "gateway": route.gateway or _NO_GATEWAY[destination.version]}
    if destination.version == 6:
        result["netmask"] = str(destination.prefixlen)  # once more, for sysconfig in 20.x, which looks for it
    return result


# Arguments: the file, systemd-resolved's program, the file's text.
WRITE: Final = r"""
file=$1 resolved=$2 text=$3
if [ -L "$file" ]; then
  [ -e "$file" ] || [ -e "$resolved" ] && exit 0
  rm -f "$file"
fi
first=${text%%
*}
grep -qxF "$first" "$file" 2>/dev/null && exit 0
printf '%s\n' "$text" >"$file"
"""


def resolver_command(dns: Dns) -> tuple[str, ...]:
    """For a guest's root, once its network is configured."""
    words = ("/etc/resolv.conf", "/lib/systemd/systemd-resolved", _text(dns))
    return ("/bin/sh", "-c", WRITE, "virtshim-resolver", *words)


def _text(dns: Dns) -> str:
    lines = [f"nameserver {server}" for server in dns.servers]
    for name, values in (("search", dns.searches), ("options", dns.options)):
        if values:
            lines.append(" ".join((name, *values)))
    return "\n".join(lines)
