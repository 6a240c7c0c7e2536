"""Where the guest finds the host devices that it was given. Pure.

Each device on PCI has a root port of its own, made before all others: firmware and kernel number buses in the order of the
ports, so the k-th device is `0000:0k:00.0`, known before the VM is there. What tells the guest of addresses can be written
in its own ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from virtshim.domain.devices.granted import BlockDevice, GrantedDevices, Passthrough, PciAddress, PciFunction, UsbDevice
from virtshim.domain.errors import InvalidRequest

# Root ports for them, eight to a slot of the root bus, leave room for the other ports before the slots of the NICs.
MAX_PCI_DEVICES: Final = 48
MAX_USB_DEVICES: Final = 15
MAX_BLOCK_DEVICES: Final = 24

# What device plugins call the variables that hold addresses (see virtshim.ports.devices for who may be believed).
_OF_PLUGINS: Final = re.compile(r"(?:PCIDEVICE|PCI_RESOURCE)_.+|QAT[0-9]+", re.DOTALL)
_OF_USB: Final = re.compile(r"USB_RESOURCE_.+", re.DOTALL)
_NOT_IN_SERIALS: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_SERIAL: Final = 20


class _UnknownAddress(Exception):
    """A host PCI address that belongs to none of this guest's devices."""


def refuse_too_many(granted: GrantedDevices) -> None:
    usb = sum(isinstance(device, UsbDevice) for device in granted.passthrough)
    for number, most, what in (
        (len(granted.passthrough) - usb, MAX_PCI_DEVICES, "PCI devices"),
        (usb, MAX_USB_DEVICES, "USB devices"),
        (len(granted.blocks), MAX_BLOCK_DEVICES, "block devices"),
    ):
        if number > most:
            raise InvalidRequest(
                f"config.devices: {number} {what} are more than the {most} that a virtual machine can have"
            )


def buses(passthrough: Sequence[Passthrough]) -> Sequence[tuple[int, Passthrough]]:
    """The guest's bus for each device that is on PCI there, from 1 up."""
    return list(enumerate((device for device in passthrough if not isinstance(device, UsbDevice)), start=1))


def addresses(passthrough: Sequence[Passthrough]) -> Mapping[PciAddress, PciAddress]:
    """Host address -> the guest's."""
    return {
        device.address: PciAddress(0, bus, 0, 0)
        for bus, device in buses(passthrough)
        if isinstance(device, PciFunction)
    }


def environment(envs: Sequence[tuple[str, bytes]], granted: GrantedDevices) -> tuple[tuple[str, bytes], ...]:
    """The variables for the guest: in those of device plugins the host's PCI addresses become the guest's. One with an address
    that is no device of this guest is left out, and so are the host's numbers of USB devices: they would name something else
    there."""
    known = addresses(granted.passthrough)
    found = []
    for name, value in envs:
        if _OF_PLUGINS.fullmatch(name):
            try:
                found.append((name, _translated(value.decode(), known).encode()))
            except (_UnknownAddress, UnicodeDecodeError):
                continue
        elif not _OF_USB.fullmatch(name):
            found.append((name, value))
    return tuple(found)


def _translated(value: str, known: Mapping[PciAddress, PciAddress]) -> str:
    """A comma list, or what the SR-IOV plugin says beside it: JSON by address."""
    if not value.lstrip().startswith("{"):
        return ",".join(_word(word, known) for word in value.split(","))
    try:
        return json.dumps(_json(json.loads(value), known), separators=(",", ":"))
    except (ValueError, RecursionError) as exc:
        raise _UnknownAddress from exc


def _word(word: str, known: Mapping[PciAddress, PciAddress]) -> str:
    try:
        address = PciAddress.parse(word.strip())
    except InvalidRequest:
        return word  # a number of something else, such as a subfunction's
    if address not in known:
        raise _UnknownAddress
    return str(known[address])


def _json(value: Any, known: Mapping[PciAddress, PciAddress]) -> Any:
    match value:
        case str():
            return _word(value, known)
        case dict():
            return {_word(key, known): _json(item, known) for key, item in value.items()}
        case list():
            return [_json(item, known) for item in value]
        case _:
            return value


def serials(blocks: Sequence[BlockDevice]) -> Sequence[str]:
    """What the guest finds each by, as /dev/disk/by-id/virtio-SERIAL: the path without its first slash, others and odd characters
    as dashes (`/dev/xvda` is `dev-xvda`); where that is too long or not unique, its beginning and eight digits of a hash."""
    plain = [_NOT_IN_SERIALS.sub("-", block.container_path.lstrip("/")) for block in blocks]
    often = Counter(plain)
    return [
        serial
        if 0 < len(serial) <= _LONGEST_SERIAL and often[serial] == 1
        else _with_hash(serial, block.container_path)
        for serial, block in zip(plain, blocks, strict=True)
    ]


def _with_hash(serial: str, path: str) -> str:
    digits = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{serial[: _LONGEST_SERIAL - 9]}-{digits}"
