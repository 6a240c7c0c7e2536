"""UEFI and TPMs on the node: files, programs and swtpm's state. Also refuses VMs whose start would fail for the lack of them, or
of O_DIRECT."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import signal
import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from virtshim.annotations.hardware import CACHE, FIRMWARE, TPM
from virtshim.model.errors import AlreadyExists, InternalError, InvalidRequest, Unimplemented, WrongState
from virtshim.model.hardware import Cache, Firmware, FirmwareFiles, HardwareOptions
from virtshim.model.vm import Disk
from virtshim.system.files import remove_tree
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.xml_text import parsed

# swtpm, which libvirt runs for each VM with a TPM.
#
# libvirt gives the directory of the sockets to its own user for QEMU and to swtpm's group. VMs' own users are neither, so
# an ACL entry lets their group pass. Each socket belongs to its VM alone. libvirt sets the directory's mode at each
# start, which does not change the entry.

log = structlog.get_logger(__name__)

# acl(5), as the kernel encodes it in a file's attribute.
_ATTRIBUTE: Final = "system.posix_acl_access"
_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_OWNER, _GROUP_OF_FILE, _GROUP, _MASK, _OTHERS = 0x01, 0x04, 0x08, 0x10, 0x20
_NOBODY: Final = 0xFFFFFFFF


def tpm_state_directory(pid_directory: str) -> str:
    """libvirt's directory for TPMs' state, by the VM's UUID. `pid_directory`: see qemu_process.py."""
    return _beside(pid_directory, "/lib/swtpm", "/var/lib/libvirt/swtpm")


def refuse_foreign_tpm_state(directory: str, vm: uuid.UUID) -> None:
    """Raises AlreadyExists if a VM that is no longer defined left TPM state with that UUID (`virsh undefine --keep-tpm`).
    The next VM with the UUID would get that state, and pods choose UUIDs. `directory`: see `tpm_state_directory`; "" has no
    state."""
    state = os.path.join(directory, str(vm))
    if directory and os.path.lexists(state):
        raise AlreadyExists(
            f"VirtletSystemUUID {vm}: the TPM state of an earlier VM with that UUID, which is not this pod's, is still in "
            f"{state}; choose another UUID, or have the node's operator remove that directory if nobody needs it"
        )


def remove_tpm_state(directory: str, vm: uuid.UUID, definition: str) -> None:
    """Removes the state of the VM's TPM, unless the definition keeps it. The VM must be off and still defined: libvirt
    removes the definition first, and a kill in between would leave state that looks like another VM's. `directory`: see
    `tpm_state_directory`. Raises InternalError; then the definition must stay."""
    backend = parsed(definition).find("devices/tpm/backend")
    if not directory or backend is None or backend.get("persistent_state") == "yes":
        return
    try:
        remove_tree(directory, str(vm))
    except OSError as exc:
        raise InternalError(f"the state of VM {vm}'s TPM cannot be removed from {directory}: {exc.strerror}") from exc


def tpm_log_directory(pid_directory: str) -> str:
    return _beside(pid_directory, "/log/swtpm", "/var/log/swtpm/libvirt/qemu")


def tpm_socket_directory(pid_directory: str) -> str:
    return _beside(pid_directory, "/run/swtpm", "/run/libvirt/qemu/swtpm")


def _beside(pid_directory: str, embedded: str, system: str) -> str:
    if pid_directory == "/run/libvirt/qemu":
        return system
    return pid_directory.removesuffix("/run/qemu") + embedded if pid_directory else ""


