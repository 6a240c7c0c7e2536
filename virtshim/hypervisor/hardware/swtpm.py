"""swtpm, which libvirt runs for each VM with a TPM: where it keeps what, and who reaches its socket.

libvirt lets the user that it runs QEMU as, and swtpm's group, into the directory of the sockets. VMs' own users are neither, so
their group may pass it. Each socket is its VM's alone. libvirt sets the directory's mode again at each start, which leaves the
entry for the group as it is.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import struct
import uuid
from collections.abc import Iterator
from typing import Final

import structlog
from lxml import etree

from virtshim.domain.errors import AlreadyExists, InternalError
from virtshim.hypervisor.file_owner import QemuIds
from virtshim.removal import remove_tree

log = structlog.get_logger(__name__)

# acl(5): as the kernel has it in an attribute of the file.
_ATTRIBUTE: Final = "system.posix_acl_access"
_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_OWNER, _GROUP_OF_FILE, _GROUP, _MASK, _OTHERS = 0x01, 0x04, 0x08, 0x10, 0x20
_NOBODY: Final = 0xFFFFFFFF


def states(pid_directory: str) -> str:
    """libvirt's directory of what TPMs remember, by UUID of the VM. `pid_directory`: see qemu_process.py."""
    return _beside(pid_directory, "/lib/swtpm", "/var/lib/libvirt/swtpm")


def refuse_left_behind(directory: str, vm: uuid.UUID) -> None:
    """AlreadyExists if a TPM of that UUID remembers something: of a VM that is not defined any more, whose operator has kept it
    (`virsh undefine --keep-tpm`), or that libvirt was told to keep. The next VM of the UUID would have it, whosever that is, and
    UUIDs are pods' to choose. `directory`: see `states`; "" knows of none."""
    state = os.path.join(directory, str(vm))
    if directory and os.path.lexists(state):
        raise AlreadyExists(
            f"VirtletSystemUUID {vm}: the TPM of an earlier VM of that UUID, which is none of this pod's, is still in {state}; "
            "choose another UUID, or have the node's operator remove that directory if nobody needs it"
        )


def forget(directory: str, vm: uuid.UUID, definition: str) -> None:
    """What the TPM of that VM remembers, unless it is to stay; before its definition goes. libvirt has the other order: killed in
    between it would leave what nobody can tell from another's any more. The VM is off. `directory`: see `states`. Raises
    InternalError; then the definition has to stay, too."""
    backend = etree.fromstring(definition.encode()).find("devices/tpm/backend")
    if not directory or backend is None or backend.get("persistent_state") == "yes":
        return
    try:
        remove_tree(directory, str(vm))
    except OSError as exc:
        raise InternalError(
            f"what the TPM of VM {vm} remembers cannot be removed from {directory}: {exc.strerror}"
        ) from exc


def logs(pid_directory: str) -> str:
    return _beside(pid_directory, "/log/swtpm", "/var/log/swtpm/libvirt/qemu")


def sockets(pid_directory: str) -> str:
    return _beside(pid_directory, "/run/swtpm", "/run/libvirt/qemu/swtpm")


def _beside(pid_directory: str, embedded: str, system: str) -> str:
    if pid_directory == "/run/libvirt/qemu":
        return system
    return pid_directory.removesuffix("/run/qemu") + embedded if pid_directory else ""


def let_in(directory: str, qemu: QemuIds | None) -> None:
    """VMs' QEMUs may pass the directory of the sockets, from before libvirt makes one. Raises InternalError."""
    if qemu is None or not qemu.is_its_own:
        return
    entries = ((_OWNER, 7, _NOBODY), (_GROUP_OF_FILE, 7, _NOBODY), (_GROUP, 1, qemu.gid), (_MASK, 7, _NOBODY))
    packed = _VERSION + b"".join(_ENTRY.pack(*entry) for entry in (*entries, (_OTHERS, 0, _NOBODY)))
    try:
        os.makedirs(directory, mode=0o770, exist_ok=True)
        os.setxattr(directory, _ATTRIBUTE, packed)
    except OSError as exc:
        raise InternalError(
            f"VMs' users cannot be let into {directory}, where the sockets of their TPMs are: {exc.strerror}; its file system "
            "must have POSIX ACLs"
        ) from exc


def end_left_alone(directory: str) -> None:
    """Those of starts that were cut off before QEMU came. Each would wait for it for ever, and hold what its TPM remembers, which
    no other start of that VM could open. `directory`: of the sockets; nobody starts a VM there now."""
    files = glob.glob(f"{glob.escape(directory)}/*-swtpm.pid")
    lines = dict(_command_lines()) if files else {}
    for file in files:
        socket = os.fsencode(f"{file.removesuffix('.pid')}.sock")
        vm = os.fsencode(f"/domain-{os.path.basename(file).removesuffix('-swtpm.pid')}/")  # of QEMU's other files
        using = [pid for pid, line in lines.items() if socket in line or vm in line]
        with contextlib.suppress(OSError, ValueError):
            with open(file, encoding="ascii") as told:
                own = int(told.read())
            if using == [own]:
                _end(own, socket)


def _end(pid: int, socket: bytes) -> None:
    """If it still is the TPM of that socket: its number may have gone to another process since it was read. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if socket in file.read():
                log.info("swtpm.ended", pid=pid, why="its VM's start was cut off")
                signal.pidfd_send_signal(process, signal.SIGTERM)
    finally:
        os.close(process)


def _command_lines() -> Iterator[tuple[int, bytes]]:
    """Raises OSError: a QEMU that cannot be seen may use what else would be ended."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/cmdline", "rb") as file:
            yield int(name), file.read()


def remove_log(directory: str, name: str) -> None:
    """Of the VM of that name. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, f"{name}-swtpm.log"))
