"""A granted device node is classified by what stat says and by its path."""

import pytest
from fakes.sysfs import FakeSysfs

from virtshim.devices.grants import NoDevice, Unusable, VfioDirectory, VfioFunction, VfioGroup, VfioMdev, classify
from virtshim.devices.host_files import NodeKind
from virtshim.devices.values import BlockDevice, CriDevice, PciAddress, UsbDevice, VdpaDevice

UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


def meaning(host: FakeSysfs, path: str, container_path: str = "", permissions: str = "rwm") -> object:
    return classify(CriDevice(path, container_path or path, permissions), host.files())


@pytest.mark.parametrize(
    ("permissions", "readonly"), [("rwm", False), ("mrw", False), ("r", True), ("mr", True), ("", False)]
)
def test_a_block_device_is_a_volume_wherever_it_is(host: FakeSysfs, permissions: str, readonly: bool) -> None:
    host.node("/var/lib/kubelet/plugins/x/dev", NodeKind.BLOCK)
    found = meaning(host, "/var/lib/kubelet/plugins/x/dev", "/dev/xvda", permissions)
    assert found == BlockDevice("/var/lib/kubelet/plugins/x/dev", "/dev/xvda", readonly)


def test_a_block_device_below_dev_vfio_is_still_a_volume(host: FakeSysfs) -> None:
    host.node("/dev/vfio/9", NodeKind.BLOCK)
    assert isinstance(meaning(host, "/dev/vfio/9"), BlockDevice)


def test_a_link_to_a_block_device_is_the_volume_behind_it(host: FakeSysfs) -> None:
    """kubelet has a link for each pod, and they are one device."""
    host.node("/dev/sdb", NodeKind.BLOCK)
    host.link("/dev/disk/by-id/x", "/dev/sdb")
    assert meaning(host, "/dev/disk/by-id/x", "/data") == BlockDevice("/dev/sdb", "/data")


@pytest.mark.parametrize("path", ["/dev/vfio/17", "/dev/vfio//17", "/dev/vfio/../vfio/17"])
def test_a_vfio_group_node_gives_the_group_number(host: FakeSysfs, path: str) -> None:
    host.vfio(17)
    assert meaning(host, path) == VfioGroup(17)


@pytest.mark.parametrize(
    "path",
    ["/dev/vfio/vfio", "/dev/iommu", "/dev/kvm", "/dev/net/tun", "/dev/vhost-net", "/dev/vhost-vsock"],
)
def test_nodes_that_every_vm_has_are_no_devices(host: FakeSysfs, path: str) -> None:
    host.node(path)
    assert meaning(host, path) == NoDevice()


@pytest.mark.parametrize("by_class", [True, False])
def test_a_vfio_cdev_is_the_last_function_on_its_sysfs_path(host: FakeSysfs, by_class: bool) -> None:
    home = host.pci("10000:e1:00.0", 3, driver="vfio-pci", behind=("10000:e0:00.0",))
    host.cdev("vfio4", home, minor=4, by_class=by_class)
    assert meaning(host, "/dev/vfio/devices/vfio4") == VfioFunction(PciAddress(0x10000, 0xE1, 0, 0))


def test_a_vfio_cdev_of_a_mediated_device_is_not_its_parent(host: FakeSysfs) -> None:
    parent = host.pci("0000:65:00.0", driver="nvidia")
    host.cdev("vfio1", host.mdev(UUID, 12, parent))
    assert meaning(host, "/dev/vfio/devices/vfio1") == VfioMdev(UUID)


def test_a_vfio_cdev_that_sysfs_does_not_know_is_refused(host: FakeSysfs) -> None:
    host.node("/dev/vfio/devices/vfio1", major=511, minor=1)
    assert "sysfs has no device" in refused(host, "/dev/vfio/devices/vfio1")


def test_the_directory_dev_vfio_stands_for_an_unnamed_mediated_device(host: FakeSysfs) -> None:
    host.vfio(5)
    assert meaning(host, "/dev/vfio") == VfioDirectory()
    assert meaning(host, "/dev/vfio/") == VfioDirectory()


