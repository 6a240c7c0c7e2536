"""tapmanager's values: what a pod asks for, and the NICs of its guest. Pure; converts from and to JSON.

`from_json` functions raise `fields.BadField`, whose message begins with the field's path.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tapmanager.fields import (
    HEX64,
    BadField,
    Json,
    as_object,
    each,
    each_text,
    flag,
    inner,
    number,
    refuse_unknown,
    text,
    texts,
)
from tapmanager.links.policy_routes import PolicyRule, TableRoute
from tapmanager.network_values import (
    FILTERS,
    OFF,
    PASST_IPV4,
    PASST_IPV6,
    PASST_MTU,
    Dns,
    Existing,
    address,
    cidr,
    link_name,
    mac_address,
    network,
)
from tapmanager.sriov.vf_settings import VfSettings

# Characters allowed in CNI_ARGS, whose separators are ";" and "=". Kubernetes names are a subset.
_ARG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,252}")
# Queues per NIC. More do not help beyond the queues of the node's NIC. A VM has at most ten NICs, and a frame 160 descriptors.
MAX_QUEUES = 8


def sandbox_id(value: str, where: str) -> str:
    """64 lower-case hex digits, so it is safe in a path."""
    if not HEX64.fullmatch(value):
        raise BadField(f"{where}: not a sandbox id: {value[:80]!r} (64 hex digits expected)")
    return value


def filter_name(value: str, where: str) -> str:
    """One of FILTERS."""
    if value not in FILTERS:
        raise BadField(f"{where}: {value[:20]!r} is not one of {', '.join(FILTERS)}")
    return value


@dataclass(frozen=True, slots=True)
class PortMapping:
    """`protocol` is tcp, udp or sctp; `host_port` 0 means that no host port is wanted."""

    protocol: str
    container_port: int
    host_port: int
    host_ip: str = ""

    @classmethod
    def from_json(cls, obj: Json, where: str) -> PortMapping:
        refuse_unknown(obj, cls.__slots__, where)
        protocol = text(obj, "protocol", where)
        if protocol not in ("tcp", "udp", "sctp"):
            raise BadField(f"{where}.protocol: must be tcp, udp or sctp")
        host_ip = text(obj, "host_ip", where, "")
        return cls(
            protocol,
            number(obj, "container_port", where, 0, 65535),
            number(obj, "host_port", where, 0, 65535),
            address(host_ip, f"{where}.host_ip") if host_ip else "",
        )


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bits per second into and out of the pod; 0 for no limit."""

    ingress: int = 0
    egress: int = 0

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Bandwidth:
        refuse_unknown(obj, cls.__slots__, where)
        return cls(*(number(obj, name, where, 0, 10**15, 0) for name in ("ingress", "egress")))


@dataclass(frozen=True, slots=True)
class Pod:
    """The arguments of attach. `namespace`, `name` and `uid` are safe in CNI_ARGS. `hostname`: the guest's, sent by DHCP; "" to
    derive it from the pod's name. `filter`: one of FILTERS, "" for the node's. `multi_queue`: the pod's VMs may want several
    queues per NIC. `policy_routes`: the caller gives such routes to the guest; a caller of an earlier version does not. `macs`:
    of the guest's NICs, by the name of the interface in the pod; of others the plugin decides. `addresses`: wanted ones as CIDRs,
    by interface; the pod gets others if the plugins refuse them. `existing`: the namespace to attach the VMs to; without it,
    tapmanager makes one."""

    sandbox: str
    namespace: str
    name: str
    uid: str
    dns: Dns = Dns()
    port_mappings: tuple[PortMapping, ...] = ()
    hostname: str = ""
    filter: str = ""
    bandwidth: Bandwidth = Bandwidth()
    multi_queue: bool = False
    policy_routes: bool = False
    macs: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    existing: Existing | None = None

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Pod:
        identity = ("namespace", "name", "uid")
        refuse_unknown(obj, {*cls.__slots__, "pod"}.difference(identity), where)
        pod, asked = as_object(obj.get("pod"), f"{where}.pod"), text(obj, "filter", where, "")
        refuse_unknown(pod, identity, f"{where}.pod")
        for name in identity:
            if not _ARG.fullmatch(text(pod, name, f"{where}.pod")):
                raise BadField(f"{where}.pod.{name}: must be 1 to 253 letters, digits, and . _ : @ -")
        return cls(
            sandbox_id(text(obj, "sandbox", where), f"{where}.sandbox"),
            text(pod, "namespace", f"{where}.pod"),
            text(pod, "name", f"{where}.pod"),
            text(pod, "uid", f"{where}.pod"),
            inner(obj, "dns", where, Dns.from_json),
            each(obj, "port_mappings", where, PortMapping.from_json),
            text(obj, "hostname", where, ""),  # missing in records of earlier versions
            filter_name(asked, f"{where}.filter") if asked else "",
            inner(obj, "bandwidth", where, Bandwidth.from_json),
            flag(obj, "multi_queue", where),
            flag(obj, "policy_routes", where),
            inner(obj, "macs", where, _macs),
            inner(obj, "addresses", where, _addresses),
            inner(obj, "existing", where, Existing.from_json) if "existing" in obj else None,
        )

    def to_json(self) -> Json:
        return {
            "sandbox": self.sandbox,
            "pod": {"namespace": self.namespace, "name": self.name, "uid": self.uid},
            "dns": dataclasses.asdict(self.dns),
            "port_mappings": [dataclasses.asdict(mapping) for mapping in self.port_mappings],
            "hostname": self.hostname,
            "filter": self.filter,
            "bandwidth": dataclasses.asdict(self.bandwidth),
            "multi_queue": self.multi_queue,
            "policy_routes": self.policy_routes,
            "macs": dict(self.macs),
            "addresses": {name: list(wanted) for name, wanted in self.addresses.items()},
            **({"existing": dataclasses.asdict(self.existing)} if self.existing else {}),
        }


