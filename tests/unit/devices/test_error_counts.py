"""virtshim reads the kernel's counts of PCI Express errors."""

from pathlib import Path

import pytest

from virtshim.devices.function_health import AerCounts
from virtshim.devices.host_files import HostFiles
from virtshim.devices.values import DeviceErrors, PciAddress

ADDRESS = PciAddress.parse("0000:3b:00.0")
FATAL = "Undefined 0\nDLP 0\nSDES 1\nTLP 2\nTOTAL_ERR_FATAL 3\n"
NONFATAL = "Undefined 0\nCmpltTO 4\nTOTAL_ERR_NONFATAL 4\n"


def counts(root: Path, **files: str) -> AerCounts:
    device = root / "sys/bus/pci/devices" / str(ADDRESS)
    device.mkdir(parents=True)
    for name, text in files.items():
        (device / name).write_text(text)
    return AerCounts(HostFiles(str(root)))


def test_the_total_error_counts_are_read(tmp_path: Path) -> None:
    assert counts(tmp_path, aer_dev_fatal=FATAL, aer_dev_nonfatal=NONFATAL).errors(ADDRESS) == DeviceErrors(3, 4)


def test_a_fatal_error_that_only_the_root_port_saw_counts(tmp_path: Path) -> None:
    place = tmp_path / "sys/devices/pci0000:3a/0000:3a:01.0" / str(ADDRESS)
    place.mkdir(parents=True)
    (place / "aer_dev_fatal").write_text(FATAL)
    (place / "aer_dev_nonfatal").write_text(NONFATAL)
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for one in (place, place.parent):
        (bus / one.name).symlink_to(one)
    (place.parent / "aer_rootport_total_err_fatal").write_text("5\n")
    assert AerCounts(HostFiles(str(tmp_path))).errors(ADDRESS) == DeviceErrors(5, 4)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"aer_dev_fatal": FATAL},
        {"aer_dev_fatal": "", "aer_dev_nonfatal": NONFATAL},
        {"aer_dev_fatal": "TOTAL_ERR_FATAL x\n"},
    ],
)
def test_a_device_without_counters_has_unknown_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert counts(tmp_path, **files).errors(ADDRESS) is None
