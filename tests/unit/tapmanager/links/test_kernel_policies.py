"""Rules and routes of any kernel are accepted, ignored or refused. tests/integration/network/test_policy_routes.py
reads those of this machine's kernel."""

from __future__ import annotations

import socket
import struct

import pytest

from tapmanager.links.netlink import attribute
from tapmanager.links.policy_routes import Policies, kernel_policies_of_link, read_kernel_policies

_GETRULE = 34
_DST, _OIF, _GATEWAY, _TABLE, _SUPPRESS, _L3MDEV = 1, 4, 5, 15, 14, 19
_LINK = 7


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def rule(priority: int, table: int, *more: bytes) -> bytes:
    head = struct.pack("=BBBBB2xBI", socket.AF_INET, 0, 0, 0, table, 1, 0)
    return head + number(6, priority) + number(_TABLE, table) + attribute(_SUPPRESS, b"\xff" * 4) + b"".join(more)


def route(table: int, *more: bytes, kind: int = 1) -> bytes:
    head = struct.pack("=BBBBB2xBI", socket.AF_INET, 0, 0, 0, table, kind, 0)
    return (
        head + number(_TABLE, table) + number(_OIF, _LINK) + attribute(_GATEWAY, bytes([10, 1, 0, 1])) + b"".join(more)
    )


def told(rules: list[bytes], routes: list[bytes]) -> Policies:
    own = [rule(0, 255), rule(32766, 254), rule(32767, 253)]
    found = read_kernel_policies(lambda kind, _head: [*own, *rules] if kind == _GETRULE else routes)
    return kernel_policies_of_link(found, _LINK)


def test_a_vrf_rule_is_refused_with_a_table_and_ignored_without_one() -> None:
    vrf = rule(1000, 0, attribute(_L3MDEV, b"\1"))
    assert told([vrf], [route(10)]).refused == ("1000: from all lookup 0: l3mdev",)
    assert told([vrf], [route(254)]) == Policies()


@pytest.mark.parametrize("kind", [2, 3, 9, 10, 18, 21, 22, 30, 31, 99])
def test_a_route_with_an_unknown_attribute_is_refused(kind: int) -> None:
    found = told([rule(9, 100)], [route(100, attribute(kind, b"\1\0\0\0"))])
    assert (found.rules, len(found.refused)) == ((), 1)


@pytest.mark.parametrize("kind", [3, 4, 10, 11, 12, 13, 16, 17, 20, 22, 23, 24, 25, 26, 99])
def test_a_rule_with_an_unknown_attribute_is_refused(kind: int) -> None:
    found = told([rule(9, 100, attribute(kind, b"\1\0\0\0"))], [route(100)])
    assert (found.rules, len(found.refused)) == ((), 1)


def test_multicast_routing_rules_are_ignored() -> None:
    multicast = struct.pack("=BBBBB2xBI", 128, 0, 0, 0, 253, 1, 0) + number(_TABLE, 253)
    assert told([multicast], []) == Policies()
