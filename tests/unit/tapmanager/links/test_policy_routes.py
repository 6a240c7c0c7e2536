"""Rules and the routes of tables survive JSON, and a record that a guest cannot have is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tapmanager.fields import BadField
from tapmanager.links.policy_routes import PolicyRule, TableRoute

RULE = PolicyRule(4, 32765, 100, "10.1.0.2/32", "10.9.0.0/16")
ROUTE = TableRoute(100, "fd00:9::/64", "fd00::1", "fd00::2", 1024, 1400)


def test_rules_and_routes_survive_json() -> None:
    assert PolicyRule.from_json(json.loads(json.dumps(dataclasses.asdict(RULE))), "rule") == RULE
    assert TableRoute.from_json(json.loads(json.dumps(dataclasses.asdict(ROUTE))), "route") == ROUTE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("table", 254),
        ("table", 255),
        ("table", 253),
        ("table", 0),
        ("table", "main"),
        ("table", 1 << 32),
        ("priority", 0),
        ("priority", True),
        ("family", 5),
        ("source", "fd00::/64"),
        ("source", "10.1.0.2/32; reboot"),
        ("target", "$(reboot)"),
        ("target", "10.1.0.2/8"),
        ("fwmark", 1),
    ],
)
def test_an_unsupported_rule_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(BadField, match=rf"^rule\.{field}"):
        PolicyRule.from_json({**dataclasses.asdict(RULE), field: value}, "rule")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("table", 254),
        ("destination", "default"),
        ("destination", "10.0.0.0/8 dev lo"),
        ("gateway", "10.0.0.1"),
        ("gateway", "fe80::1%eth0"),
        ("source", "fd00::2/64"),
        ("metric", -1),
        ("mtu", "1400"),
        ("type", "blackhole"),
    ],
)
def test_an_unsupported_route_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(BadField, match=rf"^route\.{field}"):
        TableRoute.from_json({**dataclasses.asdict(ROUTE), field: value}, "route")
