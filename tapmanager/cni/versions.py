"""CNI's versions: which one a configuration is spoken with, and results of one in the form of another. Pure.

A chain is spoken with in one version, and its plugins read no other. But what one of them prints may be of another: a meta
plugin prints its delegate's result. Forms: until 0.2.0 one address of each family (`ip4`, `ip6`); then a list (`ips`), of which
each says its `version`, 4 or 6, until 0.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapmanager.fields import BadField, Json, text, texts

_IN_ORDER = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
_FAMILY_BY_NAME = frozenset({"0.1.0", "0.2.0"})
_FAMILY_IN_ADDRESS = frozenset({"0.3.0", "0.3.1", "0.4.0"})
# What a file without any is of.
_UNSAID = "0.2.0"

_FAMILIES = (("ip4", "4"), ("ip6", "6"))


def chosen(raw: Json) -> str:
    """The newest that both the network (`cniVersion`, and `cniVersions` of CNI 1.1) and we speak. Raises BadField."""
    several = texts(raw, "cniVersions", "network")
    said = (*several, text(raw, "cniVersion", "network", "") or (None if several else _UNSAID))
    spoken = [version for version in _IN_ORDER if version in said]
    if not spoken:
        where = "cniVersions" if several else "cniVersion"
        told = ", ".join(repr(version[:20]) for version in said[:9] if version)
        raise BadField(f"network.{where}: {told} is not among {', '.join(_IN_ORDER)}")
    return spoken[-1]


def has_status(version: str) -> bool:
    """And GC."""
    return version == _IN_ORDER[-1]


def has_result_at_del(version: str) -> bool:
    """Only from 0.4.0 on is DEL given the result of ADD."""
    return _IN_ORDER.index(version) >= _IN_ORDER.index("0.4.0")


def converted(result: Json, version: str) -> Json:
    """The result as that version has it. What is of no form at all stays as it is: whoever reads it says what is wrong."""
    if version in _FAMILY_BY_NAME:
        found = result if _is_by_family(result) else _by_family(result)
    else:
        found = _as_list(result) if _is_by_family(result) else result
        ips = found.get("ips")
        if isinstance(ips, list) and all(isinstance(ip, dict) for ip in ips):
            found = {**found, "ips": [_address(ip, version) for ip in ips]}
    return {**found, "cniVersion": version}


def _is_by_family(result: Json) -> bool:
    return "ip4" in result or "ip6" in result


def _address(ip: Mapping[str, object], version: str) -> Json:
    plain = {key: value for key, value in ip.items() if key != "version"}
    return {**plain, "version": _family(ip)} if version in _FAMILY_IN_ADDRESS else plain


def _family(item: Mapping[str, object], key: str = "address") -> str:
    return "6" if ":" in str(item.get(key)) else "4"


def _as_list(result: Json) -> Json:
    """A route without a gateway was through that of its family's address."""
    ips: list[Json] = []
    routes: list[Json] = []
    for name, _ in _FAMILIES:
        item = result.get(name)
        if isinstance(item, dict):
            through = {"gateway": item["gateway"]} if item.get("gateway") else {}
            implied = {"gw": item["gateway"]} if through else {}
            ips.append({"address": item.get("ip"), **through})
            routes += [{**implied, **route} for route in _objects(item.get("routes"))]
    rest = {key: value for key, value in result.items() if key not in ("ip4", "ip6")}
    return {**rest, "ips": ips, "routes": routes}


def _by_family(result: Json) -> Json:
    """The first address of each family, and the routes."""
    found = {key: value for key, value in result.items() if key not in ("ips", "routes", "interfaces")}
    for name, family in _FAMILIES:
        first = next((ip for ip in _objects(result.get("ips")) if _family(ip) == family), None)
        if first is not None:
            through = {"gateway": first["gateway"]} if first.get("gateway") else {}
            routes = [route for route in _objects(result.get("routes")) if _family(route, "dst") == family]
            found[name] = {"ip": first.get("address"), **through, **({"routes": routes} if routes else {})}
    return found


def _objects(value: object) -> Sequence[Json]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
