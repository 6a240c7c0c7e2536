"""Images as descriptors: root opens what a VM's disk is based on, for reading, and libvirt hands it to QEMU at the VM's start.

So no user but root needs to read an image's file. A definition says which files are handed over (`fdgroup`), and where a VM is
started by somebody who does not hand them over, libvirt refuses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

import libvirt

from virtshim.domain.errors import InternalError, NotFound

# libvirt 9.0 takes them (virDomainFDAssociate); its numbers are millions and thousands.
SINCE: Final = 9_000_000

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
