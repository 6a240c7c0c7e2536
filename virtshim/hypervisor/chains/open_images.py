"""Images as descriptors: root opens what a VM's disk is based on, for reading, and libvirt hands it to QEMU at the VM's start.

So no user but root needs to read an image's file. A definition says which files are handed over (`fdgroup`), and where a VM is
started by somebody who does not hand them over, libvirt refuses.

So are files in volumes that are disks: they lie below directories that are kubelet's alone, and stay whose they are. libvirt
would keep them open, with the locks that QEMU has on them, as long as the VM is defined: so they are taken back after the start.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

import libvirt

from virtshim.domain.errors import InternalError, NotFound

# libvirt 9.0 takes them (virDomainFDAssociate); its numbers are millions and thousands.
SINCE: Final = 9_000_000

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def volumes_handed_over(domain: libvirt.virDomain, volumes: Iterable[tuple[str, str, bool]]) -> Iterator[None]:
    """For a start inside: group and path of each, and whether it is only read (`hostdev.files_in`). Raises NotFound,
    InternalError and libvirt's errors."""
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
        descriptor = os.open(path, _FLAGS | (0 if readonly else os.O_RDWR))
    except FileNotFoundError as exc:
        raise NotFound(f"{path}, which is a disk of the VM, is not there any more") from exc
    except OSError as exc:
        raise InternalError(f"{path}, which is a disk of the VM: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InternalError(f"{path}, which is a disk of the VM, is no regular file any more")
    return descriptor


def _put_nothing_in_place(domain: libvirt.virDomain, group: str) -> None:
    """A group cannot be removed, only replaced. QEMU has what it was given."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(libvirt.libvirtError):  # the connection is gone, and all groups with it
            domain.FDAssociate(group, [nothing], 0)
    finally:
        os.close(nothing)


def hand_over(domain: libvirt.virDomain, images: Iterable[tuple[str, str]]) -> None:
    """Before its start, group and path of each (`disk.images_in`). Raises NotFound, InternalError and libvirt's errors."""
    with contextlib.ExitStack() as opened:
        for group, path in images:
            try:
                descriptor = os.open(path, _FLAGS)
            except FileNotFoundError as exc:
                raise NotFound(f"the image {path}, which a disk is based on, is not there; pull it again") from exc
            except OSError as exc:
                raise InternalError(f"the image {path}, which a disk is based on: {exc.strerror}") from exc
            opened.callback(os.close, descriptor)
            domain.FDAssociate(group, [descriptor], 0)
