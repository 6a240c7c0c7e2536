"""Makes disk files usable by the unprivileged user that QEMU runs as. Must not touch anything a disk is based on.

libvirt could do it at each start, but it would give QEMU the shared base image too, and takes files away from
their owner when a VM ends. Here only the files named in the VmSpec are changed, and only as far as QEMU needs:
a writable disk becomes its own, a read-only one becomes readable by its group.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from virtshim.domain.errors import InternalError, NotFound
from virtshim.domain.vm import Disk


@dataclass(frozen=True, slots=True)
class QemuIds:
    """Whom libvirt runs QEMU as."""

    uid: int
    gid: int


def give_to_qemu(disks: Iterable[Disk], qemu: QemuIds) -> None:
    """NotFound if a file is missing, InternalError if its rights cannot be changed. Files that fit are left as
    they are."""
    for disk in disks:
        try:
            _give_to_qemu(disk, qemu)
        except FileNotFoundError as exc:
            raise NotFound(f"disk file {disk.path} is not there") from exc
        except OSError as exc:
            raise InternalError(f"disk file {disk.path} cannot be chowned to QEMU's user: {exc.strerror}") from exc


def _give_to_qemu(disk: Disk, qemu: QemuIds) -> None:
    found = os.stat(disk.path)
    writable = not (disk.readonly or disk.cdrom)
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