def let_qemu_reach_tpm_sockets(directory: str, qemu: QemuIds | None) -> None:
    """Lets VMs' QEMUs pass the sockets' directory, before libvirt makes a socket. Raises InternalError."""
    if qemu is None or not qemu.is_its_own:
        return
    entries = ((_OWNER, 7, _NOBODY), (_GROUP_OF_FILE, 7, _NOBODY), (_GROUP, 1, qemu.gid), (_MASK, 7, _NOBODY))
    packed = _VERSION + b"".join(_ENTRY.pack(*entry) for entry in (*entries, (_OTHERS, 0, _NOBODY)))
    try:
        os.makedirs(directory, mode=0o770, exist_ok=True)
        os.setxattr(directory, _ATTRIBUTE, packed)
    except OSError as exc:
        raise InternalError(
            f"VMs' users cannot get access to {directory}, which has the sockets of their TPMs: {exc.strerror}; its file system "
            "must have POSIX ACLs"
        ) from exc


def end_abandoned_swtpms(directory: str) -> None:
    """Ends the swtpms of starts that were interrupted before QEMU ran. Each would wait for QEMU for ever and lock its TPM's
    state, so that its VM could not start again. `directory`: of the sockets; no VM may be starting."""
    files = glob.glob(f"{glob.escape(directory)}/*-swtpm.pid")
    lines = dict(_command_lines()) if files else {}
    for file in files:
        socket = os.fsencode(f"{file.removesuffix('.pid')}.sock")
        vm = os.fsencode(
            f"/domain-{os.path.basename(file).removesuffix('-swtpm.pid')}/"
        )  # in the paths of QEMU's other files
        using = [pid for pid, line in lines.items() if socket in line or vm in line]
        with contextlib.suppress(OSError, ValueError):
            with open(file, encoding="ascii") as pid_file:
                own = int(pid_file.read())
            if using == [own]:
                _end(own, socket)


def _end(pid: int, socket: bytes) -> None:
    """Ends the process if it still serves that socket, because another process may have got its number. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if socket in file.read():
                log.info("swtpm.ended", pid=pid, why="its VM's start was cut off")
                signal.pidfd_send_signal(process, signal.SIGTERM)
    finally:
        os.close(process)


def _command_lines() -> Iterator[tuple[int, bytes]]:
    """Raises OSError, because a QEMU that cannot be seen may use its swtpm."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/cmdline", "rb") as file:
            yield int(name), file.read()


def remove_tpm_log(directory: str, name: str) -> None:
    """Removes the log of the named VM's swtpm. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, f"{name}-swtpm.log"))


# The node's UEFI firmware.
#
# A VM whose UEFI variables are older than itself gets the firmware that they were made for. Another build may use another
# format, and keys that a guest sealed to its TPM depend on the firmware.

# Where packages describe their firmware. A file in a later directory replaces one of the same name.
DESCRIPTORS: Final = ("/usr/share/qemu/firmware", "/etc/qemu/firmware")


def firmware_kinds(directories: Sequence[str] = DESCRIPTORS) -> frozenset[Firmware]:
    """The kinds of firmware that this node has."""
    return frozenset({Firmware.BIOS, *(kind for kind, _ in _described(directories))})


def first_uefi(wanted: Firmware, directories: Sequence[str] = DESCRIPTORS) -> FirmwareFiles | None:
    """The firmware that libvirt chooses: the first of that kind by its descriptor's name. None if there is none, or if it
    is not a pair of raw files."""
    for kind, descriptor in _described(directories):
        if kind is wanted:
            return _files(descriptor.get("mapping"))
    return None


def refuse_missing_uefi(files: FirmwareFiles, nvram: str) -> None:
    """Raises WrongState, naming the file. `nvram`: the variables; before they exist, `files` are the node's current firmware."""
    if not os.path.exists(nvram):
        _refuse_undelivered(files)
        return
    if not os.path.exists(files.code):
        raise WrongState(
            f"annotation {FIRMWARE}: {files.code}, with which this disk first started, is gone; {_remedy(nvram)}"
        )
    with contextlib.suppress(OSError):
        if os.path.getsize(files.variables) != os.path.getsize(nvram):
            raise WrongState(
                f"annotation {FIRMWARE}: {files.variables} has another size than this disk's variables, which were made from it: "
                f"the firmware is another build; {_remedy(nvram)}"
            )


