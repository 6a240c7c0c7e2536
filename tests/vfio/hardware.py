"""The machine's PCI devices, as root prepares them on a node: virtual functions, drivers, groups. Runs in the machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from pathlib import Path

from podclient import wait_until

# The places on QEMU's command line (outer.py).
NVME = "0000:01:00.0"
VFS = ("0000:01:00.1", "0000:01:00.2", "0000:01:00.3")
EDU = "0000:00:03.0"
# Two functions behind a conventional bridge: one IOMMU group.
SHARED_EDU, SHARED_RNG = "0000:02:01.0", "0000:02:02.0"
# The device plugin's names for them.
EDU_RESOURCE, NVME_RESOURCE, SHARED_RESOURCE = "example.com/edu", "example.com/nvme-vf", "example.com/shared"
CARD_RESOURCE = "example.com/card-vf"

_PCI = Path("/sys/bus/pci")
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD, linux/nvme_ioctl.h
_VIRTUALIZATION_MANAGEMENT = 0x1C
_QUEUES, _INTERRUPTS = 0, 1
_ASSIGN, _ONLINE = 8, 9


def faulty() -> str:
    """The function that can report errors: an e1000e of its own port."""
    (found,) = [path.name for path in (_PCI / "devices").iterdir() if (path / "device").read_text().strip() == "0x10d3"]
    return found


def inject(address: str, uncorrectable: int) -> None:
    """Makes the kernel's aer_inject report an error of the function, as its port would: `struct aer_error_inj`. OSError
    without that module."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    words = struct.pack(
        "<BBBx7I", int(bus, 16), int(slot, 16), int(function), uncorrectable, 0, 0, 0, 0, 0, int(domain, 16)
    )
    with open("/dev/aer_inject", "wb", buffering=0) as file:
        file.write(words)


def make_functions() -> None:
    """The NVMe controller's virtual functions, without drivers, each able to work. A VF of this controller has nothing until
    it is given queues and interrupts and is put online (NVMe base specification, Virtualization Management)."""
    device = _PCI / "devices" / NVME
    state = device / "nvme" / "nvme0" / "state"
    wait_until(lambda: state.exists() and state.read_text().strip() == "live", 240, "the NVMe controller is there")
    (device / "sriov_drivers_autoprobe").write_text("0")
    (device / "sriov_numvfs").write_text(str(len(VFS)))
    (device / "sriov_drivers_autoprobe").write_text("1")  # without it a VF gets no driver that is not named for it
    with open("/dev/nvme0", "rb", buffering=0) as controller:
        for number in range(1, len(VFS) + 1):
            _manage(controller.fileno(), number, _QUEUES, _ASSIGN, 2)
            _manage(controller.fileno(), number, _INTERRUPTS, _ASSIGN, 1)
            _manage(controller.fileno(), number, 0, _ONLINE, 0)


def _manage(controller: int, function: int, resource: int, action: int, count: int) -> None:
    words = (function << 16 | resource << 8 | action, count, 0, 0, 0, 0, 5000, 0)
    command = bytearray(struct.pack("<BBHIIIQQIIIIIIIIII", _VIRTUALIZATION_MANAGEMENT, 0, *(0,) * 8, *words))
    status = fcntl.ioctl(controller, _ADMIN_COMMAND, command)
    if status:
        raise OSError(f"{NVME}: Virtualization Management for function {function}: status {status:#x}")


def make_block_device() -> str:
    """Makes a block device as a volume plugin does for a raw block volume; returns its path."""
    file = Path("/run/volume")
    file.write_bytes(bytes(1 << 20))
    return subprocess.check_output(["losetup", "--find", "--show", str(file)], text=True).strip()


def remove_block_device(path: str) -> None:
    subprocess.run(["losetup", "--detach", path], check=True)


def bind(address: str, driver: str) -> None:
    """Rebinds the function. "" gives it to any driver that wants it."""
    device = _PCI / "devices" / address
    (device / "driver_override").write_text(driver or "\n")
    with contextlib.suppress(FileNotFoundError):
        (device / "driver" / "unbind").write_text(address)
    (_PCI / "drivers_probe").write_text(address)


def driver(address: str) -> str:
    """The function's driver, "" for none."""
    link = _PCI / "devices" / address / "driver"
    return os.path.basename(os.readlink(link)) if link.is_symlink() else ""


def drivers() -> dict[str, str]:
    return {address: driver(address) for address in (*VFS, EDU, SHARED_EDU, SHARED_RNG)}


def group(address: str) -> int:
    return int(os.path.basename(os.readlink(_PCI / "devices" / address / "iommu_group")))


def vfio_users() -> list[str]:
    """The programs that have a VFIO group open."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and any(
                os.readlink(f"/proc/{entry}/fd/{number}").startswith("/dev/vfio/")
                for number in os.listdir(f"/proc/{entry}/fd")
            ):
                found.append(Path(f"/proc/{entry}/comm").read_text().strip())
    return sorted(found)
