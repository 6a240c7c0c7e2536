"""Virtlet's flexVolumes: what their driver leaves on the node for a pod's volume, and the empty disk that it asks for. Pure.

kubelet gives the driver the pod's options, and the driver writes them into the volume's directory. The data of such a volume were
never on the node: Virtlet made an empty disk of a qcow2 one, as is done here.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from typing import Any, Final

from virtshim.devices.guest_view import GUEST_VIEW_MAX_BLOCK_DEVICES
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.model.text import escaped
from virtshim.volumes.empty_disks import LONGEST_NAME, EmptyDisk, is_name, mount_path, whole_size

# Volumes that hold a disk's image, as KubeVirt's and CDI's with a file system do: which of a pod's its VM has as
# disks. Pure.
#
# The pod says it, by the paths of its mounts: a directory that happens to hold a file of that name is shared as any
# other.

DISK_IMAGES_ANNOTATION: Final = "virtshim.io/disk-images"
DISK_IMAGES_FILE: Final = "disk.img"


def disk_images_parse(text: str) -> tuple[str, ...]:
    """Of one mount path a line, in their normal form. Raises InvalidRequest."""
    paths = tuple(_path(line.strip()) for line in text.splitlines() if line.strip())
    twice = next((path for path in paths if paths.count(path) > 1), "")
    if twice:
        raise InvalidRequest(f"{escaped(twice, 80)} is there twice; remove one")
    if len(paths) > GUEST_VIEW_MAX_BLOCK_DEVICES:
        raise InvalidRequest(f"{len(paths)} volumes are too many; name {GUEST_VIEW_MAX_BLOCK_DEVICES} at most")
    return paths


def _path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise InvalidRequest(
            f"{escaped(text, 80)!r} is no absolute path without '..'; write a mountPath of the pod in each line"
        )
    path = "/" + posixpath.normpath(text).lstrip("/")
    if path == "/":
        raise InvalidRequest(
            "/ cannot be a disk's image; to boot from a volume use a PVC with volumeMode Block, and devicePath / in volumeDevices"
        )
    return path


# Virtlet's driver's name, as kubelet writes it in paths.
DRIVER: Final = "virtlet~flexvolume_driver"
FILE: Final = "virtlet-flexvolume.json"
MAX_BYTES: Final = 64 << 10

# Of "capacity": a number and one of libvirt's units; without a unit, and without a capacity, it is Virtlet's choice.
_CAPACITY: Final = re.compile(r"\s*([0-9]{1,18})\s*(\S*)\s*", re.ASCII)
_UNIT: Final = "MB"
_DEFAULT: Final = "1024MB"
_BYTES: Final = {"B": 1, "bytes": 1}
_POWERS: Final = {letter: power for power, letter in enumerate("KMGTPE", start=1)}
_DIGITS: Final = 8

_BLOCK_PV: Final = "use a PVC with volumeMode Block (a local PV has any device of the node) in volumeDevices"


def flex_volumes_parse(text: bytes, volume: str, guest: str) -> EmptyDisk:
    """`text`: of its FILE. `volume`: the pod's name for it; `guest`: where the pod mounts it. Raises InvalidRequest."""
    where = f"config.mounts[{escaped(guest, 200)}]"
    options = _options(text, where)
    kind = options.get("type")
    if kind == "ceph":
        raise InvalidRequest(
            f"{where}: a flexVolume of type ceph cannot be had; use a PVC of ceph-csi with volumeMode Block in volumeDevices"
        )
    if kind not in ("qcow2", "raw"):
        raise InvalidRequest(
            f"{where}: the flexVolume's type {str(kind)[:40]!r} is neither qcow2 nor raw; write one of them"
        )
    if kind == "raw" and "path" in options:
        raise InvalidRequest(
            f"{where}: a flexVolume of type raw with path, a device that the pod names itself, cannot be had; {_BLOCK_PV}"
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
            f"{where}: {FILE}, which the flexVolume driver writes, is no JSON object; install the driver anew"
        )
    return options


def _size(capacity: Any, where: str) -> int:
    match = _CAPACITY.fullmatch(capacity) if isinstance(capacity, str) else None
    unit = _unit(match[2] or _UNIT) if match else 0
    if match is None or not unit:
        raise InvalidRequest(
            f"{where}: the flexVolume's capacity {str(capacity)[:40]!r} is no number with a unit; write one like 1024MB or 10GiB"
        )
    return int(match[1]) * unit


def _unit(name: str) -> int:
    """As libvirt has them: KB is 1000, K and KiB are 1024. 0 for no unit."""
    if name in _BYTES:
        return _BYTES[name]
    power = _POWERS.get(name[:1], 0)
    if not power:
        return 0
    base = {"": 1024, "iB": 1024, "B": 1000}.get(name[1:], 0)
    return int(base**power)


def _serial(volume: str) -> str:
    """The volume's name; where that cannot be a disk's, its beginning and eight digits of a hash."""
    if is_name(volume):
        return volume
    digits = hashlib.sha256(volume.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]
    plain = re.sub(r"[^a-z0-9-]", "-", volume.lower())[: LONGEST_NAME - _DIGITS - 1].strip("-")
    return f"{plain}-{digits}" if plain else digits
