"""Findings about the machine: rights, kernel, cgroups, disk space, paths, clock. Pure: takes facts, returns findings."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from virtshim.model.layout import LONGEST_SOCKET_PATH
from virtshim.model.text import escaped
from virtshim.preflight.access import FileStatus, UserAccount, chmod_command, first_blocked
from virtshim.preflight.finding import Finding, error, ok, warning

_GIB = 1 << 30
_LITTLE_ROOM = 10 * _GIB
_NO_ROOM = _GIB
_FEW_INODES = 10_000
_NO_INODES = 500
# How many images are listed.
_FEW = 5


class Cgroups(enum.Enum):
    """The version of cgroups. HYBRID: v1 controllers, and a v2 tree without controllers."""

    NONE = "none"
    V1 = "v1"
    HYBRID = "v1 with an empty v2 tree"
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Space that root can use on the file system of `path`. `inodes` is None if the file system does not count them."""

    path: str
    bytes: int
    inodes: int | None


def root(uid: int) -> Finding:
    if uid == 0:
        return ok("root", "runs as root")
    return error(
        "root",
        f"runs as user {uid}, who cannot see most of the facts below and cannot start VMs",
        "run this command with sudo",
    )


def tun(is_device: bool) -> Finding:
    if is_device:
        return ok("tun", "/dev/net/tun exists")
    return error("tun", "/dev/net/tun is missing: VMs cannot have a network card", "modprobe tun")


def vhost_net(wanted: bool, trouble: str) -> Finding:
    """`wanted`: the setting tapmanager.vhost_net."""
    if not wanted:
        return ok("vhost-net", "turned off by tapmanager.vhost_net: QEMU transfers guests' frames")
    if not trouble:
        return ok("vhost-net", "the kernel transfers guests' frames")
    return warning("vhost-net", f"{trouble}: QEMU transfers guests' frames, which is slower", "modprobe vhost_net")


def forwarding(switches: Mapping[str, str]) -> Finding:
    """`switches`: sysctl names and their texts, "" if one cannot be read."""
    off = sorted(name for name, value in switches.items() if value == "0")
    unknown = sorted(name for name, value in switches.items() if not value)
    if unknown:
        return warning("forwarding", f"{', '.join(unknown)} cannot be read", "mount -t proc proc /proc")
    if not off:
        return ok("forwarding", "the kernel forwards packets")
    remedy = f"write `{off[0]} = 1` into /etc/sysctl.d/90-kubernetes.conf, then run: sysctl --system"
    text = f"{off[0]} is 0: unless the CNI plugin sets it, pods cannot reach anything outside this node"
    return warning("forwarding", text, remedy)


def cgroups(found: Cgroups, driver: str, systemd_runs: bool) -> Finding:
    """`driver`: the setting cri.cgroup_driver."""
    if driver == "systemd" and not systemd_runs:
        return error(
            "cgroups",
            "cri.cgroup_driver is systemd, but this machine does not run systemd",
            'set cri.cgroup_driver = "cgroupfs", and cgroupDriver: cgroupfs in kubelet\'s configuration',
        )
    if found is Cgroups.NONE:
        return error("cgroups", "no cgroups are mounted at /sys/fs/cgroup", "mount -t cgroup2 none /sys/fs/cgroup")
    if found is not Cgroups.V2:
        return warning(
            "cgroups",
            f"cgroup {found.value}: works, but kubelet 1.35 and later refuses to start on it",
            "boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false in kubelet's configuration",
        )
    return ok("cgroups", f"cgroup v2, driver {driver}")


def libvirt_cgroups(qemu_conf: str) -> Finding:
    """For the cgroupfs driver with the system's libvirt. `qemu_conf`: the file's text, "" if it does not exist."""
    subject = "libvirt's cgroups"
    lines = [line.partition("#")[0].replace(" ", "") for line in qemu_conf.splitlines()]
    if "cgroup_controllers=[]" in lines:
        return ok(subject, "libvirt creates none: tapmanager puts each VM below its pod's cgroup")
    return error(
        subject,
        "cri.cgroup_driver is cgroupfs, but libvirt creates its own cgroups, where pods' limits do not apply",
        "write cgroup_controllers = [ ] into /etc/libvirt/qemu.conf and restart libvirt",
    )


def room(found: FreeSpace) -> Finding:
    subject = "disk space"
    inodes = "" if found.inodes is None else f", {found.inodes} inodes"
    text = f"{found.path}: {found.bytes / _GIB:.1f} GiB free{inodes}"
    remedy = "free some space, or put paths.state_dir on a larger file system; it holds the images and disks of all VMs"
    few = found.inodes is not None and found.inodes < _FEW_INODES
    none = found.inodes is not None and found.inodes < _NO_INODES
    if found.bytes < _NO_ROOM or none:
        return error(subject, text, remedy)
    if found.bytes < _LITTLE_ROOM or few:
        return warning(subject, text, remedy)
    return ok(subject, text)