def test_usb_and_vdpa_devices_are_recognised_by_their_path(host: FakeSysfs) -> None:
    assert meaning(host, host.node("/dev/bus/usb/001/014")) == UsbDevice(1, 14)
    assert meaning(host, host.node("/dev/vhost-vdpa-3")) == VdpaDevice("/dev/vhost-vdpa-3")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/dev/vfio/noiommu-3", "intel_iommu=on"),
        ("/dev/uio0", "dpdkDriver: vfio-pci"),
        ("/dev/infiniband/uverbs0", "isRdma"),
        ("/dev/nvidia0", "kubevirt-gpu-device-plugin"),
        ("/dev/nvidiactl", "kubevirt-gpu-device-plugin"),
        ("/dev/dri/renderD128", "at vfio-pci"),
        ("/dev/kfd", "at vfio-pci"),
        ("/dev/ttyUSB0", "run the pod as a container"),
        ("/dev/mem", "run the pod as a container"),
    ],
)
def test_a_node_that_no_vm_can_have_is_refused_with_the_remedy(host: FakeSysfs, path: str, says: str) -> None:
    host.node(path)
    assert says in refused(host, path)


def test_a_path_that_is_missing_or_no_device_is_refused(host: FakeSysfs) -> None:
    host.write("/dev/shm/x", "")
    host.path("/dev/mapper").mkdir()
    assert "does not exist" in refused(host, "/dev/vfio/5")
    assert "it is a file, not a device node" in refused(host, "/dev/shm/x")
    assert "it is a directory, not a device node" in refused(host, "/dev/mapper")
    assert "does not exist" in refused(host, "no/absolute/path")


def refused(host: FakeSysfs, path: str, permissions: str = "rwm") -> str:
    found = meaning(host, path, permissions=permissions)
    assert isinstance(found, Unusable)
    return found.why


@pytest.mark.parametrize("permissions", ["r", "w", "m", "none"])
@pytest.mark.parametrize("path", ["/dev/vfio/17", "/dev/vfio", "/dev/bus/usb/001/002", "/dev/vhost-vdpa-0"])
def test_a_device_without_read_and_write_permission_is_refused(host: FakeSysfs, path: str, permissions: str) -> None:
    host.vfio(17)
    for node in ("/dev/bus/usb/001/002", "/dev/vhost-vdpa-0"):
        host.node(node)
    assert f"granted with permissions {permissions}, but a VM needs rw" in refused(host, path, permissions)


@pytest.mark.parametrize("permissions", ["w", "m", "wm", "none"])
def test_a_disk_without_read_permission_is_refused(host: FakeSysfs, permissions: str) -> None:
    host.node("/dev/sdb", NodeKind.BLOCK)
    assert "a VM needs r;" in refused(host, "/dev/sdb", permissions)


SDA = "/sys/devices/ata1/block/sda"


@pytest.mark.parametrize("granted", ["8:0", "8:3", "253:0"])
def test_a_disk_that_the_node_has_mounted_is_read_only(host: FakeSysfs, granted: str) -> None:
    host.block("sda", SDA, "8:0")
    host.block("sda3", f"{SDA}/sda3", "8:3")
    host.block("dm-0", "/sys/devices/virtual/block/dm-0", "253:0", ["sda3"])
    host.mounted(("253:0", "/", "/dev/mapper/root"))
    major, minor = map(int, granted.split(":"))
    host.node("/dev/x", NodeKind.BLOCK, major, minor)
    assert "the node's file system / is on it" in refused(host, "/dev/x")
    assert meaning(host, "/dev/x", permissions="r") == BlockDevice("/dev/x", "/dev/x", readonly=True)


@pytest.mark.parametrize(("name", "number"), [("sda1", "8:1"), ("sda30", "8:30"), ("sdaa", "65:160")])
def test_a_disk_beside_a_mounted_one_is_accepted(host: FakeSysfs, name: str, number: str) -> None:
    host.block("sda3", f"{SDA}/sda3", "8:3")
    host.block(name, f"/sys/devices/ata1/block/{name}" if name == "sdaa" else f"{SDA}/{name}", number)
    host.mounted(("8:3", "/", "/dev/sda3"))
    major, minor = map(int, number.split(":"))
    host.node("/dev/x", NodeKind.BLOCK, major, minor)
    assert isinstance(meaning(host, "/dev/x"), BlockDevice)


def test_a_block_volume_is_identified_by_its_device_number(host: FakeSysfs) -> None:
    host.node("/dev/sdb", NodeKind.BLOCK)
    found, node = meaning(host, "/dev/sdb"), host.files().node("/dev/sdb")
    assert isinstance(found, BlockDevice)
    assert found.identity == f"{node.major}:{node.minor}"
