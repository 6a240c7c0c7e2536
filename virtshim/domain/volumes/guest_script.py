"""The script that puts the volumes in their places in the guest. Pure.

It is run by cloud-init at each boot of a guest that has it, and by way of the guest agent before anything is run for the
container; what is in its place already stays. It needs a POSIX shell, mount, mkdir and grep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from virtshim.domain.volumes.shares import TAG, SharedVolume

# What it ends with, other than 0; why is told on standard error.
NO_MODULE: Final = 81
NOT_MOUNTED: Final = 82

# Arguments: number of the volume on the device, its path, `ro` or `rw`; of each volume.
MOUNT: Final = rf"""
base=/run/{TAG}-volumes
read -r boot </proc/sys/kernel/random/boot_id
state=/run/{TAG}-volumes.$boot
mkdir -p "$base" "$state" && chmod 0700 "$state" || exit {NOT_MOUNTED}
tries=0
until (set -C && echo $$ >"$state/lock") 2>/dev/null; do
  tries=$((tries + 1)) owner=
  [ "$tries" -lt 60 ] || {{ echo "another run of this script does not end" >&2; exit {NOT_MOUNTED}; }}
  {{ read -r owner <"$state/lock"; }} 2>/dev/null
  # One that was killed leaves it; one that has just begun has not written into it yet.
  [ "$tries" -lt 3 ] || kill -0 "${{owner:-none}}" 2>/dev/null || rm -f "$state/lock"
  sleep 1
done
trap 'rm -f "$state/lock"' EXIT
if ! grep -q " $base virtiofs " /proc/mounts; then
  grep -qw virtiofs /proc/filesystems || modprobe virtiofs 2>/dev/null
  if ! why=$(mount -t virtiofs {TAG} "$base" 2>&1); then
    grep -qw virtiofs /proc/filesystems && {{ echo "$why" >&2; exit {NOT_MOUNTED}; }}
    echo "its kernel has no virtiofs (module virtiofs, Linux 5.4)" >&2
    exit {NO_MODULE}
  fi
fi
while [ $# -ge 3 ]; do
  number=$1 path=$2 mode=$3
  shift 3
  [ ! -e "$state/$number" ] || continue
  if [ -d "$base/$number" ]; then
    mkdir -p "$path"
  else
    [ -e "$path" ] || {{ mkdir -p "${{path%/*}}/" && : >"$path"; }}
  fi
  if ! why=$(mount -o bind "$base/$number" "$path" 2>&1); then
    echo "$path: $why" >&2
    exit {NOT_MOUNTED}
  fi
  [ "$mode" = rw ] || mount -o remount,bind,ro "$path" 2>/dev/null
  : >"$state/$number"
done
"""


def command(volumes: Sequence[SharedVolume]) -> tuple[str, ...]:
    """`volumes` as they are numbered on the device."""
    words = [
        word
        for number, volume in enumerate(volumes)
        for word in (str(number), volume.guest, "ro" if volume.readonly else "rw")
    ]
    return ("/bin/sh", "-c", MOUNT, f"{TAG}-volumes", *words)
