"""tapmanager takes functions of network cards and restores them, on a fake bus and card. tests/vfio shows what a card
of QEMU's does."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from fakes.netcard import FRESH, PF, PHYSICAL, VFS, FakeNetCard

from tapmanager.cni.delegate_records import Delegate
from tapmanager.cni.result import parse_result
from tapmanager.drivers import PciDrivers
from tapmanager.errors import TapmanagerError
from tapmanager.links.network_plan import networks_of
from tapmanager.links.nic_plan import KernelLink
from tapmanager.pod import NicFunction
from tapmanager.sriov.nic_functions import NicFunctions, give_all_back
from tapmanager.sriov.physical_function import PhysicalFunctions
from tapmanager.sriov.vf_settings import NO_MAC, VfSettings

OTHER, VF = VFS
MAC = "0a:58:0a:01:00:07"
SET = dataclasses.replace(FRESH, vlan=100, qos=3, protocol="802.1ad", trust=True, link_state="enable", max_tx_rate=100)
FUNCTION = NicFunction("net1", VF, "iavf", MAC, 1500, ("10.1.0.7/24",), (), ("10.1.0.7/24",), SET)
NETNS = "/run/netns/x"
WITH_GUEST = dataclasses.replace(SET, mac=MAC)


@pytest.fixture
def card(tmp_path: Path) -> FakeNetCard:
    card = FakeNetCard(tmp_path)
    card.settings[1] = SET
    return card


@pytest.fixture
def functions(card: FakeNetCard) -> NicFunctions:
    return functions_of(card)


def functions_of(card: FakeNetCard, settles: float = 0.0) -> NicFunctions:
    side = PhysicalFunctions(card, str(card.root), settles)
    return NicFunctions(PciDrivers(str(card.root), card.write), card, side, str(card.root))


def test_only_virtual_functions_are_accepted(functions: NicFunctions) -> None:
    links = [
        KernelLink("eth0", "veth", MAC, 1500),
        KernelLink("net1", "", MAC, 1500, parent=VF),
        KernelLink("net2", "", MAC, 1500, parent=PF),
        KernelLink("net3", "", MAC, 1500, parent="0000:ff:00.0"),
    ]
    assert functions.virtual_functions(links) == {"net1": VF}


def test_everything_needed_to_give_a_function_back_is_read_before_any_change(
    functions: NicFunctions, card: FakeNetCard
) -> None:
    found = parse_result(
        {"interfaces": [{"name": "net1", "sandbox": "x"}], "ips": [{"address": "10.1.0.7/24", "interface": 0}]}
    )
    there = [KernelLink("net1", "", MAC, 1500, ("10.1.0.7/24",), parent=VF)]
    assert functions.planned(networks_of(found, there, ()), there) == (FUNCTION,)
    assert (card.done, card.written) == ([], [])


def test_the_guest_has_the_mac_that_the_network_knows(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    assert {number: settings.mac for number, settings in card.settings.items()} == {0: NO_MAC, 1: MAC}
    assert (card.driver(VF), card.driver(OTHER)) == ("vfio-pci", "iavf")


def test_a_function_is_given_back_as_the_plugin_left_it(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    functions.give_back(FUNCTION, NETNS)
    assert (card.driver(VF), card.override(VF)) == ("iavf", "(null)")
    assert card.settings == {0: FRESH, 1: SET}
    assert card.done[-1] == f"move eth1 as net1 into {NETNS}"


def test_giving_back_may_be_repeated(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    for _ in range(2):
        functions.give_back(FUNCTION, NETNS)
    assert card.done.count(f"move eth1 as net1 into {NETNS}") == 1


def test_without_a_namespace_a_function_only_gets_its_driver_back(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    functions.give_back(FUNCTION, "")
    assert card.driver(VF) == "iavf"
    assert card.inside == set()


def test_a_function_already_at_vfio_is_not_changed(functions: NicFunctions, card: FakeNetCard) -> None:
    bare = NicFunction("net1", VF, "", MAC, 1500, (), ())
    functions.take(bare)
    functions.give_back(bare, NETNS)
    assert (card.done, card.written) == ([], [])


def test_a_card_without_an_interface_on_the_host_is_an_error_with_a_remedy(
    functions: NicFunctions, card: FakeNetCard
) -> None:
    (card.bus / "devices" / PF / "net" / PHYSICAL).rmdir()
    with pytest.raises(TapmanagerError, match="its network driver"):
        functions.take(FUNCTION)
    assert card.driver(VF) == "iavf"


def test_representors_are_not_taken_for_the_cards_own_interface(functions: NicFunctions, card: FakeNetCard) -> None:
    for name, port in (("a_rep", "pf0vf1"), ("b_rep", "c1pf0sf88"), (PHYSICAL, "p0")):
        (card.bus / "devices" / PF / "net" / name).mkdir(exist_ok=True)
        (card.bus / "devices" / PF / "net" / name / "phys_port_name").write_text(f"{port}\n")
    functions.take(FUNCTION)
    assert card.settings[1].mac == MAC


def test_a_function_that_cannot_be_given_back_does_not_block_others(
    functions: NicFunctions, card: FakeNetCard, caplog: pytest.LogCaptureFixture
) -> None:
    functions.take(FUNCTION)
    gone = NicFunction("net0", "0000:ff:00.0", "iavf", MAC, 1500, (), ())
    give_all_back(functions, (gone, FUNCTION), NETNS)
    assert card.driver(VF) == "iavf"
    assert "function.not_given_back pci=0000:ff:00.0" in caplog.text


def test_a_function_that_was_given_back_is_not_changed_again(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    back = give_all_back(functions, (FUNCTION,), NETNS)
    assert back == (dataclasses.replace(FUNCTION, is_back=True),)
    card.give(1, vlan=200)
    functions.bind(VF, "vfio-pci")
    assert give_all_back(functions, back, NETNS) == back
    assert (card.driver(VF), card.settings[1].vlan) == ("vfio-pci", 200)


# -- what the card's owner has set


def test_only_the_mac_is_set_on_a_card_that_keeps_its_settings(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    assert card.done == [f"1 mac={MAC}"]


DROPPED = {
    "mac": NO_MAC,
    "vlan": 0,
    "qos": 0,
    "protocol": "802.1Q",
    "trust": False,
    "link_state": "auto",
    "max_tx_rate": 0,
}


def test_settings_that_a_card_drops_on_a_driver_change_are_set_again_both_times(
    functions: NicFunctions, card: FakeNetCard
) -> None:
    card.dropped = DROPPED
    functions.take(FUNCTION)
    assert card.settings == {0: FRESH, 1: WITH_GUEST}
    functions.give_back(FUNCTION, NETNS)
    assert card.settings == {0: FRESH, 1: SET}
    assert NETNS in card.done[-1], "the link comes last, when all is set"


def test_a_function_that_its_card_reports_late_is_waited_for(card: FakeNetCard) -> None:
    card.dropped, card.silent = DROPPED, 1
    functions_of(card, settles=5.0).take(FUNCTION)
    assert card.settings[1] == WITH_GUEST


@pytest.mark.parametrize(
    ("dropped", "told"),
    [
        ({"mac": NO_MAC}, "MAC"),
        ({"vlan": 0, "qos": 0}, "VLAN"),
        ({"protocol": "802.1Q"}, "VLAN"),
        ({"spoof_check": False}, "spoof-check"),
    ],
)
def test_a_function_is_refused_if_its_card_drops_vlan_or_other_restrictions(
    functions: NicFunctions, card: FakeNetCard, dropped: dict[str, object], told: str
) -> None:
    card.dropped, card.refused = dropped, {"vfio-pci": set(dropped)}
    with pytest.raises(
        TapmanagerError, match=rf"VF 1 of {PHYSICAL} .* did not keep its {told}: .*not supported.* Update"
    ) as no:
        functions.take(FUNCTION)
    assert no.value.kind == "failed-precondition"
    card.refused.clear()
    functions.give_back(FUNCTION, NETNS)
    assert card.settings[1] == SET


def test_a_function_that_became_trusted_unexpectedly_is_refused(functions: NicFunctions, card: FakeNetCard) -> None:
    card.give(1, trust=False)
    untrusted = dataclasses.replace(FUNCTION, settings=card.settings[1])
    card.dropped = {"trust": True}
    functions.take(untrusted)
    assert card.settings[1].trust is False
    functions.give_back(untrusted, NETNS)
    card.refused = {"vfio-pci": {"trust"}}
    with pytest.raises(TapmanagerError, match="did not keep its trust"):
        functions.take(untrusted)


def test_a_card_that_stops_reporting_its_functions_is_an_error(functions: NicFunctions, card: FakeNetCard) -> None:
    card.silent = 1000
    with pytest.raises(TapmanagerError, match="the card has nothing"):
        functions.take(FUNCTION)


def test_a_card_that_never_reports_settings_only_gets_the_mac(functions: NicFunctions, card: FakeNetCard) -> None:
    unknown = dataclasses.replace(FUNCTION, settings=None)
    functions.take(unknown)
    functions.give_back(unknown, NETNS)
    assert card.done[:1] == [f"1 mac={MAC}"]
    assert card.settings[1] == WITH_GUEST


def test_lost_settings_that_restrict_nothing_are_only_logged(
    functions: NicFunctions, card: FakeNetCard, caplog: pytest.LogCaptureFixture
) -> None:
    card.dropped, card.refused = {"max_tx_rate": 0, "trust": False}, {"vfio-pci": {"max_tx_rate", "trust"}}
    functions.take(FUNCTION)
    assert f"function.not_kept pci={VF} transmit rate: min_tx_rate=0 max_tx_rate=100 was set" in caplog.text
    assert f"function.not_kept pci={VF} trust: trust=on was set, the card has trust=off" in caplog.text


def test_the_log_has_the_settings_in_force_for_the_guest(
    functions: NicFunctions, card: FakeNetCard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    functions.take(FUNCTION)
    functions.give_back(FUNCTION, NETNS)
    assert (
        f"function.taken pci={VF} driver=iavf at=VF 1 of {PHYSICAL} mac={MAC} vlan=100 qos=3 protocol=802.1ad"
        in caplog.text
    )
    assert f"function.given_back pci={VF} driver=iavf link=net1" in caplog.text


def test_trust_removed_meanwhile_is_not_restored(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    card.give(1, trust=False)
    functions.give_back(FUNCTION, NETNS)
    assert card.settings[1] == dataclasses.replace(SET, trust=False)


def test_a_spoof_check_that_was_switched_on_meanwhile_stays_on(functions: NicFunctions, card: FakeNetCard) -> None:
    card.give(1, spoof_check=False)
    unchecked = dataclasses.replace(FUNCTION, settings=card.settings[1])
    functions.take(unchecked)
    card.give(1, spoof_check=True)
    functions.give_back(unchecked, NETNS)
    assert card.settings[1] == SET


def test_a_link_is_given_back_even_if_its_card_refuses_the_settings(
    functions: NicFunctions, card: FakeNetCard, caplog: pytest.LogCaptureFixture
) -> None:
    """Cards that take no MAC of zeros: the plugin's DEL sets what it wants."""
    functions.take(FUNCTION)
    card.refused = {"iavf": {"mac"}}
    functions.give_back(FUNCTION, NETNS)
    assert card.done[-1] == f"move eth1 as net1 into {NETNS}"
    assert f"function.not_kept pci={VF} MAC: mac={NO_MAC} was set, the card has mac={MAC}" in caplog.text


