"""The script that mounts volumes in the guest and unpacks copied volumes there. Pure.

cloud-init, where the guest has it, runs the script at each boot. The guest agent runs it before anything else of the
container, and whenever kubelet has changed a volume. What is mounted already stays mounted. The script needs a POSIX
shell, mount, mkdir, rm and grep; for copies also tar, readlink, ln and mv (with -T, or python3 or perl).

Copies are in memory that is never swapped out, in a directory that only root can enter: `c0` is the first of the
container's copied volumes, and `c0.digest` identifies its content.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Final

from virtshim.volumes.copies import CopiedVolume, copy_name
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.shares import TAG, SharedVolume

# Exit codes other than 0; standard error has the reason.
NO_MODULE: Final = 81
NOT_MOUNTED: Final = 82
# A volume has no copy yet, so neither the volume nor anything below it is mounted.
NO_COPY: Final = 83
# Another run is under way. With many volumes it may take a while.
BUSY: Final = 84

# In the seed: a tar archive of the copies at the time when the container was created.
SEED_FILE: Final = "volumes.tar"


class Copies(enum.Enum):
    """Where the script gets the copies from."""

    # From an earlier run; the script reports a missing copy.
    AS_THEY_ARE = ""
    # From the seed's disk, unless a newer copy exists.
    SEED = "seed"
    # From a tar archive on standard input, which replaces earlier copies.
    INPUT = "input"


# Functions. The guest's copy of a volume is swapped like kubelet's: first the new directory, then `..data`, then the
# names. On a busy node each program costs a guest some hundredths of a second, and an update waits for all of them. The
# shell alone therefore compares links that kubelet made.
_COPIES: Final = rf"""
copies=/run/{TAG}-copies
fail() {{
  echo "$1" >&2
  exit {NOT_MOUNTED}
}}
swap() {{
  mv -T -f "$1" "$2" 2>/dev/null ||
    python3 -c 'import os, sys; os.rename(*sys.argv[1:])' "$1" "$2" 2>/dev/null ||
    perl -e 'rename $ARGV[0], $ARGV[1] or exit 1' "$1" "$2" 2>/dev/null ||
    fail "nothing in the guest can swap a link: mv -T, python3 or perl"
}}
is_there() {{ [ -L "$1" ] || [ -e "$1" ]; }}
renew() {{
  data=$(readlink "$1/..data") fresh=$data
  while is_there "$2/$fresh"; do fresh=$fresh.$3; done
  ! is_there "$2/..data_tmp" || rm -f "$2/..data_tmp"
  mv "$1/$data" "$2/$fresh" && ln -s "$fresh" "$2/..data_tmp" || return 1
  swap "$2/..data_tmp" "$2/..data"
  for old in "$2"/* "$2"/.[!.]* "$2"/..?*; do
    case ${{old##*/}} in ..data | "$fresh") continue ;; esac
    is_there "$1/${{old##*/}}" || rm -rf "$old"
  done
  ln -s "$2/$fresh" "$1/$data"
  for new in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    case ${{new##*/}} in ..data | "$data") continue ;; esac
    is_there "$new" || continue
    old=$2/${{new##*/}} file=$2/..data/${{new##*/}}
    if [ -L "$new" ] && [ -L "$old" ] && [ "$new" -ef "$file" ] && [ "$old" -ef "$file" ]; then continue; fi
    [ ! -L "$new" ] || [ ! -L "$old" ] || [ "$(readlink "$new")" != "$(readlink "$old")" ] || continue
    ! is_there "$old" || rm -rf "$old"
    mv "$new" "$old"
  done
  set -- "$2" $(stat -c '%u:%g %a' "$1" "$2" 2>/dev/null)
  [ "$2 $3" = "$4 $5" ] || {{ chown "$2" "$1" && chmod "$3" "$1"; }} 2>/dev/null
  return 0
}}
# "seed", or nothing: what is there gives way.
take() {{
  for told in "$copies"/.new/c*.digest; do
    [ -f "$told" ] || continue
    name=${{told##*/}}
    name=${{name%.digest}}
    read -r digest <"$told"
    [ -z "$1" ] || [ ! -e "$copies/$name.digest" ] || continue
    if ! is_there "$copies/$name"; then
      mv "$copies/.new/$name" "$copies/$name" || fail "a copied volume cannot be put in its place"
    elif [ -L "$copies/.new/$name/..data" ] && [ -d "$copies/$name" ]; then
      renew "$copies/.new/$name" "$copies/$name" "$digest" || fail "a copied volume cannot be renewed"
    elif [ -f "$copies/.new/$name" ] && [ -f "$copies/$name" ]; then
      cat "$copies/.new/$name" >"$copies/$name" || fail "a copied file cannot be renewed"
    fi
    mv -f "$told" "$copies/$name.digest"
  done
}}
unpack() {{
  umask 077
  ! is_there "$copies/.new" || rm -rf "$copies/.new"
  mkdir "$copies/.new" && why=$(tar -xpf - -C "$copies/.new" 2>&1) || fail "the copied volumes cannot be unpacked: $why"
  umask 022
}}
seed_device() {{
  for device in /dev/disk/by-label/cidata /dev/disk/by-label/config-2 /dev/disk/by-id/virtio-seed; do
    [ ! -e "$device" ] || {{ echo "$device" && return; }}
  done
  for label in cidata config-2; do
    findfs LABEL=$label 2>/dev/null || blkid -L $label 2>/dev/null || continue
    return
  done
}}
if [ -n "$copied" ]; then
  if [ ! -e "$state/copies" ] && ! grep -q " $copies " /proc/mounts; then
    mkdir -p "$copies"
    mount -t tmpfs -o noswap,mode=0700,nosuid,nodev,size=64m {TAG}-copies "$copies" 2>/dev/null ||
      mount -t ramfs -o mode=0700,nosuid,nodev {TAG}-copies "$copies" || fail "there is no memory to copy volumes to"
  fi
  : >"$state/copies"
  case $copied in
    seed)
      mkdir -p "$copies/.seed"
      why=$(mount -t iso9660 -o ro "$(seed_device)" "$copies/.seed" 2>&1) || fail "the seed cannot be read: $why"
      unpack <"$copies/.seed/{SEED_FILE}"
      take seed
      ;;
    input)
      unpack
      take ""
      ;;
  esac
fi
"""

_WRITTEN: Final = "written"
# Arguments: the source of copies ("seed", "input", "there"; "" if nothing is copied) and 1 if something is shared. Then
# for each volume: its name; its path; its mode (`ro`, `rw`, a mark that the file's content is written, or the options
# of a tmpfs); and the name of the volume that contains its path, or "-". If a volume cannot be mounted, only volumes
# inside it are skipped. A failed run lists on standard output which volumes are mounted.
MOUNT: Final = (
    rf"""
copied=$1 shared=$2
shift 2
base=/run/{TAG}-volumes
read -r boot </proc/sys/kernel/random/boot_id
state=/run/{TAG}-volumes.$boot
[ -d "$base" ] && [ -d "$state" ] || {{ mkdir -p "$base" && mkdir -p -m 0700 "$state"; }} || exit {NOT_MOUNTED}
tries=0
until (set -C && echo $$ >"$state/lock") 2>/dev/null; do
  tries=$((tries + 1)) owner=
  [ "$tries" -lt 60 ] || {{ echo "another run of this script has not ended" >&2; exit {BUSY}; }}
  {{ read -r owner <"$state/lock"; }} 2>/dev/null
  # One that was killed leaves it; one that has just begun has not written into it yet.
  [ "$tries" -lt 3 ] || kill -0 "${{owner:-none}}" 2>/dev/null || rm -f "$state/lock"
  sleep 1
done
trap '[ $? = 0 ] || for there in "$state"/[0-9]* "$state"/m[0-9]*; do
  [ ! -e "$there" ] || echo "${{there##*/}} mounted"
done
[ "$copied" != seed ] || umount /run/{TAG}-copies/.seed 2>/dev/null
rm -rf /run/{TAG}-copies/.new "$state/lock"' EXIT
"""
    + _COPIES
    + rf"""
if [ -n "$shared" ] && ! grep -q " $base virtiofs " /proc/mounts; then
  grep -qw virtiofs /proc/filesystems || modprobe virtiofs 2>/dev/null
  if ! why=$(mount -t virtiofs {TAG} "$base" 2>&1); then
    grep -qw virtiofs /proc/filesystems && {{ echo "$why" >&2; exit {NOT_MOUNTED}; }}
    echo "its kernel has no virtiofs (module virtiofs, Linux 5.4)" >&2
    exit {NO_MODULE}
  fi
fi
code=0 unwritten=
while [ $# -ge 4 ]; do
  name=$1 path=$2 mode=$3 around=$4
  shift 4
  [ ! -e "$state/$name" ] || continue
  [ "$around" = - ] || [ -e "$state/$around" ] || continue
  case $name in
    m*)
      if ! why=$({{ mkdir -p "$path" && mount -t tmpfs -o "$mode" {TAG}-memory "$path"; }} 2>&1); then
        echo "$path: $why" >&2
        code={NOT_MOUNTED}
        continue
      fi
      : >"$state/$name"
      continue
      ;;
    c*) from=$copies/$name ;;
    *) from=$base/$name ;;
  esac
  if [ "$mode" = {_WRITTEN} ]; then
    [ -e "$from.digest" ] || continue
    {{ [ "$(cat "$from")" = "$(cat "$path")" ] || cat "$from" >"$path"; }} 2>/dev/null || unwritten="$unwritten $name"
    continue
  fi
  if [ "$from" = "$copies/$name" ] && [ ! -e "$from.digest" ]; then
    echo "$path: there is no copy yet" >&2
    [ "$code" != 0 ] || code={NO_COPY}
    continue
  fi
  if [ -d "$from" ]; then
    mkdir -p "$path"
  else
    [ -e "$path" ] || {{ mkdir -p "${{path%/*}}/" && : >"$path"; }}
  fi
  if ! why=$(mount -o bind "$from" "$path" 2>&1); then
    echo "$path: $why" >&2
    code={NOT_MOUNTED}
    continue
  fi
  [ "$mode" = rw ] || mount -o remount,bind,ro "$path" 2>/dev/null
  : >"$state/$name"
