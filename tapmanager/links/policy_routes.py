"""Policy routing: rules that select other routing tables than the main one, and the routes of these tables, as far as a guest can
get them. Converts from and to JSON like `tapmanager.pod`, and reads them from the kernel.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tapmanager.fields import BadField, Json, number, refuse_unknown, text
from tapmanager.links import netlink
from tapmanager.links.netlink import Attributes

# unspecified, default, main, local: tables that every system has itself.
RESERVED_TABLES = frozenset({0, 253, 254, 255})
_MOST = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """Packets of `family` (4, 6) from `source` to `target` (networks, "" for all) use `table`. Rules apply in the order of
    `priority`, the lowest first."""

    family: int
    priority: int
    table: int
    source: str = ""
    target: str = ""

    @classmethod
    def from_json(cls, obj: Json, where: str) -> PolicyRule:
        refuse_unknown(obj, cls.__slots__, where)
        if (family := number(obj, "family", where, 4, 6)) == 5:
            raise BadField(f"{where}.family: must be 4 or 6")
        source, target = (text(obj, name, where, "") for name in ("source", "target"))
        return cls(
            family,
            number(obj, "priority", where, 1, _MOST),
            _table(obj, where),
            _subnet(source, family, f"{where}.source") if source else "",
            _subnet(target, family, f"{where}.target") if target else "",
        )


@dataclass(frozen=True, slots=True)
class TableRoute:
    """A route of `table` through its NIC. `gateway`: "" means on-link. `source`: the preferred source address, "" for any.
    `metric`, `mtu`: 0 means the guest's choice."""

    table: int
    destination: str
    gateway: str = ""
    source: str = ""
    metric: int = 0
    mtu: int = 0

    @classmethod
    def from_json(cls, obj: Json, where: str) -> TableRoute:
        refuse_unknown(obj, cls.__slots__, where)
        destination = text(obj, "destination", where)
        family = 6 if ":" in destination else 4
        gateway, source = (text(obj, name, where, "") for name in ("gateway", "source"))
        return cls(
            _table(obj, where),
            _subnet(destination, family, f"{where}.destination"),
            _policy_routes_address(gateway, family, f"{where}.gateway") if gateway else "",
            _policy_routes_address(source, family, f"{where}.source") if source else "",
            number(obj, "metric", where, 0, _MOST),
            number(obj, "mtu", where, 0, _MOST),
        )


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy routing of one link. `refused`: rules for it that a guest cannot get, in the notation of `ip rule`, with the
    reason."""

    rules: tuple[PolicyRule, ...] = ()
    routes: tuple[TableRoute, ...] = ()
    refused: tuple[str, ...] = ()


def _table(obj: Json, where: str) -> int:
    found = number(obj, "table", where, 1, _MOST)
    if found in RESERVED_TABLES:
        raise BadField(f"{where}.table: table {found} is reserved for the guest's own routes")
    return found


def _subnet(value: str, family: int, where: str) -> str:
    try:
        found = ipaddress.ip_network(value)
    except ValueError as exc:
        raise BadField(f"{where}: not a network: {value[:60]!r}") from exc
    if found.version != family:
        raise BadField(f"{where}: not an IPv{family} network: {value[:60]!r}")
    return str(found)


def _policy_routes_address(value: str, family: int, where: str) -> str:
    try:
        found = ipaddress.ip_address(value)
    except ValueError as exc:
        raise BadField(f"{where}: not an IP address: {value[:60]!r}") from exc
    if found.version != family or "%" in value:
        raise BadField(f"{where}: not an IPv{family} address: {value[:60]!r}")
    return str(found)


# Reads policy routing of a pod's namespace through rtnetlink, e.g. the source-based routing of CNI's sbr. Must run inside the
# namespace.
#
# A guest gets a rule's priority, source, target and table, and a route's destination, gateway, source, metric and MTU. A rule or
# route with any other attribute is refused, because it would mean something else without the attribute. Messages use the names of
# `ip rule` and `ip route`. Numbers and structures are from linux/fib_rules.h and linux/rtnetlink.h.

# A function that returns the payloads of a dump: (kind, head).
Dump = Callable[[int, bytes], Sequence[bytes]]

_GETROUTE, _GETRULE = 26, 34
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 6}
_BYTES = {4: 4, 6: 16}

_FRA_DST, _FRA_SRC, _FRA_PRIORITY, _FRA_SUPPRESS_PREFIXLEN, _FRA_TABLE, _FRA_PAD, _FRA_L3MDEV, _FRA_PROTOCOL = (
    1, 2, 6, 14, 15, 18, 19, 21,
)  # fmt: skip
_RULES_SAID = frozenset({_FRA_DST, _FRA_SRC, _FRA_PRIORITY, _FRA_TABLE, _FRA_PAD, _FRA_PROTOCOL})
_RULES_MORE = {
    3: "iif", 4: "goto", 10: "fwmark", 11: "realms", 12: "tun_id", 13: "suppress_ifgroup", 14: "suppress_prefixlength",
    16: "fwmark", 17: "oif", 19: "l3mdev", 20: "uidrange", 22: "ipproto", 23: "sport", 24: "dport",
}  # fmt: skip
_FR_ACT_TO_TABLE = 1
_ACTIONS = {2: "goto", 3: "nop", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
_INVERTED = 2
_NOTHING_SUPPRESSED = struct.pack("=i", -1)

_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS, _RTA_CACHEINFO, _RTA_TABLE, _RTA_PREF = (
    1, 4, 5, 6, 7, 8, 12, 15, 20,
)  # fmt: skip
_ROUTES_SAID = frozenset(
    {_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS, _RTA_CACHEINFO, _RTA_TABLE}
)
_ROUTES_MORE = {
    2: "from", 3: "iif", 9: "nexthop", 11: "realms", 16: "mark", 18: "via inet6", 20: "pref", 21: "encap", 22: "encap",
    23: "expires", 30: "nhid",
}  # fmt: skip
_RTAX_MTU = 2
_UNICAST = 1
_TYPES = {
    2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole", 7: "unreachable", 8: "prohibit", 9: "throw",
}  # fmt: skip
_CLONED = 0x200

# (family, priority, table) of the rules that every namespace has.
_OWN = frozenset({(4, 0, 255), (4, 32766, 254), (4, 32767, 253), (6, 0, 255), (6, 32766, 254)})

# The key for rules that concern all links.
ALL_LINKS = 0


@dataclass(frozen=True, slots=True)
class _Rule:
    """`wrong`: the part of the rule that a guest cannot get; "" for none."""

    rule: PolicyRule
    wrong: str
    follows_table: bool
    is_l3mdev: bool

    @property
    def words(self) -> str:
        to = f" to {self.rule.target}" if self.rule.target else ""
        return f"{self.rule.priority}: from {_short(self.rule.source) or 'all'}{to} lookup {self.rule.table}"


@dataclass(frozen=True, slots=True)
class _Route:
    """`link`: ALL_LINKS for a route without a single link."""

    family: int
    link: int
    route: TableRoute
    wrong: str


def read_kernel_policies(dump: Dump = netlink.dump) -> Mapping[int, Policies]:
    """The policies by the links' numbers. Raises OSError."""
    rules = list(_rules(dump))
    if not rules:
        return {}
    return _by_link(rules, list(_routes(dump)))


