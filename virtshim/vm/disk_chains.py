"""Opens the images under VMs' disks for QEMU, and checks that the disks' headers are as virtshim made them.

If a guest takes over its QEMU, it may write anything into its disk's header: another file below the disk, or another
data file. libvirt and QEMU learn from the definition what is below a disk and do not follow the header. A header that
says something else is the work of a taken-over QEMU, or of somebody who moved files by hand.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import libvirt
import structlog

from virtshim.model.errors import InternalError, NotFound, WrongState
from virtshim.model.vm import Disk

# Reading a qcow2 header. Pure: bytes in, a few facts out; nothing in them is trusted.
#
# https://gitlab.com/qemu-project/qemu/-/blob/master/docs/interop/qcow2.rst

# qemu-img writes the whole header, with the name of the file below, into the first few hundred bytes. virtshim's
# headers are never longer than this.
HEAD_BYTES: Final = 1 << 16

_MAGIC: Final = b"QFI\xfb"
_VERSION_2_BYTES: Final = 72
_VERSION_3_BYTES: Final = 104
_LONGEST_NAME: Final = 1023
_DATA_FILE: Final = 1 << 2
_MOST_EXTENSIONS: Final = 64
_END, _BACKING_FORMAT, _DATA_FILE_NAME = 0, 0xE2792ACA, 0x44415441


class BadHeader(Exception):
    """The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Qcow2Header:
    # As the header writes it; "" for none.
    backing: str
    backing_format: str
    has_data_file: bool
    encrypted: bool


def parse(head: bytes) -> Qcow2Header:
    """`head`: the file's first HEAD_BYTES, or all of it. Raises BadHeader."""
    if len(head) < _VERSION_3_BYTES or not head.startswith(_MAGIC):
        raise BadHeader("it is not a qcow2 any more")
    version, at, size = struct.unpack_from(">IQI", head, 4)
    (encryption,) = struct.unpack_from(">I", head, 32)
    if version not in (2, 3):
        raise BadHeader(f"its version is {version}")
    features = struct.unpack_from(">Q", head, 72)[0] if version == 3 else 0
    length = struct.unpack_from(">I", head, 100)[0] if version == 3 else _VERSION_2_BYTES
    if version == 3 and length < _VERSION_3_BYTES:
        raise BadHeader(f"its header has {length} bytes")
    found = dict(_extensions(head, length))
    return Qcow2Header(
        backing=_name(head, at, size) if at else "",
        backing_format=found.get(_BACKING_FORMAT, b"").decode(errors="backslashreplace"),
        has_data_file=bool(features & _DATA_FILE) or _DATA_FILE_NAME in found,
        encrypted=encryption != 0,
    )


def _name(head: bytes, at: int, size: int) -> str:
    if not 0 < size <= _LONGEST_NAME or at + size > len(head):
        raise BadHeader("the name of the file below it is outside the header")
    return head[at : at + size].decode(errors="backslashreplace")