def _addresses(obj: Json, where: str) -> Mapping[str, tuple[str, ...]]:
    return {name: tuple(cidr(one, f"{where}.{name}") for one in texts(obj, name, where)) for name in obj}


def _macs(obj: Json, where: str) -> Mapping[str, str]:
    return {name: mac_address(text(obj, name, where), f"{where}.{name}") for name in obj}


@dataclass(frozen=True, slots=True)
class Route:
    """A route. `destination`: in CIDR notation. `gateway`: None means on-link."""

    destination: str
    gateway: str | None = None

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Route:
        refuse_unknown(obj, cls.__slots__, where)
        gateway = text(obj, "gateway", where, "")
        return cls(
            network(text(obj, "destination", where), f"{where}.destination"),
            address(gateway, f"{where}.gateway") if gateway else None,
        )


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A permanent neighbour entry that a plugin made: an address and its MAC."""

    address: str
    mac: str

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Neighbour:
        refuse_unknown(obj, cls.__slots__, where)
        return cls(
            address(text(obj, "address", where), f"{where}.address"),
            mac_address(text(obj, "mac", where), f"{where}.mac"),
        )


@dataclass(frozen=True, slots=True)
class Nic:
    """One guest NIC, and its devices in the pod's namespace.

    `link` is the CNI interface. The guest uses its MAC (`mac`), and the link itself got `link_mac`. `bridge` connects the link
    and `tap`, which leads to the guest. The guest must have `addresses` and `routes`. `link_addresses` and `link_routes` were
    removed from the link, and are restored before CNI DEL. `mtu` is in bytes; `route_mtu` is that of the link's routes if it is
    smaller, else 0. `neighbours`: addresses for which `bridge` answers the guest. `filter`: one of FILTERS. `multi_queue`: how
    the tap was made. `rules` select other routing tables than the main one; `table_routes` are the routes of these tables through
    this NIC. Rules and routes also stay in the namespace, because plugins look for them at DEL.
    """

    link: str
    mac: str
    link_mac: str
    bridge: str
    bridge_mac: str
    tap: str
    mtu: int
    addresses: tuple[str, ...]
    routes: tuple[Route, ...]
    link_addresses: tuple[str, ...]
    link_routes: tuple[Route, ...]
    route_mtu: int = 0
    neighbours: tuple[Neighbour, ...] = ()
    filter: str = OFF
    multi_queue: bool = False
    rules: tuple[PolicyRule, ...] = ()
    table_routes: tuple[TableRoute, ...] = ()

    @property
    def guest_mtu(self) -> int:
        return self.route_mtu or self.mtu

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Nic:
        refuse_unknown(obj, cls.__slots__, where)

        def mac(name: str) -> str:
            return mac_address(text(obj, name, where), f"{where}.{name}")

        def link(name: str) -> str:
            return link_name(text(obj, name, where), f"{where}.{name}")

        return cls(
            link=link("link"),
            mac=mac("mac"),
            link_mac=mac("link_mac"),
            bridge=link("bridge"),
            bridge_mac=mac("bridge_mac"),
            tap=link("tap"),
            mtu=number(obj, "mtu", where, 68, 65535),
            addresses=each_text(obj, "addresses", where, cidr),
            routes=each(obj, "routes", where, Route.from_json),
            link_addresses=each_text(obj, "link_addresses", where, cidr),
            link_routes=each(obj, "link_routes", where, Route.from_json),
            # Records of earlier versions lack the following fields.
            route_mtu=number(obj, "route_mtu", where, 0, 65535, 0),
            neighbours=each(obj, "neighbours", where, Neighbour.from_json),
            filter=filter_name(text(obj, "filter", where, OFF), f"{where}.filter"),
            multi_queue=flag(obj, "multi_queue", where),
            rules=each(obj, "rules", where, PolicyRule.from_json),
            table_routes=each(obj, "table_routes", where, TableRoute.from_json),
        )

    def to_json(self) -> Json:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class SharedNic:
    """The guest's NIC in a pod whose namespace another runtime made. passt carries its traffic, so the guest has the addresses
    that the namespace keeps. `link`: the namespace's interface; nothing changes it. `inode`: identifies the namespace."""

    link: str
    mac: str
    inode: int
    addresses: tuple[str, ...]

    guest_mtu: ClassVar[int] = PASST_MTU

    @property
    def routes(self) -> tuple[Route, ...]:
        """Everything goes to passt, which has these addresses for the guest."""
        families = {ipaddress.ip_interface(one).version for one in self.addresses}
        on_link = (Route(f"{PASST_IPV4}/32"),) if 4 in families else ()
        default = (("0.0.0.0/0", PASST_IPV4, 4), ("::/0", PASST_IPV6, 6))
        return (*on_link, *(Route(to, via) for to, via, family in default if family in families))

    @classmethod
    def from_json(cls, obj: Json, where: str) -> SharedNic:
        refuse_unknown(obj, cls.__slots__, where)
        return cls(
            link=link_name(text(obj, "link", where), f"{where}.link"),
            mac=mac_address(text(obj, "mac", where), f"{where}.mac"),
            inode=number(obj, "inode", where, 1, 1 << 62),
            addresses=each_text(obj, "addresses", where, cidr),
        )

    def to_json(self) -> Json:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class NicFunction:
    """A virtual function of a network card, which is itself the guest's NIC, through VFIO.

    `link`: the plugin's name for it in the pod. `pci`: its address on the host. `driver`, `mac` and `mtu` (bytes) are those of
    its link. If the plugin found the function at VFIO, it made no link: then `driver` is "", and the other values come from the
    plugin's result. `settings`: what is set for it on the card (None: unknown). `addresses` and `routes` are the guest's.
    `link_addresses` and `alias` are restored on the link before CNI DEL, because plugins look for them. `is_back`: the function
    was restored, and may belong to another pod by now. `rules` and `table_routes`: as for `Nic`.
    """

    link: str
    pci: str
    driver: str
    mac: str
    mtu: int
    addresses: tuple[str, ...]
    routes: tuple[Route, ...]
    link_addresses: tuple[str, ...] = ()
    settings: VfSettings | None = None
    is_back: bool = False
    alias: str = ""
    rules: tuple[PolicyRule, ...] = ()
    table_routes: tuple[TableRoute, ...] = ()

    @classmethod
    def from_json(cls, obj: Json, where: str) -> NicFunction:
        refuse_unknown(obj, (*cls.__slots__, "admin_mac"), where)
        admin = text(obj, "admin_mac", where, "")  # records of earlier versions have only this
        settings = obj.get("settings", {"mac": admin} if admin else None)
        return cls(
            link=link_name(text(obj, "link", where), f"{where}.link"),
            pci=text(obj, "pci", where),
            driver=text(obj, "driver", where),
            mac=mac_address(text(obj, "mac", where), f"{where}.mac"),
            mtu=number(obj, "mtu", where, 68, 65535),
            addresses=each_text(obj, "addresses", where, cidr),
            routes=each(obj, "routes", where, Route.from_json),
            link_addresses=each_text(obj, "link_addresses", where, cidr),
            settings=None
            if settings is None
            else inner({"settings": settings}, "settings", where, VfSettings.from_json),
            is_back=flag(obj, "is_back", where),
            alias=text(obj, "alias", where, ""),
            rules=each(obj, "rules", where, PolicyRule.from_json),
            table_routes=each(obj, "table_routes", where, TableRoute.from_json),
        )

    def to_json(self) -> Json:
        told = None if self.settings is None else self.settings.to_json()
        return {**dataclasses.asdict(self), "settings": told}
