"""Scripts that give a copy of a template an identity of its own. The guest agent runs them before anything of the pod. Pure.

All copies remember the same random numbers, so the first thing is a new seed for the kernel's generator, and the time. Then the
guest forgets who it was, finds its own NICs and disks, and reads its seed as at a first boot.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Final

from virtshim.guest.set_up_scripts import addresses_command
from virtshim.model.network import Interface

# Bytes for the kernel's generator of random numbers.
_SEED_BYTES: Final = 64

# The scripts' exit codes; standard error says which and why.
NO_NEW_RANDOM: Final = 91
NO_INSTANCE: Final = 92
NO_DEVICES: Final = 93
NO_IDENTITY: Final = 94

# An image without cloud-init can have this program. It is called without arguments when the guest has all its devices, and
# does what the image does with its seed at a first boot.
HOOK: Final = "/etc/virtshim/new-instance"

# reseed.S, assembled.
RESEED: Final = (
    "f0VMRgIBAQAAAAAAAAAAAAIAPgABAAAAeAABAAAAAABAAAAAAAAAAAAAAAAAAAAAAAAAAEAAOAABAAAAAAAAAAEAAAAHAAAAAAAAAAAAAAAAAAEAAAAAAAAA"
    "AQAAAAAAKAEAAAAAAACoAQAAAAAAAAAQAAAAAAAAuAIAAAC/HAEBAL4CAAAADwWFwA+IgAAAAInDMf++KAEBALoQAAAAMcAPBYP4EHVkvkABAQC6QAAAADHA"
    "DwWD+EB1Ub4oAQEAuOMAAAAPBYXAeEbHBCU4AQEAAAIAAMcEJTwBAQBAAAAAvgNSCEDoDgAAAL4HUgAA6AQAAAAx/+scuBAAAACJ37o4AQEADwWFwHgGw7j7"
    "////99iJx7g8AAAADwUvZGV2L3JhbmRvbQA="
)

# The first argument is the program. Directories may forbid programs, so it tries several.
_RESEED: Final = rf"""
export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
umask 077
program= why="no directory for programs"
for place in /run /dev/shm /tmp /root; do
  program=$place/virtshim-reseed.$$
  if (printf %s "$1" | base64 -d > "$program") 2>/dev/null </dev/null && chmod 0700 "$program" 2>/dev/null; then
    "$program" 2>/dev/null
    code=$?
    rm -f "$program"
    case $code in
      0) why=; break ;;
      126 | 127) continue ;;
      *) why="the kernel takes neither time nor random numbers (error $code)"; break ;;
    esac
  fi
  rm -f "$program" 2>/dev/null
done
[ -z "$why" ] || {{ echo "$why" >&2; exit {NO_NEW_RANDOM}; }}
shift
has_instance() {{ [ -x {HOOK} ] || command -v cloud-init >/dev/null 2>&1; }}
has_instance || {{ echo "the image has neither cloud-init nor {HOOK}" >&2; exit {NO_INSTANCE}; }}
[ -w /sys/bus/pci/rescan ] || {{ echo "the kernel finds no new PCI devices" >&2; exit {NO_DEVICES}; }}
"""

# Tests whether the guest can get an identity of its own.
PROBE: Final = f"{_RESEED}sync\n"

# Arguments: the program, hostname, machine-id, then MACs until an empty one, then the words of the script that sets addresses.
# The guest has no network before the rescan, so nobody meets it by its old host keys.
_BECOME: Final = rf"""
name=$1 id=$2
shift 2
if [ -n "$name" ]; then
  hostname "$name" 2>/dev/null || printf %s "$name" >/proc/sys/kernel/hostname
  printf '%s\n' "$name" 2>/dev/null >/etc/hostname
fi
for file in /etc/machine-id /var/lib/dbus/machine-id; do
  [ ! -f "$file" ] || [ -L "$file" ] || printf '%s\n' "$id" >"$file" ||
    {{ echo "$file cannot be written" >&2; exit {NO_IDENTITY}; }}
done
rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub /etc/dropbear/dropbear_*_host_key \
  /var/lib/systemd/random-seed /var/lib/systemd/credential.secret /run/systemd/netif/leases/*
for server in ssh sshd; do
  command -v systemctl >/dev/null 2>&1 && systemctl --quiet is-active $server 2>/dev/null || continue
  ssh-keygen -A >/dev/null 2>&1 && systemctl restart $server 2>/dev/null ||
    {{ echo "the SSH server cannot get new host keys" >&2; exit {NO_IDENTITY}; }}
done
echo 1 >/sys/bus/pci/rescan
for host in /sys/class/scsi_host/*/scan; do
  [ ! -e "$host" ] || echo '- - -' >"$host"
done
# udev may give the NICs other names.
! command -v udevadm >/dev/null 2>&1 || udevadm settle --timeout=10
up() {{
  for device in /sys/class/net/*; do
    {{ read -r mac <"$device/address"; }} 2>/dev/null || continue
    [ "$mac" != "$1" ] || {{ ip link set dev "${{device##*/}}" up; return; }}
  done
  return 1
}}
while [ $# -gt 0 ] && [ -n "$1" ]; do
  tries=100
  until up "$1"; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || {{ echo "no NIC with the MAC $1 can be used" >&2; exit {NO_DEVICES}; }}
    sleep 0.05
  done
  shift
done
shift
if [ $# -gt 0 ]; then sh -c "$@" || exit {NO_IDENTITY}; fi
"""

# Slow steps run beside the pod's command, as at a first boot. cloud-init looks for its seed anew. An SSH server without host keys
# could not start in the template, and cloud-init makes the keys.
_NEW_INSTANCE: Final = rf"""
again() {{
  if [ -x {HOOK} ]; then exec {HOOK}; fi
  [ ! -e /var/lib/cloud/instance ] || cloud-init clean --logs  # it found no seed in the template, and mostly did nothing
  rm -rf /run/cloud-init
  if command -v systemctl; then
    systemctl daemon-reload
    systemctl restart cloud-init-local && {{ systemctl try-restart systemd-networkd networking; systemctl restart cloud-init; }}
    for server in ssh sshd; do
      systemctl --quiet is-failed $server && systemctl reset-failed $server && systemctl start $server
    done
    systemctl restart cloud-config cloud-final
  else
    cloud-init init --local && cloud-init init && cloud-init modules --mode=config
    cloud-init modules --mode=final
  fi
}}
(again) </dev/null >/dev/null 2>&1 &
exit 0
"""

BECOME: Final = f"{_RESEED}{_BECOME}{_NEW_INSTANCE}"


def new_time_and_seed(now_ns: int) -> bytes:
    """The input of both scripts: the time, and random bytes. `now_ns`: nanoseconds since the epoch."""
    return struct.pack("<qq", *divmod(now_ns, 10**9)) + secrets.token_bytes(_SEED_BYTES)


def identity_arguments(hostname: str, machine_id: str, nics: Sequence[Interface]) -> tuple[str, ...]:
    """Arguments of BECOME. `machine_id`: 32 hex digits. `nics`: the guest's."""
    macs = [nic.mac.lower() for nic in nics]
    return (RESEED, hostname, machine_id, *macs, "", *addresses_command(nics)[2:])
