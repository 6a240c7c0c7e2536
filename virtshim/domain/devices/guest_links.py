"""Where a pod expects its block volumes in the guest: links to the disks, which are known by their serials. Pure.

The script is run by cloud-init at each boot of a guest that has it, and by way of the guest agent before anything is run for the
container. It asks the kernel, and so needs no udev: a POSIX shell, mkdir and ln.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from typing import Final

from virtshim.domain.devices.granted import BlockDevice
from virtshim.domain.devices.guest_view import serials
from virtshim.domain.errors import InvalidRequest

# What the script ends with if a link cannot be made; which, and why, is told on standard error.
NOT_LINKED: Final = 83

_LONGEST_PATH: Final = 4095
# Of the guest's own.
_NEVER: Final = ("/dev", "/proc", "/sys", "/run")
_NEVER_BELOW: Final = ("/proc/", "/sys/")

# Arguments: a disk's serial, the path; of each.
LINK: Final = rf"""
code=0
while [ $# -ge 2 ]; do
  serial=$1 path=$2 disk=
  shift 2
  for file in /sys/block/*/serial; do
    found=
    {{ read -r found <"$file"; }} 2>/dev/null
    [ "$found" != "$serial" ] || {{ disk=${{file%/serial}} disk=/dev/${{disk##*/}}; break; }}
  done
  if [ -z "$disk" ]; then
    echo "$path: the guest has no disk with the serial $serial (its kernel needs virtio_blk)" >&2
    code={NOT_LINKED}
  elif [ -e "$path" ] && [ ! -L "$path" ]; then
    [ "$path" -ef "$disk" ] || {{ echo "$path: the guest has something else there" >&2; code={NOT_LINKED}; }}
  elif ! why=$({{ mkdir -p "${{path%/*}}/" && ln -sfn "$disk" "$path"; }} 2>&1); then
    echo "$path: $why" >&2
    code={NOT_LINKED}
  fi
done
exit $code
"""


def command(volumes: Sequence[BlockDevice]) -> tuple[str, ...]:
    """`volumes`: all that the VM has as disks beside its own."""
    words = [word for volume, serial in zip(volumes, serials(volumes), strict=True) for word in (serial, _path(volume))]
    return ("/bin/sh", "-c", LINK, "virtshim-disks", *words)


def udev_names(volumes: Sequence[BlockDevice]) -> dict[str, str]:
    """Their paths -> what udev calls them by their serials, which a guest's /etc/fstab may name."""
    return {
        _path(one): f"/dev/disk/by-id/virtio-{serial}" for one, serial in zip(volumes, serials(volumes), strict=True)
    }


def refuse_odd(volumes: Iterable[BlockDevice]) -> None:
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
            raise InvalidRequest(f"{where}: is the guest's own; use another {name}, such as /dev/data")
        if path in seen:
            raise InvalidRequest(f"{where}: is asked for twice; use another {name}")
        seen.add(path)


def normal(path: str) -> str:
    """Two slashes at the beginning mean one here."""
    path = posixpath.normpath(path)
    return "/" + path.lstrip("/") if path.startswith("/") else path


def _path(volume: BlockDevice) -> str:
    return normal(volume.container_path)
