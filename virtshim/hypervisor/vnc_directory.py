"""The directory that QEMU makes its VNC socket in. All VMs' QEMUs are one user: it is that user's only while one makes its
socket, and root's alone from then on, so that no QEMU reaches another's screen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from virtshim.domain.errors import InternalError
from virtshim.hypervisor.file_owner import QemuIds


@contextlib.contextmanager
def writable_by_qemu(socket: str, qemu: QemuIds | None) -> Iterator[None]:
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
