"""Collects facts for the findings: files, users, programs, sockets. Does not judge them. Every step has a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tapmanager import protocol
from virtshim.model.errors import DeadlineExceeded, ShimError
from virtshim.preflight.access import FileStatus, UserAccount
from virtshim.preflight.machine import Cgroups, FreeSpace
from virtshim.preflight.virtualization import AppArmor, AppArmorProfile, ProgramOutput
from virtshim.system import machine, process
from virtshim.system.files import free_bytes, mountpoint
from virtshim.vm import embed
from vmwrapper.confine import kernel
from vmwrapper.confine import landlock as kernel_landlock

# A little less than the limit of a whole check, so that the finding tells the cause and not only the timeout.
_PROGRAM_LIMIT = 57.0
_APPARMOR = "/etc/apparmor.d"


def node(path: str) -> FileStatus | None:
    """The file's status; None if the file does not exist or is not visible."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return FileStatus(path, found.st_mode, found.st_uid, found.st_gid)
    return None


def is_served(path: str) -> bool:
    """Whether a process listens on the Unix socket, because the file remains when the process ends. True if that cannot be
    determined."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def directories(path: str) -> list[FileStatus]:
    """The existing directories of `path` from / down. Follows links as a process would."""
    real = Path(os.path.realpath(path))
    found = (node(str(part)) for part in (*reversed(real.parents), real))
    return [part for part in found if part is not None and stat.S_ISDIR(part.mode)]


def is_character_device(path: str) -> bool:
    found = node(path)
    return found is not None and stat.S_ISCHR(found.mode)


def user(name: str, group: str = "") -> UserAccount | None:
    """The user with all its groups and `group`. "" means the distribution's user and group for QEMU. None if the user or group
    does not exist."""
    try:
        found = embed.qemu_user(name, group)
    except ShimError:
        return None
    return UserAccount(found.name, found.uid, frozenset({found.gid, *os.getgrouplist(found.name, found.gid)}))


def group(name: str, own: str = "") -> frozenset[int]:
    """The group of QEMU's user, which is also the group of the VMs' users."""
    try:
        return frozenset({embed.qemu_user(name, own).gid})
    except ShimError:
        return frozenset()


def text(path: str) -> str:
    """The text of a small file; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def room(path: str) -> FreeSpace:
    """Raises OSError."""
    there = directories(path)[-1].path
    found = os.statvfs(there)
    return FreeSpace(path, free_bytes(there), found.f_favail if found.f_files else None)


def device_of(path: str) -> str:
    """The device of the file system that this directory is on, or will be on; the same for all subvolumes of a btrfs. "" if it
    cannot be determined."""
    there = directories(path)[-1].path
    try:
        number = os.stat(there).st_dev
    except OSError:
        return ""
    if os.major(number):
        return f"{os.major(number)}:{os.minor(number)}"
    sources = dict(_mounts())
    place = mountpoint(there)
    return sources.get(place) or f"0:{os.minor(number)}"


def _mounts() -> Iterator[tuple[str, str]]:
    """Mount points and their devices, "" for file systems without a device. Later mounts cover earlier ones."""
    for line in text("/proc/self/mountinfo").splitlines():
        place, _, of = line.partition(" - ")
        source = of.split(" ")[1]
        yield place.split(" ")[4], source if source.startswith("/dev/") else ""


def cgroups() -> Cgroups:
    if machine.has_cgroup_v2():
        return Cgroups.V2
    if os.path.exists("/sys/fs/cgroup/unified/cgroup.procs"):
        return Cgroups.HYBRID
    return Cgroups.V1 if os.path.isdir("/sys/fs/cgroup/memory") else Cgroups.NONE


def program_output(argv: Sequence[str]) -> ProgramOutput:
    """The program's standard output, or the reason why there is none."""
    try:
        done = process.run(argv, timeout=_PROGRAM_LIMIT)
    except ShimError as exc:
        return ProgramOutput(trouble=str(exc), late=isinstance(exc, DeadlineExceeded))
    if done.returncode != 0:
        return ProgramOutput(trouble=done.summary())
    return ProgramOutput(text=done.stdout.decode(errors="replace").strip())


def ask_libvirt(question: str, uri: str, *rest: str) -> ProgramOutput:
    """Asks libvirt in a child process. `libvirt_child` lists the questions."""
    answer = program_output([sys.executable, "-m", "virtshim.preflight.libvirt_child", question, uri, *rest])
    if answer.trouble:
        return answer
    try:
        fields = json.loads(answer.text.splitlines()[-1])
        return ProgramOutput(
            str(fields.get("text", "")), str(fields.get("trouble", "")), reached=fields["reached"] is True
        )
    except (ValueError, AttributeError, LookupError, TypeError):
        return ProgramOutput(trouble=f"unexpected answer: {answer.text[:80]!r}")


def landlock() -> int:
    """Landlock's version, 0 if the kernel has none. QEMU's rules: vmwrapper/landlock_rules.py."""
    try:
        return kernel_landlock.abi()
    except OSError:
        return 0


def core_scheduling() -> bool:
    """Whether the kernel supports core scheduling. True only if a core has two threads."""
    return kernel.can_share_no_core()


def security_modules() -> list[str]:
    """The active security modules that libvirt can label VMs for."""
    found = ["AppArmor"] if text("/sys/module/apparmor/parameters/enabled") == "Y" else []
    return [*found, "SELinux"] if text("/sys/fs/selinux/enforce") == "1" else found


def apparmor() -> AppArmor:
    enabled = text("/sys/module/apparmor/parameters/enabled") == "Y"
    return AppArmor(enabled, _rules("usr.sbin.libvirtd"), _rules("abstractions/libvirt-qemu"))


def _rules(name: str) -> AppArmorProfile:
    profile, additions = text(f"{_APPARMOR}/{name}"), f"{_APPARMOR}/local/{name}"
    return AppArmorProfile(f"{profile}\n{text(additions)}" if profile else "", additions)


def file_names(directory: str) -> list[str]:
    """The names in the directory; [] if it does not exist."""
    with contextlib.suppress(OSError):
        return os.listdir(directory)
    return []


def not_executable(names: Sequence[str], places: Sequence[str]) -> list[str]:
    """The programs that are not an executable file in any of the directories."""
    return [name for name in names if not any(_executable(os.path.join(place, name)) for place in places)]


def _executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def tapmanager(socket: str, timeout: float) -> tuple[str, str]:
    """(why tapmanager does not answer, why it cannot make pod networks). "" means no problem."""
    try:
        state, descriptors = protocol.call(socket, "status", {}, timeout)
    except protocol.RemoteError as exc:
        return "", str(exc)
    except (OSError, protocol.FrameError) as exc:
        return (exc.strerror if isinstance(exc, OSError) else "") or str(exc) or type(exc).__name__, ""
    protocol.close_all(descriptors)
    return "", "" if state.get("ready") is True else str(state.get("reason") or "it is not ready")
