"""The fakes, and the real code on a sysfs in a directory, fulfil the contract of Devices and DeviceErrorCounts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes.devices import FakeDeviceErrors, FakeDevices
from fakes.sysfs import FakeSysfs

from virtshim.devices.attachable import AttachChecker, AttachRules
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.function_health import AerCounts
from virtshim.devices.host_files import NodeKind
from virtshim.devices.ports import DeviceErrorCounts, Devices
from virtshim.devices.resolve import NodeDevices
from virtshim.devices.values import BlockDevice, CriDevice, DeviceErrors, DeviceRequest, GrantedDevices, PciAddress
from virtshim.model.errors import InvalidRequest, WrongState

ONE, TWO, UNFIT = "0000:3b:02.0", "0000:3b:02.1", "0000:3b:02.2"
# Behind the nodes /dev/vfio/41 and so on; UNFIT is not at vfio-pci.
GROUPS = {ONE: 41, TWO: 42, UNFIT: 43}
DISK = "/dev/block/disk"
HINT = "PCIDEVICE_EXAMPLE_COM_VF"
GIB = 1 << 30


def node(address: str) -> str:
    return f"/dev/vfio/{GROUPS[address]}"


def _fake() -> tuple[Devices, DeviceErrorCounts]:
    devices, errors = FakeDevices(), FakeDeviceErrors()
    for address in GROUPS:
        devices.add_function(node(address), address)
    devices.unfit.add(f"pci:{UNFIT}")
    errors.counts[ONE] = DeviceErrors(3, 4)
    return devices, errors


def _real(directory: Path) -> tuple[Devices, DeviceErrorCounts]:
    host = FakeSysfs(directory)
    for address, group in GROUPS.items():
        host.pci(address, group, driver="ixgbe" if address == UNFIT else "vfio-pci")
        host.vfio(group)
    host.node(DISK, NodeKind.BLOCK, 259, 5)
    host.block("disk", "/sys/devices/virtual/block/disk", "259:5")
    host.write(f"/sys/bus/pci/devices/{ONE}/aer_dev_fatal", "TOTAL_ERR_FATAL 3\n")
    host.write(f"/sys/bus/pci/devices/{ONE}/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 4\n")
    files = host.files()
    checker = AttachChecker(files, AttachRules(bind=False, keep=frozenset(), lockable=lambda: None))
    return NodeDevices(files, CdiDirectories(("/etc/cdi",), files), None, checker), AerCounts(files)


@pytest.fixture(params=["fake", "real"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Devices, DeviceErrorCounts]:
    return _fake() if request.param == "fake" else _real(tmp_path / "host")


@pytest.fixture
def devices(parts: tuple[Devices, DeviceErrorCounts]) -> Devices:
    return parts[0]


@pytest.fixture
def errors(parts: tuple[Devices, DeviceErrorCounts]) -> DeviceErrorCounts:
    return parts[1]


def resolve(devices: Devices, *nodes: str, envs: Mapping[str, str] | None = None) -> GrantedDevices:
    wanted = tuple(CriDevice(path, path) for path in nodes)
    return devices.resolve(DeviceRequest("default", "vm", "c", wanted, (), envs or {}))


def claims(granted: GrantedDevices) -> list[str]:
    return [device.claim for device in granted.passthrough]


def test_a_container_without_devices_is_granted_none(devices: Devices) -> None:
    assert resolve(devices) == GrantedDevices()


def test_devices_behind_device_nodes_are_granted(devices: Devices) -> None:
    assert claims(resolve(devices, node(ONE), node(TWO))) == [f"pci:{ONE}", f"pci:{TWO}"]


def test_a_device_named_twice_is_granted_once(devices: Devices) -> None:
    assert claims(resolve(devices, node(ONE), node(ONE))) == [f"pci:{ONE}"]


def test_a_block_device_is_a_disk(devices: Devices) -> None:
    granted = resolve(devices, DISK, node(ONE))
    assert granted.blocks == (BlockDevice(DISK, DISK, readonly=False),)
    assert claims(granted) == [f"pci:{ONE}"]


def test_a_node_that_no_vm_can_have_is_refused(devices: Devices) -> None:
    with pytest.raises(InvalidRequest):
        resolve(devices, "/dev/none")


def test_a_hint_chooses_among_granted_devices_only(devices: Devices) -> None:
    assert claims(resolve(devices, node(ONE), envs={HINT: ONE})) == [f"pci:{ONE}"]
    with pytest.raises(InvalidRequest, match=TWO):
        resolve(devices, node(ONE), envs={HINT: TWO})


def test_a_device_is_fit_if_it_can_be_attached_now(devices: Devices) -> None:
    devices.check(resolve(devices, node(ONE), node(TWO)).passthrough, guest_memory=GIB)
    with pytest.raises(WrongState, match=UNFIT):
        devices.check(resolve(devices, node(ONE), node(UNFIT)).passthrough, guest_memory=GIB)


def test_errors_are_reported_where_the_kernel_counts_them(errors: DeviceErrorCounts) -> None:
    assert errors.errors(PciAddress.parse(ONE)) == DeviceErrors(3, 4)
    assert errors.errors(PciAddress.parse(TWO)) is None
