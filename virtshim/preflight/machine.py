"""Findings about the machine itself: rights, kernel, cgroups, disk room, paths. Pure: facts in, findings out."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from virtshim.model.layout import LONGEST_SOCKET_PATH
from virtshim.preflight.access import FileStatus, UserAccount, chmod_command, first_blocked
from virtshim.preflight.finding import Finding, error, ok, warning

_GIB = 1 << 30
_LITTLE_ROOM = 10 * _GIB
_NO_ROOM = _GIB
_FEW_INODES = 10_000
_NO_INODES = 500


class Cgroups(enum.Enum):
    """HYBRID: v1 controllers beside an empty v2 tree."""

    NONE = "none"
    V1 = "v1"
    HYBRID = "v1 with an empty v2 tree"
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Free for root on the file system of `path`; `inodes` None where the file system does not count them."""

    path: str
    bytes: int
    inodes: int | None


def root(uid: int) -> Finding:
    if uid == 0:
        return ok("root", "runs as root")
    return error("root", f"runs as user {uid}: most of what follows cannot be seen, and no VM started", "use sudo")


def tun(is_device: bool) -> Finding:
    if is_device:
        return ok("tun", "/dev/net/tun is there")
    return error("tun", "/dev/net/tun is missing: no VM can have a network card", "modprobe tun")


def vhost_net(wanted: bool, trouble: str) -> Finding:
    """`wanted` as in tapmanager.vhost_net."""
    if not wanted:
        return ok("vhost-net", "not used (tapmanager.vhost_net): QEMU moves the guests' frames itself")
    if not trouble:
        return ok("vhost-net", "the kernel moves the guests' frames")
    return warning(
        "vhost-net", f"{trouble}: QEMU moves the guests' frames itself, which is slower", "modprobe vhost_net"
    )


def forwarding(switches: Mapping[str, str]) -> Finding:
    """`switches`: sysctl name -> its text, "" if it cannot be read."""
    off = sorted(name for name, value in switches.items() if value == "0")
    unknown = sorted(name for name, value in switches.items() if not value)
    if unknown:
        return warning("forwarding", f"{', '.join(unknown)} cannot be read", "mount -t proc proc /proc")
    if not off:
        return ok("forwarding", "the kernel forwards packets")
    remedy = f"write `{off[0]} = 1` into /etc/sysctl.d/90-kubernetes.conf, then run: sysctl --system"
    text = f"{off[0]} is 0: unless the CNI plugin turns it on, pods reach nothing outside this node"
    return warning("forwarding", text, remedy)


def cgroups(found: Cgroups, driver: str, systemd_runs: bool) -> Finding:
    """`driver` as in cri.cgroup_driver."""
    if driver == "systemd" and not systemd_runs:
        return error(
            "cgroups",
            "cri.cgroup_driver is systemd, but systemd does not run this machine",
            'set cri.cgroup_driver = "cgroupfs", and cgroupDriver: cgroupfs in the kubelet configuration',
        )
    if found is Cgroups.NONE:
        return error("cgroups", "no cgroups are mounted at /sys/fs/cgroup", "mount -t cgroup2 none /sys/fs/cgroup")
    if found is not Cgroups.V2:
        return warning(
            "cgroups",
            f"cgroup {found.value}: works, but kubelet 1.35 and later refuses to start on it",
            "boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false in the kubelet configuration",
        )
    return ok("cgroups", f"cgroup v2, driver {driver}")


def libvirt_cgroups(qemu_conf: str) -> Finding:
    """For the cgroupfs driver on a shared libvirt. `qemu_conf`: the file's text, "" if there is none."""
    subject = "libvirt's cgroups"
    lines = [line.partition("#")[0].replace(" ", "") for line in qemu_conf.splitlines()]
    if "cgroup_controllers=[]" in lines:
        return ok(subject, "libvirt manages none: tapmanager puts each VM below its pod's cgroup")
    return error(
        subject,
        "cri.cgroup_driver is cgroupfs, but libvirt makes cgroups of its own, below which pods' limits do not count",
        "write cgroup_controllers = [ ] into /etc/libvirt/qemu.conf and restart libvirt",
    )


def room(found: FreeSpace) -> Finding:
    subject = "disk room"
    inodes = "" if found.inodes is None else f", {found.inodes} inodes"
    text = f"{found.path}: {found.bytes / _GIB:.1f} GiB free{inodes}"
    remedy = "free some, or put paths.state_dir on a larger file system: images and disks of all VMs are kept there"
    few = found.inodes is not None and found.inodes < _FEW_INODES
    none = found.inodes is not None and found.inodes < _NO_INODES
    if found.bytes < _NO_ROOM or none:
        return error(subject, text, remedy)
    if found.bytes < _LITTLE_ROOM or few:
        return warning(subject, text, remedy)
    return ok(subject, text)


def sockets(paths: Sequence[str]) -> Finding:
    """`paths`: the longest socket path of each kind."""
    longest = max(paths, key=lambda path: len(path.encode()))
    length = len(longest.encode())
    if length > LONGEST_SOCKET_PATH:
        return error(
            "socket paths",
            f"{longest} has {length} bytes; a Unix socket's path may have {LONGEST_SOCKET_PATH}",
            "choose a shorter paths.run_dir (or cri.socket, tapmanager.socket)",
        )
    return ok("socket paths", f"at most {length} of {LONGEST_SOCKET_PATH} bytes")


def reach(setting: str, path: str, directories: Sequence[FileStatus], who: UserAccount) -> Finding:
    """`directories`: what exists of `path` from / down, itself included."""
    barrier = first_blocked(directories, who)
    if barrier is None:
        return ok(setting, f"{path} can be reached by {who.name}")
    return error(
        setting,
        f"{path} cannot be reached by {who.name}, who runs QEMU: {barrier.path} has mode {barrier.permissions}",
        f"set {setting} to another place, or {chmod_command(barrier)}",
    )


# Findings about the machine's clock. Pure.

# What the kernel reads without leaving the processor; guests get their time from it.
_QUICK = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter"})


def clock_synchronised(answer: bool | None, trouble: str) -> Finding:
    """`answer`: whether the kernel says so; None if it could not be asked, and `trouble` why."""
    if answer is None:
        return warning("clock", f"whether it is synchronised cannot be asked: {trouble}", "look at `timedatectl`")
    if answer:
        return ok("clock", "synchronised")
    remedy = "apt-get install systemd-timesyncd (or chrony), and run: timedatectl set-ntp true"
    text = "not synchronised: certificates are judged by it, and guests start with its time"
    return warning("clock", text, remedy)


def clock_source(name: str) -> Finding:
    """`name`: the kernel's clock source, "" if it cannot be read."""
    if not name:
        return warning("clock source", "cannot be read from sysfs", "mount -t sysfs sysfs /sys")
    if name in _QUICK:
        return ok("clock source", name)
    text = f"{name}: each look at the clock leaves the processor, on the node and for its guests"
    return warning(
        "clock source", text, "see `dmesg | grep -i tsc` for why the kernel gave tsc up; update the firmware"
    )
