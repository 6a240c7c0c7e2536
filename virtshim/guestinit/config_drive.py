"""The documents of a seed as OpenStack's config drive has them. Pure.

For guests that look for one: cloudbase-init on Windows, and what was made for Virtlet. cloud-init reads the network's document
by a way of its own (`convert_net_json`), which hands the keys of its network configuration through; so what OpenStack has no
word for, a gateway outside of the NIC's subnet, is told by cloud-init's.
https://docs.openstack.org/nova/latest/user/metadata.html
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any, Final

LABEL: Final = "config-2"
# Where its files are in the ISO.
DIRECTORY: Final = "openstack/latest"

_ANY: Final = "0.0.0.0"  # noqa: S104  nothing is bound
# Keys that cloud-init hands through.
_THROUGH: Final = ("pointopoint", "dns_nameservers", "dns_search")


def meta_data(generated: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`generated`: as of a NoCloud seed; `own`: what the pod says, which is laid over."""
    keys = generated.get("public-keys", [])
    document = {
        "uuid": generated["instance-id"],
        "hostname": generated["local-hostname"],
        "name": generated["local-hostname"],
        **({"public_keys": {f"key-{number}": key for number, key in enumerate(keys)}} if keys else {}),
    }
    return {**document, **own}


def vendor_data(text: str) -> dict[str, Any]:
    """It is JSON here; cloud-init takes its part."""
    return {"cloud-init": text}


def network_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`: as of a NoCloud seed (`network_config`)."""
    links: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    servers: list[str] = []
    for entry in config["config"]:
        if entry["type"] == "nameserver":
            servers += entry.get("address", [])
            continue
        links.append(_link(entry))
        for subnet in entry.get("subnets", []):
            networks.append({"id": f"network{len(networks)}", "link": entry["name"], **_network(subnet)})
            servers += subnet.get("dns_nameservers", [])
    services = [{"type": "dns", "address": server} for server in servers]
    return {"links": links, "networks": networks, "services": services}


def _link(entry: Mapping[str, Any]) -> dict[str, Any]:
    link = {"id": entry["name"], "name": entry["name"], "type": "phy", "ethernet_mac_address": entry["mac_address"]}
    return {**link, **({"mtu": entry["mtu"]} if "mtu" in entry else {})}


def _network(subnet: Mapping[str, Any]) -> dict[str, Any]:
    address = ipaddress.ip_interface(subnet["address"])
    network: dict[str, Any]
    if isinstance(address, ipaddress.IPv4Interface):
        network = {"type": "ipv4", "ip_address": str(address.ip), "netmask": str(address.netmask)}
    else:
        # "ipv6" means to cloud-init what not each of its renderers knows.
        network = {"type": "static", "ip_address": str(address)}
    network |= {key: subnet[key] for key in _THROUGH if key in subnet}
    routes = list(_routes(subnet))
    gateway = subnet.get("gateway")
    if gateway is not None:
        if address.version == 4 and ipaddress.ip_address(gateway) in address.network:
            routes.append({"network": _ANY, "netmask": _ANY, "gateway": gateway})
        else:
            network["gateway"] = gateway
    return {**network, "routes": routes} if routes else network


def _routes(subnet: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for route in subnet.get("routes", []):
        destination = ipaddress.ip_network(route["network"])
        if destination.version == 4:
            yield {
                "network": str(destination.network_address),
                "netmask": str(destination.netmask),
                "gateway": route["gateway"],
            }
        else:
            yield dict(route)
