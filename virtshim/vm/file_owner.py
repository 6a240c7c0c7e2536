"""Gives files to the unprivileged user that a VM's QEMU runs as. Must not touch the images that disks are based on.

libvirt could do this at each start, but it would also give QEMU the shared base image, and it changes the owner again when a VM
ends. Here only the files of the VmSpec change, and only as far as QEMU needs. If the VM has its own user, that user becomes their
owner. If all QEMUs run as one user, that user gets the writable disks, and its group may read the read-only ones.

All QEMUs share a group and perhaps a user. So QEMU owns the directory of its VNC socket only while it makes the socket.
Afterwards root owns the directory, so no QEMU can reach the screen of another VM.
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
    """The user and group that QEMU runs as."""

    uid: int
    gid: int
    # No other VM's QEMU runs as this user.
    is_its_own: bool = False
    # The group of a VM that has its own user. None: such a VM also has `gid`.
    group_of_vms: int | None = None
    # Root opens the base images for QEMU, which cannot open them itself.
    gets_images: bool = False

    def for_vm(self, uid: int) -> QemuIds:
        """`uid`: the VM's own; 0 if it has none."""
        gid = self.gid if self.group_of_vms is None else self.group_of_vms
        return dataclasses.replace(self, uid=uid, gid=gid, is_its_own=True) if uid else self

    @property
    def readers(self) -> int:
        """The group that may read images."""
        if self.gets_images:
            return os.getegid()
        return self.gid if self.group_of_vms is None else self.group_of_vms


def give_to_qemu(disks: Iterable[Disk], qemu: QemuIds) -> None:
    """Leaves files with suitable rights unchanged. NotFound if a file is missing, InternalError if its rights cannot be
    changed."""
    for disk in disks:
        if disk.is_device:
            continue  # libvirt changes the owner and restores it
        try:
            _give_to_qemu(disk, qemu)
        except FileNotFoundError as exc:
            raise NotFound(f"disk file {disk.path} does not exist") from exc
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
    """Decides as the kernel does: only the first match of owner, group and others counts."""
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
    """Lets QEMU make `socket` in the block. Makes the directory if needed, and removes an old socket. Does nothing for "". Raises
    InternalError."""
    if not socket:
        yield
        return
    directory = os.path.dirname(socket)
    parent = os.path.dirname(directory)
    try:
        os.makedirs(parent, exist_ok=True)
        os.chmod(parent, 0o711)  # noqa: S103  QEMU's user must pass it, whatever the umask
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


# Directories that libvirt gives to QEMU's user when libvirt starts: below its state directory, and below its run directory.
_LIBVIRTS = ("", "channel", "channel/target", "checkpoint", "dump", "nvram", "ram", "save", "snapshot")
_RUNNING = ("dbus", "passt", "slirp")


def take_back_libvirts(state: str, running: str) -> None:
    """Takes back the directories of an embedded libvirt that has just been opened, and of its running VMs. Raises
    InternalError."""
    for directory in (*(f"{state}/{name}" for name in _LIBVIRTS), *(f"{running}/{name}" for name in _RUNNING)):
        _take_back(directory)
    for place in (state, f"{state}/channel/target"):
        for directory in glob.glob(f"{glob.escape(place)}/domain-*"):
            _take_back(directory)


def take_back_vms(state: str, number: int, name: str) -> None:
    """Takes back the directories of a running VM. Until now QEMU could replace the monitor's socket, e.g. by another VM's. Raises
    InternalError, also if QEMU has done so."""
    short = f"domain-{number}-{name[:20]}"
    for directory in (f"{state}/{short}", f"{state}/channel/target/{short}"):
        _take_back(directory)
    monitor = f"{state}/{short}/monitor.sock"
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(monitor)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise InternalError(f"{monitor} is not the socket that libvirt has made: QEMU has replaced it")


def _take_back(directory: str) -> None:
    """Gives the directory to root; QEMU may pass it but not write. libvirt opens files there by name, such as the monitor's
    socket, so QEMU must not replace them."""
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