def _refuse_undelivered(files: FirmwareFiles) -> None:
    for path in (files.code, files.variables):
        if not os.path.exists(path):
            raise WrongState(
                f"annotation {FIRMWARE}: {path}, which a descriptor of this node names (in {' or '.join(DESCRIPTORS)}), does not "
                "exist; install its package again (ovmf), or remove that descriptor"
            )


def _remedy(nvram: str) -> str:
    return (
        "install the earlier version of its package again (ovmf), or give the guest new variables for the current firmware: "
        f"remove {nvram} (the guest then loses the keys that it sealed to its TPM)"
    )


def _described(directories: Sequence[str]) -> Iterator[tuple[Firmware, Any]]:
    """The descriptors, in libvirt's order."""
    files: dict[str, Path] = {}
    for directory in directories:
        with contextlib.suppress(OSError):
            files |= {name: Path(directory, name) for name in os.listdir(directory) if name.endswith(".json")}
    for _, file in sorted(files.items()):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            descriptor = json.loads(file.read_text())
            if (kind := _kind(descriptor)) is not None:
                yield kind, descriptor


def _kind(descriptor: Any) -> Firmware | None:
    targets = descriptor.get("targets", [])
    for_q35 = any(
        target.get("architecture") == "x86_64" and any("q35" in machine for machine in target.get("machines", []))
        for target in targets
    )
    if "uefi" not in descriptor.get("interface-types", []) or not for_q35:
        return None
    features = set(descriptor.get("features", []))
    if {"secure-boot", "enrolled-keys"} <= features:
        return Firmware.SECURE
    return None if features & {"secure-boot", "requires-smm"} else Firmware.UEFI


def _files(mapping: Any) -> FirmwareFiles | None:
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        pair = [mapping["executable"], mapping["nvram-template"]]
        is_flash = mapping["device"] == "flash" and mapping.get("mode", "split") == "split"
        if is_flash and all(one["format"] == "raw" and os.path.isabs(one["filename"]) for one in pair):
            return FirmwareFiles(*(one["filename"] for one in pair))
    return None


# swtpm's programs, which libvirt runs.
PROGRAMS: Final = ("swtpm", "swtpm_setup")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing_tpm_programs() -> Sequence[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def refuse_missing_programs(
    wanted: HardwareOptions,
    files: FirmwareFiles | None = None,
    nvram: str = "",
    kinds: Callable[[], Collection[Firmware]] = firmware_kinds,
    missing_programs: Callable[[], Sequence[str]] = missing_tpm_programs,
) -> None:
    """Raises Unimplemented, naming annotation and remedy. `files`: the firmware that the variables at `nvram` are for, if it is
    known; raises WrongState if it is gone. `kinds` returns the node's firmware, `missing_programs` what a TPM lacks."""
    if files is not None:
        refuse_missing_uefi(files, nvram)
    elif wanted.firmware.is_uefi and wanted.firmware not in kinds():
        raise Unimplemented(
            f"annotation {FIRMWARE}: this node has no firmware for {wanted.firmware.value}; install its package "
            "(apt-get install ovmf), or have the pod scheduled to another node"
        )
    if wanted.tpm and (missing := missing_programs()):
        raise Unimplemented(
            f"annotation {TPM}: this node has no {' and no '.join(missing)}; install it (apt-get install swtpm swtpm-tools), "
            "or have the pod scheduled to another node"
        )


def refuse_without_direct_io(cache: Cache, disks: Sequence[Disk]) -> None:
    """Raises InvalidRequest for the first disk whose file system lacks O_DIRECT."""
    if not cache.is_direct:
        return
    for path in (
        path for disk in disks if not disk.is_device for path in (disk.path, disk.backing and disk.backing.path)
    ):
        if path and not _opens(path):
            raise InvalidRequest(
                f"annotation {CACHE}: {cache.value} needs O_DIRECT, which the file system of {os.path.dirname(path)} does not "
                "have; write writeback or writethrough, or remove the annotation"
            )


def _opens(path: str) -> bool:
    """True also for other errors, which are reported elsewhere."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno != errno.EINVAL
    return True