done
case $copied in
  there | input)
    for told in "$copies"/c*.digest; do
      [ ! -f "$told" ] || {{ read -r digest <"$told" && echo "${{told##*/}} $digest"; }}
    done
    for name in $unwritten; do echo "$name unwritten"; done
    ;;
esac
exit $code
"""
)

_MOUNTED: Final = re.compile(rb"(m?[0-9]{1,4}) mounted")
_MISSING: Final = re.compile(rb"(c[0-9]{1,4}) unwritten")
_TOLD: Final = re.compile(rb"(c[0-9]{1,4})\.digest ([0-9a-f]{64})")


def command(
    volumes: Sequence[SharedVolume],
    copies: Sequence[CopiedVolume] = (),
    source: Copies = Copies.AS_THEY_ARE,
    memory: Sequence[MemoryVolume] = (),
) -> tuple[str, ...]:
    """`volumes`: numbered as on the device. A volume below another one is mounted after it."""
    here = [volume for volume in copies if not (volume.written and source is Copies.SEED)]
    places = [(str(number), volume.guest, _mode(volume.readonly)) for number, volume in enumerate(volumes)]
    places += [
        (copy_name(number), volume.guest, _WRITTEN if volume.written else _mode(volume.readonly))
        for number, volume in enumerate(copies)
        if volume in here
    ]
    places += [(f"m{number}", volume.guest, volume.options) for number, volume in enumerate(memory)]
    places.sort(key=lambda place: place[1].count("/"))
    words = [word for place in places for word in (*place, _around(place[1], places))]
    copied = (source.value or "there") if here else ""
    return ("/bin/sh", "-c", MOUNT, f"{TAG}-volumes", copied, "1" if volumes else "", *words)


def _around(path: str, places: Sequence[tuple[str, str, str]]) -> str:
    """The name of the innermost volume that contains this path."""
    above = [(len(other), name) for name, other, mode in places if mode != _WRITTEN and path.startswith(f"{other}/")]
    return max(above)[1] if above else "-"


def not_mounted(
    volumes: Sequence[SharedVolume], memory: Sequence[MemoryVolume], code: int, output: bytes
) -> Sequence[SharedVolume | MemoryVolume] | None:
    """The volumes, copies aside, that a run of the script could not mount. None if `code` and `output` do not say."""
    if code == 0:
        return []
    if code not in (NO_MODULE, NOT_MOUNTED, NO_COPY):
        return None
    mounted = {match[1] for line in output[-1 << 16 :].splitlines() if (match := _MOUNTED.fullmatch(line))}
    shared = [volume for number, volume in enumerate(volumes) if b"%d" % number not in mounted]
    return [*shared, *(volume for number, volume in enumerate(memory) if b"m%d" % number not in mounted)]


def _mode(readonly: bool) -> str:
    return "ro" if readonly else "rw"


def had(output: bytes) -> frozenset[str]:
    """The names of the copies that the guest has at their paths."""
    missing = {match[1].decode() for line in output[-1 << 16 :].splitlines() if (match := _MISSING.fullmatch(line))}
    return frozenset(digests(output)) - missing


def digests(output: bytes) -> Mapping[str, str]:
    """Name -> digest of the copies that the script listed at its end."""
    found = (_TOLD.fullmatch(line) for line in output[-1 << 16 :].splitlines())
    return {match[1].decode(): match[2].decode() for match in found if match}
