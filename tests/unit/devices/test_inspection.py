"""`virtshim inspect` shows the PCI functions of VMs."""

from __future__ import annotations

import dataclasses

from fakes.devices import FakeDeviceDrivers
from fakes.full_records import SANDBOX

from virtshim.devices.health import FunctionInspection
from virtshim.devices.values import CardFunction
from virtshim.model.network import Dns, Interface, PodNetwork

VF, GONE = "0000:3b:02.1", "0000:3b:02.2"
NETWORK = PodNetwork(
    "/run/netns/x",
    (
        Interface("eth0", "0a:58:0a:01:00:01", 1500, ("10.1.0.1/24",)),
        Interface("net1", "0a:58:0a:01:00:07", 9000, ("10.2.0.7/24",), function=VF),
        Interface("net2", "0a:58:0a:01:00:08", 1500, (), function=GONE),
    ),
    ("10.1.0.1",),
    Dns(),
    "key",
)
POD = dataclasses.replace(SANDBOX, network=NETWORK)


def test_a_nic_that_is_a_network_cards_function_is_shown_with_its_current_settings() -> None:
    drivers = FakeDeviceDrivers()
    set_for_it = {
        "mac": "0a:58:0a:01:00:07",
        "vlan": 100,
        "qos": 3,
        "protocol": "802.1ad",
        "trust": False,
        "link_state": "auto",
    }
    drivers.gone.add(GONE)
    drivers.cards[VF] = CardFunction("vfio-pci", "ens1f0", 1, set_for_it)
    plain, nic, gone = FunctionInspection(drivers).of_sandbox(POD)
    assert plain == {"name": "eth0", "mac": "0a:58:0a:01:00:01", "mtu": 1500, "addresses": ["10.1.0.1/24"]}
    assert nic["mtu"] == 9000
    assert nic["function"] == {
        "pci": VF, "driver": "vfio-pci", "card": "ens1f0", "number": 1, "mac": "0a:58:0a:01:00:07", "vlan": 100, "qos": 3,
        "protocol": "802.1ad", "trust": False, "linkState": "auto",
    }  # fmt: skip
    assert gone["function"] == {"pci": GONE, "trouble": f"there is no PCI device {GONE} on this node"}


def test_inspecting_a_pod_waits_only_once_for_an_absent_tapmanager() -> None:
    drivers = FakeDeviceDrivers()
    drivers.why_not = "tapmanager cannot be reached"
    _, nic, other = FunctionInspection(drivers).of_sandbox(POD)
    assert nic["function"] == {"pci": VF, "trouble": "tapmanager cannot be reached"}
    assert other["function"] == {"pci": GONE, "trouble": "tapmanager cannot be reached"}
    assert drivers.asked == 1


def test_a_pod_without_network_has_no_nics() -> None:
    assert FunctionInspection(FakeDeviceDrivers()).of_sandbox(dataclasses.replace(SANDBOX, network=None)) == []
