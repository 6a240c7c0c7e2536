"""virtshim finds the PCI functions and USB devices that the node itself uses."""

import pytest
from fakes.sysfs import NVME, FakeSysfs

from virtshim.devices.host_use import usb_used_by_host, used_by_host
from virtshim.devices.values import PciAddress

BDF = "0000:3b:00.0"
ADDRESS = PciAddress.parse(BDF)


def used(host: FakeSysfs) -> dict[str, str]:
    return {str(address): why for address, why in used_by_host(host.files()).items()}


def test_a_machine_without_any_facts_uses_no_devices(host: FakeSysfs) -> None:
    assert used(host) == {}


def test_the_card_of_the_default_route_is_used_and_another_is_not(host: FakeSysfs) -> None:
    host.interface("eth0", host.pci(BDF, behind=("0000:3a:00.0",)))
    host.interface("eth1", host.pci("0000:3b:00.1"))
    host.default_route("eth0")
    assert used(host) == {BDF: "the node's default route goes through it (eth0)"}


def test_the_cards_below_a_vlan_on_a_bond_on_a_bridge_are_used(host: FakeSysfs) -> None:
    host.interface("eth0", host.pci(BDF))
    host.interface("eth1", host.pci("0000:3b:00.1"))
    host.interface("bond0", lower=["eth0", "eth1"])
    host.interface("bond0.7", lower=["bond0"])
    host.interface("br0", lower=["bond0.7"])
    host.default_route("br0")
    assert set(used(host)) == {BDF, "0000:3b:00.1"}


def test_an_ipv6_default_route_counts(host: FakeSysfs) -> None:
    host.interface("eth0", host.pci(BDF))
    zero = "0" * 32
    host.write(
        "/proc/net/ipv6_route",
        f"{zero} 00 {zero} 00 {'f' * 32} 00000400 1 0 3 eth0\n{zero} 40 {zero} 00 {zero} 0 0 0 0 eth9\n",
    )
    assert list(used(host)) == [BDF]


@pytest.mark.parametrize("part", ["nvme0n1", "nvme0n1/nvme0n1p2"])
def test_the_controller_of_a_mounted_disk_or_partition_is_used(host: FakeSysfs, part: str) -> None:
    home = host.pci(BDF, class_code=NVME)
    host.block(part.rpartition("/")[2], f"{home}/nvme/nvme0/{part}", "259:2")
    host.mounted(("259:2", "/", "/dev/nvme0n1p2"), ("0:21", "/proc", "proc"))
    assert used(host) == {BDF: "the node's file system / is on it"}


def test_the_controllers_of_every_path_to_a_multipath_nvme_are_used(host: FakeSysfs) -> None:
    subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    host.block("nvme0n1p1", f"{subsystem}/nvme0n1/nvme0n1p1", "259:1")
    for number, address in enumerate((BDF, "0000:5e:00.0")):
        controller = f"{host.pci(address, class_code=NVME)}/nvme/nvme{number}"
        host.path(controller).mkdir(parents=True)
        host.link(f"{subsystem}/nvme{number}", controller)
    host.mounted(("259:1", "/", "/dev/nvme0n1p1"))
    assert set(used(host)) == {BDF, "0000:5e:00.0"}


def test_the_disks_below_a_logical_volume_on_a_raid_partition_are_used(host: FakeSysfs) -> None:
    for name, number, address in (("sda", "8:0", BDF), ("sdb", "8:16", "0000:00:17.0")):
        host.block(name, f"{host.pci(address, class_code=0x010601)}/ata1/host0/block/{name}", number)
    host.block("md0", "/sys/devices/virtual/block/md0", "9:0", slaves=["sda", "sdb"])
    host.block("md0p1", "/sys/devices/virtual/block/md0/md0p1", "259:9")
    host.block("dm-0", "/sys/devices/virtual/block/dm-0", "253:0", slaves=["md0p1"])
    host.mounted(("253:0", "/var", "/dev/mapper/vg-var"))
    assert set(used(host)) == {BDF, "0000:00:17.0"}