def kernel_policies_of_link(found: Mapping[int, Policies], index: int) -> Policies:
    own, everybodys = found.get(index, Policies()), found.get(ALL_LINKS, Policies())
    return dataclasses.replace(own, refused=own.refused + everybodys.refused)


def _by_link(rules: Sequence[_Rule], routes: Sequence[_Route]) -> Mapping[int, Policies]:
    found: dict[int, Policies] = {}

    def add(link: int, rule: _Rule, of_table: Sequence[_Route], wrong: str) -> None:
        had = found.get(link, Policies())
        if wrong:
            found[link] = dataclasses.replace(had, refused=(*had.refused, f"{rule.words}: {wrong}"))
            return
        more = [one.route for one in of_table if one.link == link and one.route not in had.routes]
        found[link] = dataclasses.replace(had, rules=(*had.rules, rule.rule), routes=(*had.routes, *more))

    for rule in rules:
        table = [one for one in routes if (one.family, one.route.table) == (rule.rule.family, rule.rule.table)]
        if rule.is_l3mdev:  # the table depends on the device
            table = [one for one in routes if one.family == rule.rule.family]
        elif not rule.follows_table:
            add(ALL_LINKS, rule, (), rule.wrong)
        wrong = rule.wrong or _first_wrong(table)
        for link in sorted({one.link for one in table}):
            add(link, rule, table, wrong)
    chosen = {rule.family for policies in found.values() for rule in policies.rules}
    for rule in rules:
        if (
            rule.rule.family in chosen
            and rule.follows_table
            and rule.rule.table in RESERVED_TABLES
            and not rule.is_l3mdev
        ):
            add(ALL_LINKS, rule, (), "an additional rule for a table that every system has")
    return found


