"""A network card's virtual functions become guests' NICs. chapter_nic.py has the actions, with QEMU's igb and Linux'
drivers for it."""

from __future__ import annotations

from typing import Any

import card
import outer
import pytest
from chapter_nic import ADDRESSES, MACS, MTU, VLAN

pytestmark = [pytest.mark.devices, pytest.mark.timeout(2800)]


@pytest.fixture(autouse=True)
def _with_a_card(told):
    if why := outer.no_card():
        pytest.skip(f"NOT TO BE HAD HERE: a network card with virtual functions: {why}")


def nics(console: list[str]) -> list[str]:
    """The guest's output about its network functions."""
    return [line.strip() for line in console if line.startswith("nic ")]


def test_a_function_moved_by_a_plugin_is_bound_to_vfio_and_the_pod_has_its_addresses(told):
    moved = told("nic: moved")
    assert moved["ip"] == ADDRESSES[0].partition("/")[0]
    assert moved["state"]["driver"] == "vfio-pci"
    assert moved["state"]["link"]["ifname"] is None, "no interface on the host, nor in the pod"


def test_the_guest_has_the_function_as_nic_with_its_mac_at_the_predicted_address(told):
    assert nics(told("nic: in the guest")["console"]) == [f'nic 01:00.0 mac={MACS[0]} sent=1 heard="{card.ANSWER}"']
    assert told("nic: in the guest")["passed"] == [card.FUNCTIONS[0]]


def test_guest_packets_have_the_vlan_of_the_function_on_the_wire(told):
    assert told("nic: in the guest")["frames"] == [{"source": MACS[0], "tag": VLAN, "words": "device guest"}]


def test_settings_of_the_card_stay_while_a_guest_has_the_function(told):
    assert told("nic: moved")["state"]["attributes"] == told("nic: functions")["states"][0]["attributes"]


def by_ip(attributes: dict[str, Any]) -> dict[str, Any]:
    """The VF settings from `ip -json -details link`, with tapmanager's names."""
    (vlan,) = attributes.get("vlan_list", [{}])  # without a VLAN there is none, or an empty one
    return {
        "mac": attributes["address"],
        "vlan": vlan.get("vlan", 0),
        "qos": vlan.get("qos", 0),
        "protocol": vlan.get("protocol", "802.1Q"),
        "min_tx_rate": attributes["rate"]["min_tx"],
        "max_tx_rate": attributes["rate"]["max_tx"],
        "spoof_check": attributes["spoofchk"],
        "link_state": attributes["link_state"],
        "trust": attributes["trust"],
    }


def test_settings_of_a_function_are_read_as_ip_shows_them_before_during_and_after(told):
    for state in (*told("nic: functions")["states"], told("nic: moved")["state"], told("nic: removed")["state"]):
        assert state["settings"] == by_ip(state["attributes"])
    set_for_it = told("nic: removed")["state"]["settings"]
    assert set_for_it == told("nic: functions")["states"][0]["settings"]
    assert (set_for_it["vlan"], set_for_it["spoof_check"], set_for_it["trust"]) == (VLAN, True, True)


def test_inspect_shows_the_function_of_a_nic_and_its_settings(told):
    (nic,) = told("nic: moved")["inspected"]["interfaces"]
    function = nic["function"]
    assert (function["pci"], function["driver"], function["number"]) == (card.FUNCTIONS[0], "vfio-pci", 0)
    assert (nic["mtu"], function["mac"], function["vlan"], function["trust"]) == (MTU, MACS[0], VLAN, True)
    assert (function["spoofCheck"], function["linkState"]) == (True, "auto")


@pytest.mark.full
def test_a_vm_keeps_its_function_while_both_daemons_die_and_come_back(told):
    after = told("nic: daemons killed")
    assert after["same"], "the QEMU of before"
    assert after["states"] == ["CONTAINER_RUNNING"]
    assert after["state"] == told("nic: moved")["state"]


def test_a_removed_pod_returns_its_function_to_the_host_unchanged(told):
    before, after = told("nic: functions")["states"][0], told("nic: removed")["state"]
    assert before["link"] == {"ifname": "vf0", "address": MACS[0], "mtu": MTU}
    assert after == before


def test_a_function_without_an_assigned_mac_keeps_its_own_and_may_change_it_afterwards(told):
    before, facts = told("nic: functions")["states"][2], told("nic: no address set")
    assert before["attributes"]["address"] == "00:00:00:00:00:00"
    assert facts["lent"]["driver"] == "vfio-pci"
    assert facts["lent"]["attributes"]["address"] == before["link"]["address"]
    assert (facts["state"]["driver"], facts["state"]["link"]) == ("igbvf", before["link"])
    assert facts["may choose"]


def test_the_plugin_finds_the_function_where_it_put_it(told):
    log = told("nic: removed")["log"]
    assert "command=DEL plugin=host-device status=0" in log
    assert "function.not_given_back" not in log


@pytest.mark.full
def test_without_devices_bind_a_function_with_a_kernel_driver_is_refused(told):
    refused = told("nic: not bound")
    assert (refused["of"], refused["code"], refused["left"]) == ("create", "FAILED_PRECONDITION", 0)
    assert card.FUNCTIONS[2] in refused["message"]
    assert "igbvf, not vfio-pci" in refused["message"]
    assert "devices.bind" in refused["message"]
    assert refused["state"] == told("nic: no address set")["state"]


@pytest.mark.full
def test_a_function_named_by_a_plugin_and_granted_by_kubelet_is_attached_once(told):
    facts = told("nic: named, and granted too")
    assert len(facts["devices"]) == 2, "its group's node, and /dev/vfio/vfio"
    assert facts["passed"] == [card.FUNCTIONS[1]]
    assert nics(facts["console"]) == [f'nic 01:00.0 mac={MACS[1]} sent=1 heard="{card.ANSWER}"']
    assert facts["frames"] == [{"source": MACS[1], "tag": 0, "words": "device guest"}]


@pytest.mark.full
def test_cloud_init_finds_the_nic_by_its_mac_and_gives_it_the_networks_addresses(told):
    facts = told("nic: named, and granted too")
    assert facts["ip"] == ADDRESSES[1].partition("/")[0]
    assert f"mac_address: {MACS[1]}" in facts["network config"].replace("'", "").replace('"', "")
    assert ADDRESSES[1] in facts["network config"]


@pytest.mark.full
def test_nothing_was_rebound_without_devices_bind(told):
    assert told("nic: both gone")["state"] == told("nic: functions")["states"][1]
    first, second, _ = told("nic: functions")["states"]
    assert told("nic: both gone")["states"] == [first, second, told("nic: no address set")["state"]]
