"""Where the VM's own devices are on its root bus. Pure.

| slots | what |
|---|---|
| 0x01 to 0x06 | root ports, eight a slot: first those of the host's devices, then libvirt's for everything else |
| 0x07 | the devices that each VM has beside disks, a function each |
| 0x08 to 0x0f | disks, eight a slot |
| 0x10 to 0x1b | the NICs, which vmwrapper adds |

Firmware and kernel must scan each root port, and only devices that may be plugged need one. So devices that a VM keeps for its
whole life are on the root bus itself.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from xml.etree.ElementTree import Element

_FUNCTIONS_A_SLOT = 8
_OWN_SLOT = 0x07
_FIRST_DISK_SLOT = 0x08
_LAST_DISK_SLOT = 0x0F

DISKS = (_LAST_DISK_SLOT - _FIRST_DISK_SLOT + 1) * _FUNCTIONS_A_SLOT


class Own(enum.IntEnum):
    """Functions of slot 0x07. The first one is always there, because guests ignore a slot that lacks its first function."""

    SERIAL = 0
    BALLOON = 1
    ENTROPY = 2
    SCSI = 3
    VOLUMES = 4
    USB = 5
    VIDEO = 6
    WATCHDOG = 7


def own(device: Own) -> Element:
    """The device's `<address>`."""
    return _address(_OWN_SLOT, device.value)


def disk(index: int) -> Element:
    """The `<address>` of the virtio disk with this number, which is less than DISKS."""
    slot, function = divmod(index, _FUNCTIONS_A_SLOT)
    return _address(_FIRST_DISK_SLOT + slot, function)


def headless(numbers: Sequence[int]) -> Sequence[int]:
    """The slots that have some of these disks, but not the one at their first function."""
    slots = {number // _FUNCTIONS_A_SLOT for number in numbers}
    return [_FIRST_DISK_SLOT + slot for slot in sorted(slots) if slot * _FUNCTIONS_A_SLOT not in numbers]


def _address(slot: int, function: int) -> Element:
    element = Element(
        "address", type="pci", domain="0x0000", bus="0x00", slot=f"{slot:#04x}", function=f"{function:#x}"
    )
    if function == 0:
        element.set("multifunction", "on")
    return element
