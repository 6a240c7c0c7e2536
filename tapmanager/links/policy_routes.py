"""Rules that have packets follow other tables than the main one, and these tables' routes, as far as a guest can be given them.
Pure; JSON in and out as `tapmanager.pod`'s.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from tapmanager.fields import BadField, Json, number, refuse_unknown, text

# unspecified, default, main, local: each system has its own.
RESERVED_TABLES = frozenset({0, 253, 254, 255})
_MOST = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """Packets of that `family` (4, 6) from `source` to `target`, networks or "" for all, follow `table`. Rules are asked by
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
    """A route of `table` by the NIC that has it. `gateway` "": on-link; `source`: the sender's address where it has not chosen
    one, "" for any; `metric` and `mtu` 0: the guest's choice."""

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
            _address(gateway, family, f"{where}.gateway") if gateway else "",
            _address(source, family, f"{where}.source") if source else "",
            number(obj, "metric", where, 0, _MOST),
            number(obj, "mtu", where, 0, _MOST),
        )


@dataclass(frozen=True, slots=True)
class Policies:
    """Of one link. `refused`: the rules that lead to it and that no guest can be given, in `ip rule`'s words, with what of it no
    guest can be given."""

    rules: tuple[PolicyRule, ...] = ()
    routes: tuple[TableRoute, ...] = ()
    refused: tuple[str, ...] = ()


def _table(obj: Json, where: str) -> int:
    found = number(obj, "table", where, 1, _MOST)
    if found in RESERVED_TABLES:
        raise BadField(f"{where}.table: {found} is the guest's own")
    return found


def _subnet(value: str, family: int, where: str) -> str:
    try:
        found = ipaddress.ip_network(value)
    except ValueError as exc:
        raise BadField(f"{where}: not a network: {value[:60]!r}") from exc
    if found.version != family:
        raise BadField(f"{where}: not of IPv{family}: {value[:60]!r}")
    return str(found)


def _address(value: str, family: int, where: str) -> str:
    try:
        found = ipaddress.ip_address(value)
    except ValueError as exc:
        raise BadField(f"{where}: not an IP address: {value[:60]!r}") from exc
    if found.version != family or "%" in value:
        raise BadField(f"{where}: not an address of IPv{family}: {value[:60]!r}")
    return str(found)