def test_a_function_taken_by_an_earlier_version_gets_its_mac_back(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    functions.give_back(dataclasses.replace(FUNCTION, settings=VfSettings(mac=NO_MAC)), NETNS)
    assert card.settings[1] == SET


def test_a_functions_current_settings_are_shown(functions: NicFunctions, card: FakeNetCard) -> None:
    functions.take(FUNCTION)
    card.give(1, vlan=7)
    describe = functions.describe(VF)
    assert {name: describe[name] for name in ("driver", "card", "number")} == {
        "driver": "vfio-pci", "card": PHYSICAL, "number": 1,
    }  # fmt: skip
    assert describe["settings"] == dataclasses.replace(WITH_GUEST, vlan=7).to_json()


def test_the_driver_of_other_devices_is_shown(functions: NicFunctions, card: FakeNetCard) -> None:
    assert functions.describe(PF) == {"driver": "ice"}
    (card.bus / "devices" / PF / "net" / PHYSICAL).rmdir()
    assert functions.describe(VF) == {"driver": "iavf"}


# -- functions that a device plugin has granted


def test_a_granted_vf_keeps_what_its_owner_has_set(functions: NicFunctions, card: FakeNetCard) -> None:
    card.dropped = {name: value for name, value in DROPPED.items() if name != "mac"}
    for driver in ("vfio-pci", "iavf"):
        functions.bind(VF, driver)
        assert card.driver(VF) == driver
        assert card.settings == {0: FRESH, 1: SET}


def test_a_mac_that_a_granted_vf_set_itself_is_not_kept_as_its_owners(
    functions: NicFunctions, card: FakeNetCard
) -> None:
    card.give(1, mac=MAC)
    card.dropped = {"mac": NO_MAC}
    functions.bind(VF, "vfio-pci")
    assert card.done == []


def test_a_granted_vf_that_lost_its_vlan_is_refused(functions: NicFunctions, card: FakeNetCard) -> None:
    card.dropped, card.refused = {"vlan": 0}, {"vfio-pci": {"vlan"}}
    with pytest.raises(TapmanagerError, match="did not keep its VLAN: vlan=100"):
        functions.bind(VF, "vfio-pci")


def test_a_granted_vf_gets_its_driver_back_even_if_its_card_refuses_the_settings(
    functions: NicFunctions, card: FakeNetCard, caplog: pytest.LogCaptureFixture
) -> None:
    functions.bind(VF, "vfio-pci")
    card.dropped, card.refused = {"vlan": 0}, {"iavf": {"vlan"}}
    functions.bind(VF, "iavf")
    assert card.driver(VF) == "iavf"
    assert f"function.not_kept pci={VF} VLAN: vlan=100" in caplog.text


def test_only_the_driver_of_other_devices_changes(functions: NicFunctions, card: FakeNetCard) -> None:
    (card.bus / "devices" / PF / "net" / PHYSICAL).rmdir()
    for address in (PF, VF):
        functions.bind(address, "vfio-pci")
        assert card.driver(address) == "vfio-pci"
    assert card.done == []


# -- found at VFIO by the plugin -----------------------------------------------------------------------------------------


def at_vfio(
    functions: NicFunctions, card: FakeNetCard, *, kind: str = "sriov", ip: str = "10.1.0.7/24", **said: object
):
    """What is planned for a second network whose function the plugin found at VFIO: it made no link."""
    card.write(str(card.bus / "devices" / VF / "driver_override"), "vfio-pci")
    card.write(str(card.bus / "devices" / VF / "driver/unbind"), VF)
    card.write(str(card.bus / "drivers_probe"), VF)
    first = parse_result({"interfaces": [{"name": "eth0", "sandbox": "x"}], "ips": [{"address": "10.88.0.5/16"}]})
    interfaces = [{"name": "net1", "sandbox": "x", **said}]
    result = parse_result({"interfaces": interfaces, "ips": [{"address": ip, "interface": 0}] if ip else []})
    there = [KernelLink("eth0", "veth", MAC, 1500, ("10.88.0.5/16",))]
    record = Delegate("fast", "net1", result, VF, (kind,))
    return functions.planned(networks_of(first, there, (record,)), there)


def test_a_functions_mac_is_the_one_from_the_plugin(functions: NicFunctions, card: FakeNetCard) -> None:
    (function,) = at_vfio(functions, card, mac=MAC, mtu=9000)
    assert function == NicFunction("net1", VF, "", MAC, 9000, ("10.1.0.7/24",), ())
    assert card.done == []


@pytest.mark.parametrize("told", ["", "00:00:00:00:00:00"])
def test_without_a_mac_from_the_plugin_mac_and_mtu_come_from_the_card(
    functions: NicFunctions, card: FakeNetCard, told: str
) -> None:
    card.settings[1] = dataclasses.replace(FRESH, mac=MAC)
    (card.bus / "devices" / PF / "net" / PHYSICAL / "mtu").write_text("9216\n")
    (function,) = at_vfio(functions, card, mac=told)
    assert (function.mac, function.settings, function.mtu) == (MAC, None, 9216)
    functions.take(function)
    functions.give_back(function, NETNS)
    assert card.done == []


def test_a_function_without_a_mac_gets_one_while_the_pod_has_it(functions: NicFunctions, card: FakeNetCard) -> None:
    (function,) = at_vfio(functions, card)
    assert function.mac not in (NO_MAC, "")
    functions.take(function)
    assert card.settings[1].mac == function.mac
    assert card.driver(VF) == "vfio-pci"
    functions.give_back(function, NETNS)
    assert card.settings[1].mac == NO_MAC
    assert (card.driver(VF), card.inside) == ("vfio-pci", set())


def test_only_a_function_configured_by_the_cards_plugin_gets_a_mac(functions: NicFunctions, card: FakeNetCard) -> None:
    """Any other plugin's configuration may name any function, another pod's too."""
    with pytest.raises(TapmanagerError, match=r'"net1" of network "fast" is PCI device .* whose MAC is unknown'):
        at_vfio(functions, card, kind="host-device")


def test_a_function_without_addresses_needs_no_mac(functions: NicFunctions, card: FakeNetCard) -> None:
    assert at_vfio(functions, card, kind="host-device", ip="") == ()


def test_a_card_without_a_network_driver_has_no_macs_for_its_functions(
    functions: NicFunctions, card: FakeNetCard
) -> None:
    (card.bus / "devices" / PF / "net" / PHYSICAL).rmdir()
    with pytest.raises(TapmanagerError, match="Give the pod's attachment a `mac`"):
        at_vfio(functions, card)
