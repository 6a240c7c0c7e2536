"""Functions of network cards, on a bus and with links of our own. What a real card does with them is not shown here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.pcibus import FakePciBus

from tapmanager.cni_result import parse_result
from tapmanager.errors import NetError
from tapmanager.links_plan import KernelLink
from tapmanager.nic_functions import NicFunctions, give_all_back
from tapmanager.pci_drivers import PciDrivers
from tapmanager.pod import NicFunction

PF, VF, OTHER = "0000:3b:00.0", "0000:3b:02.1", "0000:3b:02.0"
MAC, ADMIN = "0a:58:0a:01:00:07", "00:00:00:00:00:00"
FUNCTION = NicFunction("net1", VF, "iavf", MAC, ADMIN, 1500, ("10.1.0.7/24",), (), ("10.1.0.7/24",))
NETNS = "/run/netns/x"


class FakeHostLinks:
    """`macs`: by VF number, as the card has them. `inside`: links in the pod's namespace."""

    def __init__(self) -> None:
        self.macs = {0: ADMIN, 1: ADMIN}
        self.inside: set[str] = set()
        self.done: list[str] = []

    def vf_mac(self, physical: str, number: int) -> str:
        assert physical == "enp59s0"
        return self.macs[number]

    def set_vf_mac(self, physical: str, number: int, mac: str) -> None:
        assert physical == "enp59s0"
        self.macs[number] = mac
        self.done.append(f"mac {number} {mac}")

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        assert netns_path == NETNS
        self.inside.add(function.link)
        self.done.append(f"move {name} as {function.link}")

    def is_in(self, name: str, netns_path: str) -> bool:
        return name in self.inside


@pytest.fixture
def bus(tmp_path: Path) -> FakePciBus:
    bus = FakePciBus(tmp_path)
    bus.add_driver("vfio-pci")
    (bus.add(PF, "ice") / "net/enp59s0").mkdir(parents=True)
    for number, address in enumerate((OTHER, VF)):
        bus.add_virtual(PF, number, address, "iavf")
    return bus


@pytest.fixture
def links() -> FakeHostLinks:
    return FakeHostLinks()


@pytest.fixture
def functions(bus: FakePciBus, links: FakeHostLinks) -> NicFunctions:
    return NicFunctions(PciDrivers(str(bus.root), bus.write), links, str(bus.root))


def with_link(bus: FakePciBus, name: str = "eth7") -> None:
    """The driver makes an interface of that name when it gets the function."""
    (bus.bus / "devices" / VF / "net" / name).mkdir(parents=True)


def test_only_virtual_functions_are_taken(functions: NicFunctions) -> None:
    links = [
        KernelLink("eth0", "veth", MAC, 1500),
        KernelLink("net1", "", MAC, 1500, parent=VF),
        KernelLink("net2", "", MAC, 1500, parent=PF),
        KernelLink("net3", "", MAC, 1500, parent="0000:ff:00.0"),
    ]
    assert functions.among(links) == {"net1": VF}


def test_all_that_bringing_it_back_needs_is_known_before_anything_changes(
    functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus
) -> None:
    found = parse_result(
        {"interfaces": [{"name": "net1", "sandbox": "x"}], "ips": [{"address": "10.1.0.7/24", "interface": 0}]}
    )
    there = [KernelLink("net1", "", MAC, 1500, ("10.1.0.7/24",), parent=VF)]
    assert functions.planned(found, there) == (FUNCTION,)
    assert (links.done, bus.written) == ([], [])


def test_the_guest_has_the_mac_that_the_network_knows(
    functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus
) -> None:
    functions.take(FUNCTION)
    assert links.macs == {0: ADMIN, 1: MAC}
    assert (bus.driver(VF), bus.driver(OTHER)) == ("vfio-pci", "iavf")


def test_it_comes_back_as_the_plugin_left_it(functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus) -> None:
    functions.take(FUNCTION)
    with_link(bus)
    functions.give_back(FUNCTION, NETNS)
    assert (bus.driver(VF), bus.override(VF)) == ("iavf", "(null)")
    assert links.macs == {0: ADMIN, 1: ADMIN}
    assert links.done[-1] == "move eth7 as net1"


def test_coming_back_may_be_repeated(functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus) -> None:
    functions.take(FUNCTION)
    with_link(bus)
    for _ in range(2):
        functions.give_back(FUNCTION, NETNS)
    assert links.done.count("move eth7 as net1") == 1


def test_without_a_namespace_it_gets_its_driver_back(
    functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus
) -> None:
    functions.take(FUNCTION)
    functions.give_back(FUNCTION, "")
    assert bus.driver(VF) == "iavf"
    assert links.inside == set()


def test_one_that_was_vfios_before_is_not_touched(
    functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus
) -> None:
    bare = NicFunction("net1", VF, "", MAC, "", 1500, (), ())
    functions.take(bare)
    functions.give_back(bare, NETNS)
    assert (links.done, bus.written) == ([], [])


def test_a_card_without_an_interface_on_the_host_is_an_error_with_a_remedy(
    functions: NicFunctions, bus: FakePciBus
) -> None:
    (bus.bus / "devices" / PF / "net/enp59s0").rmdir()
    with pytest.raises(NetError, match="its network driver"):
        functions.take(FUNCTION)
    assert bus.driver(VF) == "iavf"


def test_one_that_cannot_come_back_does_not_keep_the_others(
    functions: NicFunctions, links: FakeHostLinks, bus: FakePciBus, caplog: pytest.LogCaptureFixture
) -> None:
    functions.take(FUNCTION)
    with_link(bus)
    gone = NicFunction("net0", "0000:ff:00.0", "iavf", MAC, ADMIN, 1500, (), ())
    give_all_back(functions, (gone, FUNCTION), NETNS)
    assert bus.driver(VF) == "iavf"
    assert "function.not_given_back pci=0000:ff:00.0" in caplog.text
