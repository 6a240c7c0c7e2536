"""cloud-init's network configuration for a pod's NICs, and a script that writes /etc/resolv.conf if nothing else does. Pure.

The configuration has version 1, because all five of cloud-init's renderers treat it alike: a subnet's `gateway` becomes
ifupdown's `gateway`, which is set on-link, Red Hat's GATEWAY, and in newer versions GatewayOnLink and netplan's on-link. Only
netplan supports all of version 2; the other renderers lose `on-link` and `scope`, and fail on a route without a gateway.

cloud-init passes name servers to the program that configures the NICs. netplan and networkd pass them on to systemd-resolved,
ifupdown to the package resolvconf. In a guest without these, nothing writes /etc/resolv.conf, so the script does. It leaves the
file alone if it is a link or already has the pod's name server.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any, Final

from virtshim.model.network import Dns, Interface, Route

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The renderers require a gateway; the programs that they write for take these addresses for none.
_NO_GATEWAY: Final = {4: "0.0.0.0", 6: "::"}  # noqa: S104  nothing is bound


def network_config(interfaces: Sequence[Interface], dns: Dns) -> dict[str, Any] | None:
    """None if there is nothing to configure. The guest finds each NIC by its MAC and names it as in the pod's network. Only the
    first default route of each address family is kept, because only one can work."""
    if not interfaces:
        return None
    families_with_default: set[int] = set()
    config: list[dict[str, Any]] = []
    dns_is_written = False
    for interface in interfaces:
        link = _link(interface)
        if subnets := _subnets(interface, families_with_default):
            link["subnets"] = subnets
            if not dns_is_written:
                subnets[0] |= _named(dns, "dns_nameservers", "dns_search")
                dns_is_written = True
        config.append(link)
    if not dns_is_written and (found := _named(dns, "address", "search")):
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
    """One for each address. The first subnet of an address family has that family's routes."""
    subnets: list[dict[str, Any]] = []
    families: set[int] = set()
    for text in interface.addresses:
        # "static" for IPv6 too, because some versions of the renderers do not know "static6".
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
    """The gateway and routes for the subnet of `address`."""
    own = [ipaddress.ip_interface(text).network for text in interface.addresses]
    routes = [route for route in interface.routes if _destination(route).version == address.version]
    default = next((route for route in routes if _is_default(route)), None)
    if address.version in families_with_default:
        default = None
    result: dict[str, Any] = {}
    others = [route for route in routes if not _is_default(route) and not _is_kernel_route(route, own)]
    if default:
        families_with_default.add(address.version)
        if default.gateway is None:
            others.append(default)
        else:
            result["gateway"] = default.gateway
            if address.version == 4 and address.network.prefixlen == 32 and default.gateway != str(address.ip):
                result["pointopoint"] = default.gateway  # ifupdown's route to the gateway; others ignore it
    gateways = [route.gateway for route in (default, *others) if route and route.gateway]
    on_link = [route for route in others if route.gateway is None]
    through = [route for route in others if route.gateway is not None]
    written = [_route(route) for route in (*_gateway_routes(gateways, own, on_link), *on_link, *through)]
    return {**result, "routes": written} if written else result


def _is_kernel_route(route: Route, own: Sequence[_Network]) -> bool:
    """Whether the kernel adds the route together with the address."""
    return route.gateway is None and _destination(route) in own


def _gateway_routes(gateways: Iterable[str], own: Sequence[_Network], on_link: Sequence[Route]) -> Iterable[Route]:
    """Routes to the gateways outside the NIC's subnets, as is usual with /32 addresses. Without them, the guest's kernel would
    refuse a route through such a gateway."""
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
        result["netmask"] = str(destination.prefixlen)  # needed by the sysconfig renderer of cloud-init 20.x
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
    """To be run in the guest as root, after its network is configured."""
    words = ("/etc/resolv.conf", "/lib/systemd/systemd-resolved", _text(dns))
    return ("/bin/sh", "-c", WRITE, "virtshim-resolver", *words)


def _text(dns: Dns) -> str:
    lines = [f"nameserver {server}" for server in dns.servers]
    for name, values in (("search", dns.searches), ("options", dns.options)):
        if values:
            lines.append(" ".join((name, *values)))
    return "\n".join(lines)
