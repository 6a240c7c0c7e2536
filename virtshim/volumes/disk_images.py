"""Volumes that are disks in the guest. Pure.

A volume may hold a disk image (`disk.img`). A flexVolume of Virtlet becomes an empty disk: kubelet passes the pod's
options to the flexVolume driver, and the driver writes them into the volume's directory. The data of such a volume were
never on the node: Virtlet made an empty disk for a qcow2 volume, and virtshim does the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Final

from virtshim.devices.guest_view import GUEST_VIEW_MAX_BLOCK_DEVICES, mount_paths
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.model.text import escaped
from virtshim.volumes.empty_disks import LONGEST_NAME, EmptyDisk, is_name, mount_path, whole_size

# Volumes with a disk image, as KubeVirt and CDI write them to volumes with a file system. The pod names their mount
# paths, because a directory that merely happens to hold a file of that name is shared like any other.

DISK_IMAGES_ANNOTATION: Final = "virtshim.io/disk-images"
DISK_IMAGES_FILE: Final = "disk.img"


def disk_images_parse(text: str) -> tuple[str, ...]:
    """The mount paths, one a line, in their normal form. Raises InvalidRequest."""
    paths = mount_paths(text, GUEST_VIEW_MAX_BLOCK_DEVICES)
    if "/" in paths:
        raise InvalidRequest(
            "/ cannot be a disk image; to boot from a volume use a PVC with volumeMode Block, and devicePath / in volumeDevices"
        )
    return paths


# The name of Virtlet's driver, as kubelet writes it in paths.
DRIVER: Final = "virtlet~flexvolume_driver"
FILE: Final = "virtlet-flexvolume.json"
MAX_BYTES: Final = 64 << 10

# The option "capacity": a number and one of libvirt's units. The defaults for unit and capacity are Virtlet's.
_CAPACITY: Final = re.compile(r"\s*([0-9]{1,18})\s*(\S*)\s*", re.ASCII)
_UNIT: Final = "MB"
_DEFAULT: Final = "1024MB"
_BYTES: Final = {"B": 1, "bytes": 1}
_POWERS: Final = {letter: power for power, letter in enumerate("KMGTPE", start=1)}
_DIGITS: Final = 8

_BLOCK_PV: Final = "use a PVC with volumeMode Block (a local PV has any device of the node) in volumeDevices"


def flex_volumes_parse(text: bytes, volume: str, guest: str) -> EmptyDisk:
    """`text`: the content of FILE. `volume`: its name in the pod. `guest`: its mount path in the pod. Raises
    InvalidRequest."""
    where = f"config.mounts[{escaped(guest, 200)}]"
    options = _options(text, where)
    kind = options.get("type")
    if kind == "ceph":
        raise InvalidRequest(
            f"{where}: a flexVolume of type ceph is not supported; use a PVC of ceph-csi with volumeMode Block in volumeDevices"
        )
    if kind not in ("qcow2", "raw"):
        raise InvalidRequest(
            f"{where}: the flexVolume's type {str(kind)[:40]!r} is neither qcow2 nor raw; write one of them"
        )
    if kind == "raw" and "path" in options:
        raise InvalidRequest(
            f"{where}: a flexVolume of type raw with path, a device that the pod names itself, is not supported; {_BLOCK_PV}"
        )
    if kind == "raw" and "capacity" not in options:
        raise InvalidRequest(
            f"{where}: a flexVolume of type raw needs capacity, such as 10GiB; for a device of the node {_BLOCK_PV}"
        )
    size = whole_size(f"{where}: the flexVolume's capacity", _size(options.get("capacity", _DEFAULT), where))
    place = mount_path(f"{where}.container_path", guest)
    return EmptyDisk(_serial(volume), size, DiskFormat(kind), place, is_volume=True)


def _options(text: bytes, where: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InvalidRequest(
            f"{where}: {FILE}, which the flexVolume driver writes, is not a JSON object; install the driver again"
        )
    return options


def _size(capacity: Any, where: str) -> int:
    match = _CAPACITY.fullmatch(capacity) if isinstance(capacity, str) else None
    unit = _unit(match[2] or _UNIT) if match else 0
    if match is None or not unit:
        raise InvalidRequest(
            f"{where}: the flexVolume's capacity {str(capacity)[:40]!r} is not a number with a unit; write 1024MB or 10GiB"
        )
    return int(match[1]) * unit


def _unit(name: str) -> int:
    """The units of libvirt: KB is 1000, K and KiB are 1024. 0 for an unknown unit."""
    if name in _BYTES:
        return _BYTES[name]
    power = _POWERS.get(name[:1], 0)
    if not power:
        return 0
    base = {"": 1024, "iB": 1024, "B": 1000}.get(name[1:], 0)
    return int(base**power)


def _serial(volume: str) -> str:
    """The volume's name, or its beginning and eight digits of a hash if the name cannot be a disk's serial."""
    if is_name(volume):
        return volume
    digits = hashlib.sha256(volume.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]
    plain = re.sub(r"[^a-z0-9-]", "-", volume.lower())[: LONGEST_NAME - _DIGITS - 1].strip("-")
    return f"{plain}-{digits}" if plain else digits