def _extensions(head: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    for _ in range(_MOST_EXTENSIONS):
        if at + 8 > len(head):
            raise BadHeader("its header extensions have no end")
        kind, size = struct.unpack_from(">II", head, at)
        if kind == _END:
            return
        if at + 8 + size > len(head):
            raise BadHeader("a header extension reaches beyond the header")
        yield kind, head[at + 8 : at + 8 + size]
        at += 8 + (size + 7) // 8 * 8
    raise BadHeader("it has too many header extensions")


# Opening images: root opens the image under a VM's disk for reading, and libvirt passes the descriptor to QEMU at the
# start. Only root therefore needs access to image files. The definition names the descriptors (`fdgroup`), and libvirt
# refuses a start without them.
#
# Files in volumes that are disks are opened too, because only kubelet may enter the directories above, and the files
# keep their owners. libvirt would keep the descriptors, with QEMU's locks, open as long as the VM is defined, so they
# are taken back after the start.

# The first libvirt that accepts them (virDomainFDAssociate). The number counts millions and thousands.
OPEN_IMAGES_SINCE: Final = 9_000_000

_READING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def volumes_handed_over(domain: libvirt.virDomain, volumes: Iterable[tuple[str, str, bool]]) -> Iterator[None]:
    """Opens these files for a start in the block: group, path, and whether it is only read (`hostdev.files_in`). Raises
    NotFound, InternalError and libvirt's errors."""
    given = []
    try:
        for group, path, readonly in volumes:
            given.append(group)
            descriptor = _opened(path, readonly=readonly)
            try:
                domain.FDAssociate(group, [descriptor], 0)
            finally:
                os.close(descriptor)
        yield
    finally:
        for group in given:
            _put_nothing_in_place(domain, group)


def _opened(path: str, *, readonly: bool) -> int:
    try:
        descriptor = os.open(path, _READING | (0 if readonly else os.O_RDWR))
    except FileNotFoundError as exc:
        raise NotFound(f"{path}, which is a disk of the VM, does not exist any more") from exc
    except OSError as exc:
        raise InternalError(f"{path}, which is a disk of the VM: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InternalError(f"{path}, which is a disk of the VM, is not a regular file any more")
    return descriptor


def _put_nothing_in_place(domain: libvirt.virDomain, group: str) -> None:
    """Replaces the group's descriptors by one of /dev/null, because a group cannot be removed. QEMU keeps what it was
    given."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(libvirt.libvirtError):  # the connection is gone, and its groups with it
            domain.FDAssociate(group, [nothing], 0)
    finally:
        os.close(nothing)


def hand_over_images(domain: libvirt.virDomain, images: Iterable[tuple[str, str]]) -> None:
    """Opens the base images and hands the descriptors to libvirt, before a start. `images`: libvirt's group and the path of each.
    Raises NotFound, InternalError and libvirt's errors."""
    with contextlib.ExitStack() as opened:
        for group, path in images:
            try:
                descriptor = os.open(path, _READING)
            except FileNotFoundError as exc:
                raise NotFound(f"the image {path}, which a disk is based on, does not exist; pull it again") from exc
            except OSError as exc:
                raise InternalError(f"the image {path}, which a disk is based on: {exc.strerror}") from exc
            opened.callback(os.close, descriptor)
            domain.FDAssociate(group, [descriptor], 0)


log = structlog.get_logger(__name__)


def refuse_changed(disk: Disk) -> None:
    """Raises WrongState for a qcow2 whose header differs from the definition. libvirt reports a missing file."""
    try:
        why = _difference(disk)
    except FileNotFoundError:
        return
    except (OSError, BadHeader) as exc:
        why = str(exc)
    if not why:
        return
    log.warning("security.disk_changed", disk=disk.path, error=why)
    raise WrongState(
        f"the disk {disk.path} is not as virtshim made it: {why}. Its guest may have taken over QEMU: examine it before you "
        f"remove its pod. If its image was moved, correct the header: qemu-img rebase -u {_rebase(disk)} {disk.path}"
    )


def move_images(path: str, before: str, now: str) -> None:
    """For a disk of another node: if its header names an image below the directory `before`, it names the same image below `now`
    afterwards. `refuse_changed` checks the rest. Raises OSError."""
    descriptor = os.open(path, _READING | os.O_RDWR)
    try:
        head = os.pread(descriptor, HEAD_BYTES, 0)
        backing = parse(head).backing
        if before == now or not backing.startswith(f"{before}/"):
            return
        name = os.fsencode(now + backing.removeprefix(before))
        at, size = struct.unpack_from(">QI", head, 8)
        if len(name) > _LONGEST_NAME or any(head[at + size : at + len(name)]) or at + len(name) > len(head):
            raise OSError(errno.ENAMETOOLONG, "the header has no room for the path of the image on this node")
        os.pwrite(descriptor, name.ljust(size, b"\0"), at)
        os.pwrite(descriptor, struct.pack(">I", len(name)), 16)
        os.fsync(descriptor)
    except BadHeader:
        return
    finally:
        os.close(descriptor)


def _difference(disk: Disk) -> str:
    """What differs, "" for nothing. Raises OSError, BadHeader."""
    header = parse(_head(disk.path))
    if header.has_data_file:
        return "its header names a file for its data"
    if header.encrypted:
        return "its header says that it is encrypted"
    path, kind = (disk.backing.path, disk.backing.format.value) if disk.backing else ("", "")
    if header.backing != path:
        return f"its header names {header.backing or 'nothing'!r} as the file below it, not {path or 'nothing'!r}"
    if header.backing_format != kind:
        return f"its header gives the file below it the format {header.backing_format[:40]!r}, not {kind!r}"
    return ""


def _head(path: str) -> bytes:
    descriptor = os.open(path, _READING)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadHeader("it is not a regular file")
        return os.pread(descriptor, HEAD_BYTES, 0)
    finally:
        os.close(descriptor)


def _rebase(disk: Disk) -> str:
    return f"-F {disk.backing.format.value} -b {disk.backing.path}" if disk.backing else "-b ''"
