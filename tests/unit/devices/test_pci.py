"""virtshim reads PCI functions and IOMMU groups from sysfs."""

from fakes.sysfs import HOST_BRIDGE, FakeSysfs

from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus, last_address
from virtshim.devices.values import PciAddress


def at(text: str) -> PciAddress:
    return PciAddress.parse(text)


def test_a_vf_is_read_with_all_its_attributes(host: FakeSysfs) -> None:
    host.pci("0000:3b:00.0", 40, driver="ixgbe", total_vfs=8, node=1)
    home = host.pci("0000:3b:02.0", 41, driver="vfio-pci", device=0x154C, vf_of="0000:3b:00.0", node=1)
    host.interface("ens1", home)
    bus = PciBus(host.files())
    facts = bus.function(at("0000:3b:02.0"))
    assert facts is not None
    assert (facts.vendor, facts.device, facts.class_code >> 8) == (0x8086, 0x154C, 0x0200)
    assert (facts.driver, facts.is_vfio, facts.group, facts.node) == ("vfio-pci", True, 41, 1)
    assert (facts.physical, facts.interfaces, facts.has_reset) == (at("0000:3b:00.0"), ("ens1",), True)
    above = bus.function(at("0000:3b:00.0"))
    assert above is not None
    assert (above.virtual, above.virtual_total, above.is_vfio) == ((at("0000:3b:02.0"),), 8, False)
    assert bus.members(41) == ["0000:3b:02.0"]


def test_a_network_cards_vf_is_named_by_its_pf_and_number(host: FakeSysfs) -> None:
    card = host.pci("0000:3b:00.0", 40, driver="mlx5_core", total_vfs=8)
    host.pci("0000:3b:00.2", 41, vf_of="0000:3b:00.0")
    host.pci("0000:3b:00.3", 42, vf_of="0000:3b:00.0")
    for name, port in (("eth0", "pf0vf1"), ("eth1", "c1pf0sf88"), ("eth7", "p0")):
        host.interface(name, card)
        host.write(f"{card}/net/{name}/phys_port_name", f"{port}\n")
    assert placed(host, "0000:3b:00.3") == "VF 1 of eth7"
    assert placed(host, "0000:3b:00.0") == ""


def test_a_vf_of_another_kind_of_device_has_no_such_name(host: FakeSysfs) -> None:
    host.pci("0000:3d:00.0", 40, driver="4xxx", total_vfs=8)
    host.pci("0000:3d:00.1", 41, vf_of="0000:3d:00.0")
    assert placed(host, "0000:3d:00.1") == ""


def placed(host: FakeSysfs, address: str) -> str:
    bus = PciBus(host.files())
    facts = bus.function(at(address))
    assert facts is not None
    return bus.place(facts)


def test_a_function_without_driver_group_and_numa_node_has_none(host: FakeSysfs) -> None:
    host.pci("0000:00:1f.2", reset=False)
    facts = PciBus(host.files()).function(at("0000:00:1f.2"))
    assert facts is not None
    assert (facts.driver, facts.is_vfio, facts.group, facts.node, facts.has_reset) == ("", False, None, None, False)


def test_a_driver_that_makes_vfio_devices_is_a_vfio_driver_whatever_its_name(host: FakeSysfs) -> None:
    home = host.pci("0000:3b:00.0", 1, driver="new_vendor_vfio")
    host.cdev("vfio0", home)
    facts = PciBus(host.files()).function(at("0000:3b:00.0"))
    assert facts is not None
    assert facts.is_vfio


def test_functions_are_sorted_by_address_and_domains_may_be_long(host: FakeSysfs) -> None:
    for address in ("10000:e1:00.0", "0000:3b:00.1", "0000:3b:00.0"):
        host.pci(address)
    found = [str(facts.address) for facts in PciBus(host.files()).functions()]
    assert found == ["0000:3b:00.0", "0000:3b:00.1", "10000:e1:00.0"]


def test_a_missing_function_is_none(host: FakeSysfs) -> None:
    bus = PciBus(host.files())
    assert bus.function(at("0000:3b:00.0")) is None
    assert bus.members(7) == []
    assert bus.groups() == 0
    assert bus.mdev_group("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001") is None


def test_groups_without_an_iommu_do_not_count(host: FakeSysfs) -> None:
    host.pci("0000:3b:00.0", 9)
    host.pci("0000:3b:00.1", 10)
    host.write("/sys/kernel/iommu_groups/9/name", "vfio-noiommu\n")
    assert PciBus(host.files()).groups() == 1


def test_a_bridge_is_a_bridge_and_an_nvswitch_is_not(host: FakeSysfs) -> None:
    host.pci("0000:00:00.0", class_code=HOST_BRIDGE)
    host.pci("0000:01:00.0", class_code=0x068000)
    assert [facts.is_bridge for facts in PciBus(host.files()).functions()] == [True, False]


def test_the_last_address_of_a_path_is_the_endpoint() -> None:
    path = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/net/eth0"
    assert last_address(path) == at("0000:3b:00.1")
    assert last_address("/sys/devices/virtual/net/lo") is None
    assert last_address("") is None


def test_this_machines_own_functions_are_read() -> None:
    for facts in PciBus(HostFiles()).functions():
        assert facts.vendor
