"""The policy routes in the guest's script have only addresses and numbers, whatever the record says."""

from __future__ import annotations

import dataclasses

import pytest

from virtshim.guest.set_up_scripts import SET_POLICY_ROUTES, policy_routes_command
from virtshim.model.network import Interface, PolicyRule, TableRoute

FIRST = Interface("eth0", "0a:58:00:00:00:01", 1500, ("10.88.0.5/16",))
SECOND = Interface(
    "net1",
    "0A:58:00:00:00:02",
    1500,
    ("10.90.9.2/32", "fd00:90::2/128"),
    rules=(PolicyRule(6, 32765, 100, "fd00:90::2/128"), PolicyRule(4, 32765, 100, "10.90.9.2/32", "10.0.0.0/8")),
    table_routes=(
        TableRoute(100, "0.0.0.0/0", "10.90.9.1"),
        TableRoute(100, "10.90.9.0/24", "", "10.90.9.2", 5, 1400),
        TableRoute(100, "::/0", "fd00:90::1", metric=1024),
    ),
)


def test_a_guest_without_rules_gets_no_script() -> None:
    assert policy_routes_command(()) == ()
    assert policy_routes_command((FIRST,)) == ()


def test_a_nic_is_found_by_its_mac_has_its_addresses_first_and_rules_are_last() -> None:
    shell, option, script, _, *words = policy_routes_command((FIRST, SECOND))
    assert (shell, option, script) == ("/bin/sh", "-c", SET_POLICY_ROUTES)
    assert list(zip(words[::2], words[1::2], strict=True)) == [
        ("nic", "0a:58:00:00:00:02"),
        ("has", "10.90.9.2"),
        ("has", "fd00:90::2"),
        ("route", "-4 10.90.9.0/24 src 10.90.9.2 metric 5 mtu 1400 table 100"),
        ("route", "-4 0.0.0.0/0 via 10.90.9.1 table 100"),
        ("route", "-6 ::/0 via fd00:90::1 metric 1024 table 100"),
        ("rule", "-4 from 10.90.9.2/32 to 10.0.0.0/8 priority 32765 table 100"),
        ("rule", "-6 from fd00:90::2/128 priority 32765 table 100"),
    ]


def test_a_rule_of_several_nics_is_written_once() -> None:
    rule = PolicyRule(4, 9, 7)
    nics = [
        dataclasses.replace(nic, rules=(rule,), table_routes=(TableRoute(7, to),))
        for nic, to in ((FIRST, "10.1.0.0/16"), (SECOND, "10.2.0.0/16"))
    ]
    assert policy_routes_command(nics).count("-4 from all priority 9 table 7") == 1


@pytest.mark.parametrize("table", [0, 253, 254, 255])
def test_the_guests_own_tables_are_left_alone(table: int) -> None:
    with pytest.raises(ValueError, match="own"):
        policy_routes_command((dataclasses.replace(SECOND, rules=(PolicyRule(4, 9, table),)),))
    with pytest.raises(ValueError, match="own"):
        policy_routes_command((dataclasses.replace(SECOND, table_routes=(TableRoute(table, "10.0.0.0/8"),)),))


@pytest.mark.parametrize("bad", ["10.0.0.1; reboot", "$(reboot)", "10.0.0.1 dev lo", "*", "default"])
def test_text_that_is_no_address_reaches_no_shell(bad: str) -> None:
    for route in (TableRoute(100, bad), TableRoute(100, "10.0.0.0/8", bad), TableRoute(100, "10.0.0.0/8", "", bad)):
        with pytest.raises(ValueError, match="does not appear to be"):
            policy_routes_command((dataclasses.replace(SECOND, table_routes=(route,)),))
    for rule in (PolicyRule(4, 9, 100, bad), PolicyRule(4, 9, 100, "", bad)):
        with pytest.raises(ValueError, match="does not appear to be"):
            policy_routes_command((dataclasses.replace(SECOND, rules=(rule,)),))
