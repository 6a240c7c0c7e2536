"""Where the guest finds its host devices and block volumes. Pure.

The script that links block volumes to their paths runs at each boot, by cloud-init where the guest has it; the guest
agent runs it before anything else of the container. It asks the kernel for disks' serials, so it needs no udev, only a
POSIX shell, mkdir and ln.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from virtshim.devices.values import BlockDevice, GrantedDevices, Passthrough, PciAddress, PciFunction, UsbDevice
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped

# PCI addresses. Each PCI device has its own root port, made before all others. Firmware and kernel number buses in the
# order of the ports, so the k-th device is `0000:0k:00.0`, known before the VM exists. Variables with host addresses
# can therefore be translated to the guest's addresses.

# Eight root ports share a slot of the root bus. This many leave room for the other ports before the slots of the NICs.
GUEST_VIEW_MAX_PCI_DEVICES: Final = 48
GUEST_VIEW_MAX_USB_DEVICES: Final = 15
GUEST_VIEW_MAX_BLOCK_DEVICES: Final = 24

# Names of device plugins' variables with addresses (virtshim.devices.ports says which sources are trusted).
_OF_PLUGINS: Final = re.compile(r"(?:PCIDEVICE|PCI_RESOURCE)_.+|QAT[0-9]+", re.DOTALL)
_OF_USB: Final = re.compile(r"USB_RESOURCE_.+", re.DOTALL)
_NOT_IN_SERIALS: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_SERIAL: Final = 20


class _UnknownAddress(Exception):
    """A host PCI address that belongs to none of this guest's devices."""


def refuse_too_many_functions(granted: GrantedDevices) -> None:
    usb = sum(isinstance(device, UsbDevice) for device in granted.passthrough)
    for number, most, what in (
        (len(granted.passthrough) - usb, GUEST_VIEW_MAX_PCI_DEVICES, "PCI devices"),
        (usb, GUEST_VIEW_MAX_USB_DEVICES, "USB devices"),
        (len(granted.blocks), GUEST_VIEW_MAX_BLOCK_DEVICES, "block devices"),
    ):
        if number > most:
            raise InvalidRequest(
                f"config.devices: {number} {what} are more than the {most} that a virtual machine can have"
            )


def guest_buses(passthrough: Sequence[Passthrough]) -> Sequence[tuple[int, Passthrough]]:
    """Number from 1 of the guest's bus for each PCI device."""
    return list(enumerate((device for device in passthrough if not isinstance(device, UsbDevice)), start=1))


def guest_addresses(passthrough: Sequence[Passthrough]) -> Mapping[PciAddress, PciAddress]:
    """Host address -> guest address."""
    return {
        device.address: PciAddress(0, bus, 0, 0)
        for bus, device in guest_buses(passthrough)
        if isinstance(device, PciFunction)
    }


def guest_environment(envs: Sequence[tuple[str, bytes]], granted: GrantedDevices) -> tuple[tuple[str, bytes], ...]:
    """The guest's variables: in those of device plugins, host PCI addresses become guest addresses. A variable is left
    out if it has an address of another device, or the host's numbers of USB devices: both would mean something else in
    the guest."""
    known = guest_addresses(granted.passthrough)
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
    """A comma-separated list, or JSON by address, which the SR-IOV plugin adds."""
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
        return word  # not an address, such as the number of a subfunction
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


def guest_serials(blocks: Sequence[BlockDevice]) -> Sequence[str]:
    """The disks' serials, which the guest shows as /dev/disk/by-id/virtio-SERIAL: the path without its first slash,
    with a dash for each other slash and odd character (`/dev/xvda` is `dev-xvda`). If that is too long or not unique,
    it is its beginning and eight digits of a hash."""
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


# The script's exit code if a link cannot be made; standard error says which and why.
GUEST_LINKS_NOT_LINKED: Final = 83

_LONGEST_PATH: Final = 4095
# The guest's own directories.
_NEVER: Final = ("/dev", "/proc", "/sys", "/run")
_NEVER_BELOW: Final = ("/proc/", "/sys/")

