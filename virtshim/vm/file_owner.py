"""Makes files usable by the unprivileged user that a VM's QEMU runs as. Must not touch anything a disk is based on.

libvirt could do it for disks at each start, but it would give QEMU the shared base image too, and takes files away from
their owner when a VM ends. Here only the files named in the VmSpec are changed, and only as far as QEMU needs:
of a VM with a user of its own they become that user's alone. Where all VMs' QEMUs are one user, a writable disk becomes its, and
a read-only one becomes readable by its group.

QEMUs have a group in common, and may be one user. So the directory of a VNC socket is QEMU's only while it makes the socket, and
root's alone from then on: no QEMU reaches another's screen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from virtshim.model.errors import InternalError, NotFound
from virtshim.model.vm import Disk


@dataclass(frozen=True, slots=True)
class QemuIds:
    """Whom libvirt runs QEMU as."""

    uid: int
    gid: int
    # No other VM's QEMU is this user.
    is_its_own: bool = False
    # That of the VMs that have a user of their own; None: `gid`.
    group_of_vms: int | None = None
    # What disks are based on is opened by root for it, and by nobody else.
    gets_images: bool = False

    def for_vm(self, uid: int) -> QemuIds:
        """`uid`: the VM's own; 0 for one that has none."""
        gid = self.gid if self.group_of_vms is None else self.group_of_vms  # that all VMs' QEMUs have
        return dataclasses.replace(self, uid=uid, gid=gid, is_its_own=True) if uid else self

    @property
    def readers(self) -> int:
        """The group that images are for."""
        if self.gets_images:
            return os.getegid()
        return self.gid if self.group_of_vms is None else self.group_of_vms


def give_to_qemu(disks: Iterable[Disk], qemu: QemuIds) -> None:
    """NotFound if a file is missing, InternalError if its rights cannot be changed. Files that fit are left as
    they are."""
    for disk in disks:
        if disk.is_device:
            continue  # libvirt does it, and takes it back
        try:
            _give_to_qemu(disk, qemu)
        except FileNotFoundError as exc:
            raise NotFound(f"disk file {disk.path} is not there") from exc
        except OSError as exc:
            raise InternalError(f"disk file {disk.path} cannot be chowned to QEMU's user: {exc.strerror}") from exc


def _give_to_qemu(disk: Disk, qemu: QemuIds) -> None:
    found = os.stat(disk.path)
    writable = not (disk.readonly or disk.cdrom)
    if qemu.is_its_own:
        mode = 0o600 if writable else 0o400
        if (found.st_uid, stat.S_IMODE(found.st_mode)) != (qemu.uid, mode):
            os.chmod(disk.path, mode)
            os.chown(disk.path, qemu.uid, -1)
        return
    if _may_use(found, qemu, writable=writable):
        return
    if writable:
        os.chown(disk.path, qemu.uid, qemu.gid)
        os.chmod(disk.path, stat.S_IMODE(found.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
    else:
        os.chown(disk.path, -1, qemu.gid)
        os.chmod(disk.path, stat.S_IMODE(found.st_mode) | stat.S_IRGRP)


def _may_use(found: os.stat_result, qemu: QemuIds, *, writable: bool) -> bool:
    """As the kernel decides: the first of owner, group, others that fits counts alone."""
    if found.st_uid == qemu.uid:
        shift = 6
    elif found.st_gid == qemu.gid:
        shift = 3
    else:
        shift = 0
    wanted = 0o6 if writable else 0o4
    return (found.st_mode >> shift) & wanted == wanted


@contextlib.contextmanager
def vnc_directory_writable(socket: str, qemu: QemuIds | None) -> Iterator[None]:
    """Inside the block QEMU may make `socket`. The directory is made if missing; a socket of an earlier start goes. Nothing for
    "". Raises InternalError."""
    if not socket:
        yield
        return
    directory = os.path.dirname(socket)
    parent = os.path.dirname(directory)
    try:
        os.makedirs(parent, exist_ok=True)
        os.chmod(parent, 0o711)  # noqa: S103  QEMU's user must reach what is in it, whatever the umask
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket)
        if qemu is not None:
            os.chown(directory, qemu.uid, qemu.gid, follow_symlinks=False)
    except OSError as exc:
        raise InternalError(f"the directory of the VNC socket {socket} cannot be made ready: {exc.strerror}") from exc
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.chown(directory, os.geteuid(), os.getegid(), follow_symlinks=False)


# What libvirt gives to QEMU's user when it starts: below its directories for VMs, and for their processes.
_LIBVIRTS = ("", "channel", "channel/target", "checkpoint", "dump", "nvram", "ram", "save", "snapshot")
_RUNNING = ("dbus", "passt", "slirp")


def take_back_libvirts(state: str, running: str) -> None:
    """Those of an embedded libvirt that has just been opened, with those of VMs that run. Raises InternalError."""
    for directory in (*(f"{state}/{name}" for name in _LIBVIRTS), *(f"{running}/{name}" for name in _RUNNING)):
        _take_back(directory)
    for place in (state, f"{state}/channel/target"):
        for directory in glob.glob(f"{glob.escape(place)}/domain-*"):
            _take_back(directory)


def take_back_vms(state: str, number: int, name: str) -> None:
    """Those of a VM that runs; they are named by libvirt's convention. Raises InternalError, also if its monitor's socket is none
    of libvirt's any more: QEMU may have put another VM's in its place, as long as it could."""
    short = f"domain-{number}-{name[:20]}"
    for directory in (f"{state}/{short}", f"{state}/channel/target/{short}"):
        _take_back(directory)
    monitor = f"{state}/{short}/monitor.sock"
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(monitor)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise InternalError(f"{monitor} is not the socket that libvirt has made: QEMU has replaced it")


def _take_back(directory: str) -> None:
    """It is root's from now on, for QEMU to pass and not to write: what libvirt opens there by name, such as a monitor's socket,
    must stay what libvirt made, and nothing may take the place of what it makes."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(descriptor, os.geteuid(), -1)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~0o022)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise InternalError(f"libvirt's directory {directory} cannot be taken back: {exc.strerror}") from exc