def saved_vms(free: int, most: int) -> Finding:
    """`free`: bytes on the file system of paths.state_dir. `most`: saved.max_bytes, 0 for no limit."""
    if most > free:
        return warning(
            "saved VMs",
            f"saved.max_bytes is {most / _GIB:.1f} GiB, but only {free / _GIB:.1f} GiB are free below paths.state_dir",
            "free some space, or lower saved.max_bytes; a VM whose memory does not fit is shut down instead of saved",
        )
    limit = f"saved.max_bytes: {most / _GIB:.1f} GiB" if most else "no saved.max_bytes"
    return ok(
        "saved VMs",
        f"memory of {free / _GIB:.1f} GiB can be saved ({limit}), except of VMs with virtiofs or host devices",
    )


def templates(memory: int, most: int) -> Finding:
    """`memory`: of the node, with swap. `most`: templates.max_bytes."""
    if not most:
        return ok("templates", "pods with virtshim.io/warm-start boot, because templates.max_bytes is 0")
    if most > memory // 2:
        return warning(
            "templates",
            f"templates.max_bytes is {most / _GIB:.1f} GiB, which is more than half of the node's {memory / _GIB:.1f} GiB",
            "lower templates.max_bytes; templates take memory that pods cannot have",
        )
    return ok("templates", f"pods with virtshim.io/warm-start share templates of {most / _GIB:.1f} GiB at most")


def kept_templates(kept: Sequence[Mapping[str, Any]], unfit: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What the running virtshim says: of each template its `image` and `bytes`; `image` of pods that boot, and `why`."""
    size = sum(one["bytes"] for one in kept) / _GIB
    text = f"{len(kept)} templates of {size:.1f} GiB" if kept else "no template is made yet"
    found = [ok("templates", f"{text}{_images(kept)}")]
    remedy = (
        "remove virtshim.io/warm-start from its pods, or change what is named; docs/warm-start.md lists what is needed"
    )
    found += [warning("templates", f"{escaped(one['image'], 200)} boots: {one['why']}", remedy) for one in unfit[:_FEW]]
    if len(unfit) > _FEW:
        found.append(
            warning("templates", f"{len(unfit) - _FEW} further machines boot", "run crictl info: config.templates")
        )
    return found


def _images(kept: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(escaped(one["image"], 200) for one in kept))
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f": {', '.join(names[:_FEW])}{more}" if names else ""


def sockets(paths: Sequence[str]) -> Finding:
    """`paths`: the longest socket path of each kind."""
    longest = max(paths, key=lambda path: len(path.encode()))
    length = len(longest.encode())
    if length > LONGEST_SOCKET_PATH:
        return error(
            "socket paths",
            f"{longest} has {length} bytes, but a Unix socket's path may have only {LONGEST_SOCKET_PATH}",
            "choose a shorter paths.run_dir (or cri.socket, tapmanager.socket)",
        )
    return ok("socket paths", f"at most {length} of {LONGEST_SOCKET_PATH} bytes")


def reach(setting: str, path: str, directories: Sequence[FileStatus], who: UserAccount) -> Finding:
    """`directories`: the existing directories of `path` from / down, including `path` itself."""
    barrier = first_blocked(directories, who)
    if barrier is None:
        return ok(setting, f"{who.name} can reach {path}")
    return error(
        setting,
        f"{who.name}, who runs QEMU, cannot reach {path}: {barrier.path} has mode {barrier.permissions}",
        f"set {setting} to another path, or run {chmod_command(barrier)}",
    )


# The clock.

# Clock sources that are read without a VM exit or a slow device. Guests get their time from them.
_QUICK = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter"})


def clock_synchronised(answer: bool | None, trouble: str) -> Finding:
    """`answer`: whether the kernel's clock is synchronised; None if the kernel could not be asked, `trouble` says why."""
    if answer is None:
        return warning("clock", f"not known whether it is synchronised: {trouble}", "check with `timedatectl`")
    if answer:
        return ok("clock", "synchronised")
    remedy = "apt-get install systemd-timesyncd (or chrony), and run: timedatectl set-ntp true"
    text = "not synchronised: certificate checks depend on it, and guests start with its time"
    return warning("clock", text, remedy)


def clock_source(name: str) -> Finding:
    """`name`: the kernel's clock source; "" if it cannot be read."""
    if not name:
        return warning("clock source", "cannot be read from sysfs", "mount -t sysfs sysfs /sys")
    if name in _QUICK:
        return ok("clock source", name)
    text = f"{name} is slow: on the node and in guests, every read of the clock accesses a device or the hypervisor"
    return warning(
        "clock source", text, "run `dmesg | grep -i tsc` to see why the kernel does not use tsc; update the firmware"
    )
