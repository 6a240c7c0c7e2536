"""passt, which carries the network of a VM whose sandbox another runtime made: parses requests for it, and builds its command
line. Pure. `daemons` starts it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from socket import AF_INET, AF_INET6

from tapmanager.fields import MAX_UID, BadField, Json, as_object, each_text, inner, items, number, refuse_unknown, text
from tapmanager.network_values import PASST_IPV4, PASST_IPV6, PASST_MTU, Dns, Existing, cidr, link_name

PROGRAM = "/usr/bin/passt"
# passt's own limit of search domains, and how many ports a VM has.
MOST_SEARCHES, MOST_PORTS = 6, 64
# In the directory of a share: the folder with passt's socket, and the socket in it. NAME is passt's name for itself, and no file.
FOLDER, SOCKET, NAME = "net", "sock", "passt"
# A search domain that passt accepts as a domain, and does not read as an option.
_DOMAIN = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True)
class Network:
    """A VM's passt in the namespace that another runtime made. `inode`: of the namespace. `uid`: the user that passt runs as.
    `addresses`: the guest's, one of each family. `tcp`, `udp`: the guest's ports, which passt takes in the namespace."""

    netns: str
    inode: int
    uid: int
    interface: str
    addresses: tuple[str, ...]
    tcp: tuple[int, ...] = ()
    udp: tuple[int, ...] = ()
    dns: Dns = Dns()

    @property
    def families(self) -> Sequence[int]:
        return [AF_INET6 if ":" in one else AF_INET for one in self.addresses]

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Network:
        names = ("netns", "inode", "uid", "interface", "addresses", "ports", "dns")
        refuse_unknown(obj, names, where)
        ports = as_object(obj.get("ports"), f"{where}.ports")
        refuse_unknown(ports, ("tcp", "udp"), f"{where}.ports")
        addresses = each_text(obj, "addresses", where, cidr)
        if len({":" in one for one in addresses}) != len(addresses) or not addresses:
            raise BadField(f"{where}.addresses: must be one or two, of different families")
        tcp, udp = (_ports(ports, name, f"{where}.ports") for name in ("tcp", "udp"))
        if len(tcp) + len(udp) > MOST_PORTS:
            raise BadField(f"{where}.ports: {len(tcp) + len(udp)} ports; a virtual machine has at most {MOST_PORTS}")
        dns = inner(obj, "dns", where, Dns.from_json)
        if odd := [one for one in dns.searches if not _DOMAIN.fullmatch(one)]:
            raise BadField(f"{where}.dns.searches: not a domain: {odd[0][:80]!r}")
        return cls(
            Existing.from_json({"path": obj.get("netns")}, f"{where}.netns").path,
            number(obj, "inode", where, 1, 1 << 62),
            number(obj, "uid", where, 1, MAX_UID),
            link_name(text(obj, "interface", where), f"{where}.interface"),
            addresses,
            tcp,
            udp,
            dns,
        )


def _ports(obj: Json, name: str, where: str) -> tuple[int, ...]:
    given = items(obj, name, where)
    found = tuple(number({"port": one}, "port", f"{where}.{name}", 1, 65535) for one in given)
    if len(set(found)) != len(found):
        raise BadField(f"{where}.{name}: a port is there twice")
    return found


def network_of(args: Json) -> Network | None:
    """None without `network`. Raises BadField."""
    return None if args.get("network") is None else inner(args, "network", "args", Network.from_json)


def command_line(network: Network, name: str, socket: str) -> Sequence[str]:
    """`name`: the first word, by which a running passt is found again. The guest's addresses come from the seed or by DHCP; with
    router advertisements the guest would make an address of its own, which the network does not know."""
    words = [name, "--quiet", "--socket", socket, "--interface", network.interface, "--mtu", str(PASST_MTU)]
    if len(network.addresses) == 1:
        words.append("--ipv6-only" if ":" in network.addresses[0] else "--ipv4-only")
    for one in network.addresses:
        address, _, prefix = one.partition("/")
        if ":" in one:
            words += ["--address", address, "--gateway", PASST_IPV6, "--no-ra"]
        else:
            words += ["--address", address, "--netmask", prefix, "--gateway", PASST_IPV4]
    for option, values in (("--dns", network.dns.servers), ("--search", network.dns.searches[:MOST_SEARCHES])):
        words += [word for value in values or ("none",) for word in (option, value)]
    for option, ports in (("--tcp-ports", network.tcp), ("--udp-ports", network.udp)):
        words += [word for port in ports or ("none",) for word in (option, str(port))]
    return words
