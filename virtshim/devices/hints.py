"""Environment variables in which device plugins name what they granted. Hints: a pod's author can write them as well. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from virtshim.devices.pci import is_uuid
from virtshim.domain.devices.granted import MediatedDevice, PciAddress, PciFunction, UsbDevice
from virtshim.domain.errors import InvalidRequest

# sriov-network-device-plugin, whose *_INFO holds JSON for programs; KubeVirt's and NVIDIA's plugins; Intel's QAT plugin, whose
# numbers mean nothing.
_PCI: Final = re.compile(r"PCIDEVICE_(?!.*_INFO$).+|PCI_RESOURCE_.+|QAT[0-9]+", re.DOTALL)
_MDEV: Final = re.compile(r"MDEV_PCI_RESOURCE_.+", re.DOTALL)
_USB: Final = re.compile(r"USB_RESOURCE_.+", re.DOTALL)
_USB_PLACE: Final = re.compile(r"([0-9]{1,3}):([0-9]{1,3})", re.ASCII)

# Of a variable's name, which may be as long as a pod is: it goes into the log and into messages.
_LONGEST_NAME: Final = 200

Hinted: TypeAlias = PciFunction | MediatedDevice | UsbDevice


@dataclass(frozen=True, slots=True)
class Hint:
    """`text` is what the variable says of this one device. `spec`: path of the CDI specification that sets the variable; ""
    for the container's own, which may be its author's."""

    variable: str
    text: str
    device: Hinted
    spec: str = ""


def hints(variables: Iterable[tuple[str, str, str]]) -> list[Hint]:
    """(name, value, specification) each. Of comma lists, each device once; what is no address (such as the number of a
    subfunction) is left out."""
    return list(dict.fromkeys(hint for name, value, spec in variables for hint in _hints(name, value, spec)))


def _hints(name: str, value: str, spec: str) -> Iterator[Hint]:
    for kind, read in ((_PCI, _function), (_MDEV, _mdev), (_USB, _usb)):
        if kind.fullmatch(name) is None:
            continue
        for text in (part.strip() for part in value.split(",")):
            device = read(text)
            if device is not None:
                yield Hint(name[:_LONGEST_NAME], text, device, spec)


def _function(text: str) -> PciFunction | None:
    try:
        return PciFunction(PciAddress.parse(text))
    except InvalidRequest:
        return None


def _mdev(text: str) -> MediatedDevice | None:
    return MediatedDevice(text.lower()) if is_uuid(text.lower()) else None


def _usb(text: str) -> UsbDevice | None:
    match = _USB_PLACE.fullmatch(text)
    return UsbDevice(int(match[1]), int(match[2])) if match else None
