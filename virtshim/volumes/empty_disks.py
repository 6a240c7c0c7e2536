"""Empty disks: the annotation that asks for them, and the script that mounts them in the guest. Pure.

cloud-init, where the guest has it, runs the script at each boot, and the guest agent runs it before anything else of
the container. The script makes a file system only if the disk's first MiB is all zeros. A disk that is mounted already
stays mounted.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from virtshim.devices.guest_view import FIND_DISK
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.model.text import escaped, parse_bytes
from virtshim.model.yaml_text import parse_mapping
from virtshim.volumes.mount_script import BUSY

ANNOTATION: Final = "virtshim.io/disks"
# The script's exit code if a disk cannot be mounted; standard error says which disk and why.
NOT_MOUNTED: Final = 85
# How many virtio disks fit beside the root disk and the seed.
MOST: Final = 6

_SECTOR: Final = 512
_LEAST: Final = 16 << 20
_LARGEST: Final = 2**46
# The length of a virtio serial.
LONGEST_NAME: Final = 20
_NAME: Final = re.compile(rf"[a-z0-9](?:[a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?")
_TAKEN: Final = ("root", "seed")
_KEYS: Final = {"size", "format", "mountPath"}
_LONGEST_PATH: Final = 4095
_NEVER: Final = ("/", "/dev", "/proc", "/sys", "/run")
_NEVER_BELOW: Final = ("/dev/", "/proc/", "/sys/")

# Arguments: serial and path of each disk.
MOUNT: Final = rf"""{FIND_DISK}
lock=/run/virtshim-empty-disks.lock tries=0
until (set -C && echo $$ >"$lock") 2>/dev/null; do
  tries=$((tries + 1)) owner=
  [ "$tries" -lt 30 ] || exit {BUSY}
  {{ read -r owner <"$lock"; }} 2>/dev/null
  # One that was killed leaves it; one that has just begun has not written into it yet.
  [ "$tries" -lt 3 ] || kill -0 "${{owner:-none}}" 2>/dev/null || rm -f "$lock"
  sleep 1