def _first_wrong(table: Sequence[_Route]) -> str:
    twice = Counter((one.route.destination, one.route.metric) for one in table)
    for one in table:
        if one.wrong:
            return f"route {one.route.destination}: {one.wrong}"
        if twice[one.route.destination, one.route.metric] > 1:
            return f"route {one.route.destination}: nexthop"
    return ""


def _rules(dump: Dump) -> Iterator[_Rule]:
    """The rules, without those that every namespace has."""
    for data in dump(_GETRULE, struct.pack("=12x")):
        family, target_length, source_length, tos, table, action, flags = struct.unpack_from("=BBBBB2xBI", data)
        if family not in _FAMILIES:  # rules of multicast routing
            continue
        of = netlink.attributes(data, 12)
        rule = PolicyRule(
            _FAMILIES[family],
            netlink.number(of, _FRA_PRIORITY),
            netlink.number(of, _FRA_TABLE) or table,
            _network(of.get(_FRA_SRC), source_length),
            _network(of.get(_FRA_DST), target_length),
        )
        wrong = _wrong_with_rule(of, tos, action, flags) or ("" if rule.priority else "priority 0")
        follows_table = action == _FR_ACT_TO_TABLE
        if (rule.family, rule.priority, rule.table) in _OWN and not (rule.source or rule.target) and follows_table:
            continue
        yield _Rule(rule, wrong, follows_table, _FRA_L3MDEV in of)


def _wrong_with_rule(of: Attributes, tos: int, action: int, flags: int) -> str:
    if action != _FR_ACT_TO_TABLE:
        return _ACTIONS.get(action, f"action {action}")
    if flags & _INVERTED:
        return "not"
    if tos:
        return "tos"
    more = set(of) - _RULES_SAID
    if of.get(_FRA_SUPPRESS_PREFIXLEN) == _NOTHING_SUPPRESSED:
        more.discard(_FRA_SUPPRESS_PREFIXLEN)
    return ", ".join(sorted({_RULES_MORE.get(kind, f"attribute {kind}") for kind in more}))


def _routes(dump: Dump) -> Iterator[_Route]:
    """The routes of all tables except those that every system has."""
    for data in dump(_GETROUTE, struct.pack("=12x")):
        family, length, source_length, tos, table, kind, flags = struct.unpack_from("=BBBBB2xBI", data)
        of = netlink.attributes(data, 12)
        table = netlink.number(of, _RTA_TABLE) or table
        if family not in _FAMILIES or flags & _CLONED or table in RESERVED_TABLES:
            continue
        version = _FAMILIES[family]
        destination = _network(of.get(_RTA_DST, bytes(_BYTES[version])), length)
        if version == 6 and kind == _UNICAST and ipaddress.ip_network(destination).is_link_local:
            continue  # exists on every link
        route = TableRoute(
            table,
            destination,
            _kernel_policies_address(of.get(_RTA_GATEWAY)),
            _kernel_policies_address(of.get(_RTA_PREFSRC)),
            netlink.number(of, _RTA_PRIORITY),
            netlink.number(netlink.attributes(of.get(_RTA_METRICS, b""), 0), _RTAX_MTU),
        )
        link = netlink.number(of, _RTA_OIF) if kind == _UNICAST else ALL_LINKS
        yield _Route(version, link, route, _wrong_with_route(of, source_length, tos, kind))


def _wrong_with_route(of: Attributes, source_length: int, tos: int, kind: int) -> str:
    if kind != _UNICAST:
        return _TYPES.get(kind, f"type {kind}")
    if source_length:
        return "from"
    if tos:
        return "tos"
    more = set(of) - _ROUTES_SAID
    if not any(of.get(_RTA_PREF, b"")):  # medium, the default of routes that were not advertised
        more.discard(_RTA_PREF)
    found = {_ROUTES_MORE.get(one, f"attribute {one}") for one in more}
    if set(netlink.attributes(of.get(_RTA_METRICS, b""), 0)) - {_RTAX_MTU}:
        found.add("metrics other than mtu")
    return ", ".join(sorted(found))


def _network(packed: bytes | None, length: int) -> str:
    """ "" for none."""
    return str(ipaddress.ip_network((packed, length))) if packed else ""


def _kernel_policies_address(packed: bytes | None) -> str:
    return str(ipaddress.ip_address(packed)) if packed else ""


def _short(network: str) -> str:
    """In the notation of `ip`: a host without its prefix length."""
    return network.removesuffix("/128" if ":" in network else "/32")
