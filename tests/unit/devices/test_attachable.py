"""virtshim reports every fault of a device that a VM cannot have now, with the remedy."""

import pytest
from fakes.sysfs import BRIDGE, NVME, FakeSysfs
from structlog.testing import capture_logs

from virtshim.devices.attachable import AttachChecker, AttachRules, lockable
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.resolve import NodeDevices
from virtshim.devices.values import MediatedDevice, Passthrough, PciAddress, PciFunction, UsbDevice, VdpaDevice
from virtshim.model.errors import WrongState

BDF, SIBLING = "0000:3b:00.0", "0000:3b:00.1"
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
GIB = 1 << 30


def function(address: str = BDF, resource: str = "") -> PciFunction:
    return PciFunction(PciAddress.parse(address), resource)


def faults(
    host: FakeSysfs,
    *devices: Passthrough,
    bind: bool = False,
    keep: tuple[str, ...] = (),
    memory: int = 0,
    limit: int | None = None,
) -> list[str]:
    rules = AttachRules(bind, frozenset(PciAddress.parse(address) for address in keep), lambda: limit)
    return AttachChecker(host.files(), rules).faults(devices or (function(),), memory)


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_a_vfio_function_with_its_own_group_and_node_is_attachable(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci")
    assert faults(host) == []


def test_the_error_for_a_function_that_is_gone_names_its_resource(host: FakeSysfs) -> None:
    found = only(faults(host, function(BDF, "intel.com/vfs")))
    assert found.startswith(
        f"PCI function {BDF} (intel.com/vfs) does not exist: it was unplugged, or its VFs were removed"
    )


def test_without_an_iommu_the_remedy_is_in_the_bios_and_on_the_kernels_command_line(host: FakeSysfs) -> None:
    host.pci(BDF, driver="vfio-pci")
    found = only(faults(host))
    assert "the IOMMU is off; enable VT-d or AMD-Vi in the BIOS" in found
    assert "intel_iommu=on" in found


def test_a_function_outside_an_active_iommu_has_its_own_error(host: FakeSysfs) -> None:
    host.pci(BDF)
    host.pci("0000:5e:00.0", 4)
    assert "its bus is outside the IOMMU" in only(faults(host))


@pytest.mark.parametrize(("driver", "words"), [("ixgbe", "the driver ixgbe"), ("", "no driver")])
def test_a_function_at_another_driver_is_refused_unless_it_is_to_be_bound(
    host: FakeSysfs, driver: str, words: str
) -> None:
    host.pci(BDF, 9, driver=driver)
    assert f"is bound to {words}, not vfio-pci; bind it (driverctl set-override {BDF} vfio-pci)" in only(faults(host))
    assert faults(host, bind=True) == []


def test_a_group_with_a_busy_neighbour_is_not_viable_and_the_neighbour_is_named(host: FakeSysfs) -> None:
    host.pci(BDF, 5, driver="vfio-pci")
    host.pci(SIBLING, 5, driver="e1000")
    found = only(faults(host))
    assert f"shares IOMMU group 5 with {SIBLING}, which is bound to the driver e1000" in found
    assert f"echo {SIBLING} > /sys/bus/pci/devices/{SIBLING}/driver/unbind" in found


@pytest.mark.parametrize(
    ("driver", "code"), [("", 0x020000), ("vfio-pci", 0x020000), ("pcieport", BRIDGE), ("shpchp", BRIDGE)]
)
def test_idle_vfio_and_bridge_neighbours_are_accepted(host: FakeSysfs, driver: str, code: int) -> None:
    host.pci(BDF, 5, driver="vfio-pci")
    host.pci(SIBLING, 5, driver=driver, class_code=code)
    assert faults(host) == []


def test_neighbours_that_go_into_the_same_vm_are_bound_together(host: FakeSysfs) -> None:
    for address in (BDF, SIBLING):
        host.pci(address, 5, driver="e1000")
    assert faults(host, function(BDF), function(SIBLING), bind=True) == []
    assert len(faults(host, function(BDF), bind=True)) == 1


def test_a_missing_node_says_which_and_why(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci", vfio_node=False)
    host.vfio()
    assert "cannot be opened: /dev/vfio/9 does not exist; modprobe vfio-pci" in only(faults(host))


def test_vfio_without_an_iommu_is_refused(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci")
    host.write("/sys/kernel/iommu_groups/9/name", "vfio-noiommu\n")
    assert "bound to VFIO without an IOMMU, which QEMU refuses" in only(faults(host))


def test_a_physical_function_with_vfs_in_use_is_refused(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci")
    host.pci("0000:3b:02.0", 10, vf_of=BDF)
    found = only(faults(host))
    assert (
        f"has VFs (1), which the VM would get too; grant VFs, or remove them: echo 0 > /sys/bus/pci/devices/{BDF}/sriov_numvfs"
        in found
    )


def test_the_nodes_own_network_card_and_disk_are_refused(host: FakeSysfs) -> None:
    host.interface("eth0", host.pci(BDF, 9, driver="ixgbe"))
    host.default_route("eth0")
    home = host.pci(SIBLING, 10, driver="nvme", class_code=NVME)
    host.block("nvme0n1p1", f"{home}/nvme/nvme0/nvme0n1/nvme0n1p1", "259:1")
    host.mounted(("259:1", "/", "/dev/nvme0n1p1"))
    card, disk = faults(host, function(BDF), function(SIBLING), bind=True)
    assert f"PCI function {BDF} is used by the node: the node's default route goes through it (eth0)" in card
    assert "the node's file system / is on it" in disk


def test_a_function_that_the_operator_keeps_is_refused(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci")
    assert "is reserved for the node (devices.keep); remove it" in only(faults(host, keep=(BDF,)))


@pytest.mark.parametrize("part", [UUID, "vdpa0"])
@pytest.mark.parametrize("driver", ["vfio-pci", "mlx5_core"])
def test_a_function_with_mediated_or_vdpa_devices_is_refused(host: FakeSysfs, part: str, driver: str) -> None:
    """Bound to another driver it would lose them, and another pod may have one."""
    home = host.pci(BDF, 7, driver=driver)
    host.path(f"{home}/{part}").mkdir()
    assert f"has {part} created from it" in only(faults(host, bind=driver != "vfio-pci"))


def test_a_bridge_is_refused(host: FakeSysfs) -> None:
    host.pci(BDF, 9, class_code=BRIDGE, driver="pcieport")
    assert "is a PCI bridge" in only(faults(host, bind=True))


def test_the_error_about_the_memory_lock_limit_has_figures(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci")
    assert faults(host, memory=3 * GIB, limit=4 * GIB) == []
    found = only(faults(host, memory=3 * GIB + 1, limit=4 * GIB))
    assert "3072 MiB and 1024 more, but may lock only 4096 MiB; set LimitMEMLOCK=infinity" in found
    assert faults(host, memory=3 * GIB + 1, limit=None) == []
    assert faults(host, memory=0, limit=1) == []


def test_a_usb_device_locks_no_memory(host: FakeSysfs) -> None:
    host.node("/dev/bus/usb/001/004")
    assert faults(host, UsbDevice(1, 4), memory=GIB, limit=1) == []


def test_each_vdpa_device_locks_all_memory_separately(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci")
    host.pci(SIBLING, 10, driver="vfio-pci")
    cards = [VdpaDevice(f"/dev/vhost-vdpa-{number}") for number in (0, 1)]
    for card in cards:
        host.node(card.path)
    assert faults(host, *cards, memory=GIB, limit=3 * GIB) == []
    assert "2048 MiB and 1024 more, but may lock only 2048 MiB" in only(faults(host, *cards, memory=GIB, limit=2 * GIB))
    functions = [PciFunction(PciAddress.parse(address)) for address in (BDF, SIBLING)]
    assert faults(host, *cards, *functions, memory=GIB, limit=4 * GIB) == []
    assert "3072 MiB and 1024 more" in only(faults(host, *cards, *functions, memory=GIB, limit=3 * GIB))


def test_mediated_devices_are_checked_with_group_and_node(host: FakeSysfs) -> None:
    device = MediatedDevice(UUID, "nvidia.com/GRID")
    assert f"mediated device {UUID} (nvidia.com/GRID) does not exist" in only(faults(host, device))
    home = "/sys/devices/pci0000:00/0000:65:00.0"
    host.path(f"{home}/{UUID}").mkdir(parents=True)
    host.link(f"/sys/bus/mdev/devices/{UUID}", f"{home}/{UUID}")
    assert "modprobe vfio_mdev" in only(faults(host, device))
    host.in_group(12, UUID, f"{home}/{UUID}")
    assert len(faults(host, device)) == 2  # no /dev/vfio/vfio, no /dev/vfio/12
    host.vfio(12)
    assert faults(host, device) == []


def test_usb_devices_are_checked_and_hubs_refused(host: FakeSysfs) -> None:
    assert "USB device 001/004 does not exist: it was unplugged" in only(faults(host, UsbDevice(1, 4)))
    host.node("/dev/bus/usb/001/004")
    for name, text in (("busnum", "1"), ("devnum", "4"), ("bDeviceClass", "09")):
        host.write(f"/sys/bus/usb/devices/1-1/{name}", text)
    assert "is a USB hub" in only(faults(host, UsbDevice(1, 4)))
    host.write("/sys/bus/usb/devices/1-1/bDeviceClass", "00")
    assert faults(host, UsbDevice(1, 4)) == []


def test_a_usb_stick_that_the_node_has_mounted_is_refused(host: FakeSysfs) -> None:
    stick = "/sys/devices/pci0000:00/0000:00:14.0/usb1/1-1"
    host.node("/dev/bus/usb/001/004")
    host.block("sdc", f"{stick}/1-1:1.0/host6/target6:0:0/6:0:0:0/block/sdc", "8:32")
    host.write(f"{stick}/busnum", "1")
    host.write(f"{stick}/devnum", "4")
    assert faults(host, UsbDevice(1, 4)) == []
    host.mounted(("8:32", "/", "/dev/sdc"))
    fault = only(faults(host, UsbDevice(1, 4)))
    assert "USB device 001/004 is used by the node: the node's file system / is on it" in fault


def test_vdpa_devices_are_checked(host: FakeSysfs) -> None:
    assert only(faults(host, VdpaDevice("/dev/vhost-vdpa-0"))).startswith(
        "/dev/vhost-vdpa-0 does not exist; modprobe vhost_vdpa"
    )
    host.node("/dev/vhost-vdpa-0")
    assert faults(host, VdpaDevice("/dev/vhost-vdpa-0")) == []


# --- the port


def node_devices(host: FakeSysfs) -> NodeDevices:
    files = host.files()
    rules = AttachRules(bind=False, keep=(), lockable=lambda: None)
    return NodeDevices(files, CdiDirectories((), files), None, AttachChecker(files, rules))


def test_all_faults_are_one_error(host: FakeSysfs) -> None:
    with pytest.raises(WrongState, match=rf"{BDF} does not exist.*; PCI function {SIBLING} does not exist"):
        node_devices(host).check([function(), function(SIBLING)])


def test_a_function_that_cannot_be_reset_is_given_with_a_warning(host: FakeSysfs) -> None:
    host.pci(BDF, 9, driver="vfio-pci", reset=False)
    with capture_logs() as logs:
        node_devices(host).check([function()])
    assert logs == [{"event": "devices.no_reset", "log_level": "warning", "device": BDF}]


# --- memory


def limits(host: FakeSysfs, pid: str, locked: str, capabilities: int) -> None:
    host.write(
        f"/proc/{pid}/limits",
        f"Limit   Soft Limit  Hard Limit  Units\nMax locked memory         65536      {locked}     bytes\n",
    )
    host.write(f"/proc/{pid}/status", f"Name:\tx\nCapEff:\t{capabilities:016x}\n")


@pytest.mark.parametrize(
    ("locked", "capabilities", "expected"),
    [("8388608", 0, 8388608), ("8388608", 1 << 24, None), ("unlimited", 0, None)],
)
def test_the_lock_limit_is_the_embedding_processs_unless_it_may_raise_the_limit(
    host: FakeSysfs, locked: str, capabilities: int, expected: int | None
) -> None:
    limits(host, "self", locked, capabilities)
    assert lockable(host.files(), "qemu:///embed?root=/x") == expected


@pytest.mark.parametrize("daemon", ["libvirtd", "virtqemud"])
def test_with_the_systems_libvirt_its_daemons_limit_counts(host: FakeSysfs, daemon: str) -> None:
    limits(host, "self", "1", 0)
    limits(host, "812", "4096", 0)
    host.write(f"/run/{daemon}.pid", "812\n")
    assert lockable(host.files(), "qemu:///system") == 4096


def test_the_lock_limit_of_a_daemon_that_does_not_run_is_unknown(host: FakeSysfs) -> None:
    host.write("/run/libvirtd.pid", "812\n")
    assert lockable(host.files(), "qemu:///system") is None