done
trap 'rm -f "$lock"' EXIT
code=0
fail() {{ echo "$1: $2" >&2; code={NOT_MOUNTED}; }}
while [ $# -ge 2 ]; do
  serial=$1 path=$2
  shift 2
  find_disk "$serial"
  if [ -z "$disk" ]; then
    fail "$path" "the guest has no disk with the serial $serial"
    continue
  fi
  ! grep -q "^$disk " /proc/mounts || continue
  if [ "$(head -c 1048576 "$disk" | tr -d '\000' | head -c 1 | wc -c)" -eq 0 ]; then
    make=mkfs.ext4
    command -v mkfs.ext4 >/dev/null || make=mke2fs
    why=$($make "$disk" 2>&1 >/dev/null) || {{ fail "$path" "$make: $why"; continue; }}
  fi
  # A disk of ext2 is ext4's to mount, too.
  why=$({{ mkdir -p "$path" && {{ mount -t ext4 "$disk" "$path" 2>/dev/null || mount "$disk" "$path"; }}; }} 2>&1) ||
    fail "$path" "$why"
done
exit $code
"""


@dataclass(frozen=True, slots=True)
class EmptyDisk:
    """`guest`: where its file system is mounted, "" if it has none."""

    # The disk's serial, too.
    name: str
    size_bytes: int
    format: DiskFormat
    guest: str = ""
    # Whether a volume of the pod asks for it, rather than the annotation.
    is_volume: bool = False

    def field_name(self, part: str = "") -> str:
        """The name of the field that asks for the disk, or for a part of it."""
        return f"config.mounts[{escaped(self.guest, 200)}]" if self.is_volume else f"{ANNOTATION}: {self.name}{part}"


def parse(text: str) -> tuple[EmptyDisk, ...]:
    """Reads a mapping of name -> size, format, mountPath. Raises InvalidRequest."""
    return together([_disk(name, value) for name, value in parse_mapping(text).items()])


def together(disks: Sequence[EmptyDisk]) -> tuple[EmptyDisk, ...]:
    """The disks in the order in which they are mounted. Raises InvalidRequest for disks that no VM can have."""
    if len(disks) > MOST:
        raise InvalidRequest(f"{len(disks)} disks are too many; ask for {MOST} at most")
    for what, values in (
        ("mountPath", [disk.guest for disk in disks if disk.guest]),
        ("disk", [d.name for d in disks]),
    ):
        twice = next((value for value in values if values.count(value) > 1), "")
        if twice:
            raise InvalidRequest(f"{what} {twice[:80]!r} is requested twice; use another one")
    return tuple(sorted(disks, key=lambda disk: disk.guest.count("/")))


def command(disks: Sequence[EmptyDisk]) -> tuple[str, ...]:
    """The command that mounts the disks, () if none is to be mounted."""
    words = [word for disk in disks if disk.guest for word in (disk.name, disk.guest)]
    return ("/bin/sh", "-c", MOUNT, "virtshim-empty-disks", *words) if words else ()


def refuse_clashes(disks: Sequence[EmptyDisk], places: Sequence[str], serials: Sequence[str]) -> None:
    """Raises InvalidRequest if a volume of the pod would hide a disk, because it is mounted at the disk's path or
    above, or if a block volume has a disk's name. `places`: the volumes' paths. `serials`: the block volumes' names."""
    for disk in disks:
        if disk.name in serials:
            raise InvalidRequest(
                f"{disk.field_name()}: a block volume of the pod is called {disk.name} in the guest; use another name"
            )
        for place in places if disk.guest else ():
            if f"{disk.guest}/".startswith(f"{place}/"):
                raise InvalidRequest(
                    f"{disk.field_name('.mountPath')}: {disk.guest[:80]} is in the volume at {place[:80]}; use another path"
                )


def is_name(text: str) -> bool:
    return text not in _TAKEN and _NAME.fullmatch(text) is not None


def _disk(name: str, value: Any) -> EmptyDisk:
    if not is_name(name):
        raise InvalidRequest(
            f"{name[:40]!r} cannot be a disk's name; write up to 20 lower-case letters, digits and dashes, but not root or seed"
        )
    if not isinstance(value, dict) or "size" not in value or not set(value) <= _KEYS:
        raise InvalidRequest(f"{name} needs size, and may have format and mountPath; write {name}: {{size: 10Gi}}")
    return EmptyDisk(name, _size(name, value["size"]), _format(name, value.get("format", "qcow2")), _path(name, value))


def _size(name: str, value: Any) -> int:
    try:
        size = parse_bytes(str(value), _LARGEST)
    except InvalidRequest as exc:
        raise InvalidRequest(f"{name}.size: {exc}") from None
    return whole_size(f"{name}.size", size)


def whole_size(where: str, size: int) -> int:
    """The size in whole sectors. Raises InvalidRequest, starting with `where`, for a size that no disk can have."""
    if size < _LEAST:
        raise InvalidRequest(f"{where}: {size} bytes are too few; write 16Mi or more")
    if size > _LARGEST:
        raise InvalidRequest(f"{where}: {size} bytes are too many; write at most {_LARGEST}")
    return -(-size // _SECTOR) * _SECTOR


def _format(name: str, value: Any) -> DiskFormat:
    if value not in ("qcow2", "raw"):
        raise InvalidRequest(
            f"{name}.format: {str(value)[:40]!r} is neither qcow2 nor raw; write one of them, or remove it"
        )
    return DiskFormat(value)


def _path(name: str, value: dict[str, Any]) -> str:
    path = value.get("mountPath", "")
    return "" if path == "" else mount_path(f"{name}.mountPath", path)


def mount_path(where: str, path: Any) -> str:
    """The path in normal form. Raises InvalidRequest, starting with `where`, if no disk can be mounted there."""
    if not isinstance(path, str) or not path.startswith("/") or ".." in path.split("/") or not path.isprintable():
        raise InvalidRequest(f"{where}: must be an absolute path without '..' and control characters")
    normal = "/" + posixpath.normpath(path).lstrip("/")
    if normal in _NEVER or normal.startswith(_NEVER_BELOW) or len(normal.encode()) > _LONGEST_PATH:
        raise InvalidRequest(f"{where}: {normal[:80]!r} cannot be a mount of a disk; use a path such as /data")
    return normal