# A function of the guest's shell: `find_disk SERIAL` sets `disk` to the device of the disk with that serial, "" without one.
FIND_DISK: Final = r"""
find_disk() {
  disk=
  for file in /sys/block/*/serial; do
    found=
    { read -r found <"$file"; } 2>/dev/null
    [ "$found" != "$1" ] || { disk=${file%/serial} disk=/dev/${disk##*/}; break; }
  done
}
"""

# Arguments: serial and path of each disk.
LINK: Final = rf"""{FIND_DISK}
code=0
while [ $# -ge 2 ]; do
  serial=$1 path=$2
  shift 2
  find_disk "$serial"
  if [ -z "$disk" ]; then
    echo "$path: the guest has no disk with the serial $serial (its kernel needs virtio_blk)" >&2
    code={GUEST_LINKS_NOT_LINKED}
  elif [ -e "$path" ] && [ ! -L "$path" ]; then
    [ "$path" -ef "$disk" ] || {{ echo "$path: the guest has something else there" >&2; code={GUEST_LINKS_NOT_LINKED}; }}
  elif ! why=$({{ mkdir -p "${{path%/*}}/" && ln -sfn "$disk" "$path"; }} 2>&1); then
    echo "$path: $why" >&2
    code={GUEST_LINKS_NOT_LINKED}
  fi
done
exit $code
"""


def guest_links_command(volumes: Sequence[BlockDevice]) -> tuple[str, ...]:
    """`volumes`: all block volumes, which the VM has as disks."""
    words = [
        word for volume, serial in zip(volumes, guest_serials(volumes), strict=True) for word in (serial, _path(volume))
    ]
    return ("/bin/sh", "-c", LINK, "virtshim-disks", *words)


def guest_links_udev_names(volumes: Sequence[BlockDevice]) -> dict[str, str]:
    """Path in the pod -> udev's name by serial, which a guest's /etc/fstab may use."""
    return {
        _path(one): f"/dev/disk/by-id/virtio-{serial}"
        for one, serial in zip(volumes, guest_serials(volumes), strict=True)
    }


def refuse_odd_guest_links(volumes: Iterable[BlockDevice]) -> None:
    """Raises InvalidRequest for paths that no guest can have."""
    seen = set()
    for volume in volumes:
        path, where = _path(volume), volume.field_name
        name = "mountPath" if volume.is_file else "devicePath"
        parts = volume.container_path.split("/")
        if not path.startswith("/") or ".." in parts or not path.isprintable() or len(path.encode()) > _LONGEST_PATH:
            raise InvalidRequest(
                f"{where}: must be an absolute path without '..' and control characters, of at most {_LONGEST_PATH} bytes; "
                f"correct {name}"
            )
        if path in _NEVER or path.startswith(_NEVER_BELOW):
            raise InvalidRequest(f"{where}: belongs to the guest itself; use another {name}, such as /dev/data")
        if path in seen:
            raise InvalidRequest(f"{where}: is requested twice; use another {name}")
        seen.add(path)


def normal_path(path: str) -> str:
    """The normalized path; two slashes at the beginning become one."""
    path = posixpath.normpath(path)
    return "/" + path.lstrip("/") if path.startswith("/") else path


def _path(volume: BlockDevice) -> str:
    return normal_path(volume.container_path)


def mount_paths(text: str, most: int) -> tuple[str, ...]:
    """An annotation's mount paths, one a line, in their normal form. Raises InvalidRequest."""
    paths = tuple(_mount_path(line.strip()) for line in text.splitlines() if line.strip())
    twice = next((path for path in paths if paths.count(path) > 1), "")
    if twice:
        raise InvalidRequest(f"{escaped(twice, 80)} is listed twice; remove one")
    if len(paths) > most:
        raise InvalidRequest(f"{len(paths)} volumes are too many; name {most} at most")
    return paths


def _mount_path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise InvalidRequest(
            f"{escaped(text, 80)!r} is not an absolute path without '..'; write a mountPath of the pod in each line"
        )
    return normal_path(text)
