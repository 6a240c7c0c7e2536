"""Values of networks that tapmanager and virtshim-shares read from JSON. Pure. virtshim-shares loads no more of tapmanager.

The functions, and `from_json`, raise `fields.BadField`, whose message begins with the field's path.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from tapmanager.fields import MAC, BadField, Json, each_text, refuse_unknown, text, texts

# Filters of what a guest sends through its tap, from the weakest to the strongest.
OFF, MAC_ONLY, WITH_IP = FILTERS = ("off", "mac", "mac+ip")
# passt's own addresses in the guest's network. Connections to them arrive at the pod's loopback.
PASST_IPV4, PASST_IPV6 = "169.254.7.1", "fe80::7:1"
# passt splits what is larger than the path's MTU.
PASST_MTU = 65520
_LONGEST_PATH = 4095
# Linux allows more characters: its dev_valid_name() forbids only "/", ":" and white space. Sane plugins do not use the rest.
_LINK = re.compile(r"(?!\.\.?$)[!-.0-9;-~]{1,15}")


def mac_address(value: str, where: str) -> str:
    """Six octets in lower case with colons; not a group address."""
    lowered = value.lower()
    if not MAC.fullmatch(lowered) or int(lowered[:2], 16) & 1:
        raise BadField(f"{where}: not a unicast MAC address: {value[:40]!r}")
    return lowered


def mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def link_name(value: str, where: str) -> str:
    """The name of a network interface: 1 to 15 printable characters without "/" and ":"."""
    if not _LINK.fullmatch(value):
        raise BadField(f"{where}: not an interface name: {value[:40]!r}")
    return value


def cidr(value: str, where: str) -> str:
    """An address with its prefix length, in canonical spelling: `10.88.0.5/16`."""
    bad = f"{where}: not an address with a prefix length: {value[:60]!r}"
    if "/" not in value:
        raise BadField(bad)
    try:
        return str(ipaddress.ip_interface(value))
    except ValueError as exc:
        raise BadField(bad) from exc


def network(value: str, where: str) -> str:
    """The destination of a route, with host bits cleared: `0.0.0.0/0`."""
    try:
        return str(ipaddress.ip_network(value, strict=False))
    except ValueError as exc:
        raise BadField(f"{where}: not a network: {value[:60]!r}") from exc


def address(value: str, where: str) -> str:
    """A bare IP address in canonical spelling."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError as exc:
        raise BadField(f"{where}: not an IP address: {value[:60]!r}") from exc


@dataclass(frozen=True, slots=True)
class Dns:
    servers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Dns:
        refuse_unknown(obj, cls.__slots__, where)
        servers = each_text(obj, "servers", where, address)
        return cls(servers, texts(obj, "searches", where), texts(obj, "options", where))


@dataclass(frozen=True, slots=True)
class Existing:
    """The network namespace of a sandbox that another runtime made. `addresses`: the pod's, the primary one first; empty for
    those of the namespace."""

    path: str
    addresses: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Existing:
        refuse_unknown(obj, cls.__slots__, where)
        path = text(obj, "path", where)
        if not path.startswith("/") or not path.isprintable() or len(path) > _LONGEST_PATH:
            raise BadField(f"{where}.path: not an absolute path: {path[:200]!r}")
        return cls(path, each_text(obj, "addresses", where, address))
