"""Whether VMs' disks still say what they were made with.

A QEMU that its guest took over may write anything into its disk's header: another file below it, or one for its data. libvirt
and QEMU are told by the definition what is below a disk, and follow no header; a header that says something else is a taken-over
QEMU's work, or somebody's who moved files by hand.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

import structlog

from virtshim.domain.errors import WrongState
from virtshim.domain.vm import Disk
from virtshim.hypervisor.chains.qcow2_header import HEAD_BYTES, BadHeader, parse

log = structlog.get_logger(__name__)

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def refuse_changed(disk: Disk) -> None:
    """Raises WrongState for a qcow2 whose header names what the definition does not. A file that is gone is libvirt's to tell."""
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
        f"the disk {disk.path} is not as it was made: {why}. Its guest may have taken over QEMU: look into it before you remove "
        f"its pod. If its image was moved, correct the header: qemu-img rebase -u {_rebase(disk)} {disk.path}"
    )


def _difference(disk: Disk) -> str:
    """ "" if there is none. Raises OSError, BadHeader."""
    header = parse(_head(disk.path))
    if header.has_data_file:
        return "its header names a file for its data"
    if header.encrypted:
        return "its header says that it is encrypted"
    path, kind = (disk.backing.path, disk.backing.format.value) if disk.backing else ("", "")
    if header.backing != path:
        return f"its header names {header.backing or 'nothing'!r} below it, and not {path or 'nothing'!r}"
    if header.backing_format != kind:
        return f"its header says that what is below it is {header.backing_format[:40]!r}, and not {kind!r}"
    return ""


def _head(path: str) -> bytes:
    descriptor = os.open(path, _FLAGS)
    with contextlib.closing(open(descriptor, "rb", buffering=0)) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadHeader("it is no regular file")
        return file.read(HEAD_BYTES)


def _rebase(disk: Disk) -> str:
    return f"-F {disk.backing.format.value} -b {disk.backing.path}" if disk.backing else "-b ''"