def test_a_file_system_over_several_devices_counts_by_its_source(host: FakeSysfs) -> None:
    host.block("sda2", f"{host.pci(BDF)}/ata1/block/sda/sda2", "8:2")
    host.mounted(("0:30", "/", "/dev/sda2"), ("0:31", "/nfs", "server:/export"))
    assert list(used(host)) == [BDF]


def test_swap_space_counts(host: FakeSysfs) -> None:
    host.block("sda3", f"{host.pci(BDF)}/ata1/block/sda/sda3", "8:3")
    host.write("/proc/swaps", "Filename Type Size Used Priority\n/dev/sda3 partition 1 0 -2\n/swapfile file 1 0 -3\n")
    assert used(host) == {BDF: "the node's swap space is on it"}


def usb(host: FakeSysfs, ports: str, device: int) -> str:
    """A USB device behind hubs, at the ports `ports`; its directory."""
    bus, _, rest = ports.partition("-")
    names = [f"{bus}-{'.'.join(rest.split('.')[: n + 1])}" for n in range(rest.count(".") + 1)]
    home = "/".join((host.pci(BDF, class_code=0x0C0330), f"usb{bus}", *names))
    host.write(f"{home}/busnum", bus)
    host.write(f"{home}/devnum", str(device))
    return home


@pytest.mark.parametrize("part", ["sdc", "sdc/sdc1"])
def test_a_usb_stick_with_a_mounted_file_system_is_used_and_so_is_its_controller(host: FakeSysfs, part: str) -> None:
    stick = usb(host, "2-1.4", 7)
    host.block("sdc1", f"{stick}/2-1.4:1.0/host6/target6:0:0/6:0:0:0/block/{part}", "8:33")
    host.mounted(("8:33", "/boot", "/dev/sdc1"))
    assert usb_used_by_host(host.files()) == {(2, 7): "the node's file system /boot is on it"}
    assert used(host) == {BDF: "the node's file system /boot is on it"}


def test_a_usb_card_of_the_default_route_is_used(host: FakeSysfs) -> None:
    host.interface("eth1", f"{usb(host, '1-3', 5)}/1-3:1.0")
    host.default_route("eth1")
    assert usb_used_by_host(host.files()) == {(1, 5): "the node's default route goes through it (eth1)"}


def test_a_usb_stick_on_a_controller_that_is_not_on_pci_is_used_below_device_mapper(host: FakeSysfs) -> None:
    home = "/sys/devices/platform/soc/fe9c0000.xhci/usb1/1-1"
    host.block("sda", f"{home}/1-1:1.0/host0/target0:0:0/0:0:0:0/block/sda", "8:0")
    host.block("dm-0", "/sys/devices/virtual/block/dm-0", "253:0", slaves=["sda"])
    host.write(f"{home}/busnum", "1")
    host.write(f"{home}/devnum", "2")
    host.mounted(("253:0", "/", "/dev/mapper/root"))
    assert list(usb_used_by_host(host.files())) == [(1, 2)]
    assert used(host) == {}


def test_a_pci_device_of_the_node_is_no_usb_device(host: FakeSysfs) -> None:
    host.block("sda", f"{host.pci(BDF)}/ata1/host0/target0:0:0/0:0:0:0/block/sda", "8:0")
    host.mounted(("8:0", "/", "/dev/sda"))
    assert usb_used_by_host(host.files()) == {}


def test_truncated_lines_are_skipped(host: FakeSysfs) -> None:
    host.write("/proc/self/mountinfo", "36 35\n36 35 8:1 / / rw - ext4\n36 35 8:1 / / rw shared:1 - \n")
    host.write("/proc/net/route", "Iface\neth0 00000000\n")
    host.write("/proc/net/ipv6_route", "00\n")
    assert used(host) == usb_used_by_host(host.files()) == {}
