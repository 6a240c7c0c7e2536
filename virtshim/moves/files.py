"""Directories of VMs that outlive their pods. Implements `virtshim.moves.ports.SavedVms`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
from pydantic import TypeAdapter, ValidationError

from virtshim.model.container import Container
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted
from virtshim.model.layout import VM_RECORD, Layout, root_disk_of
from virtshim.model.sandbox import VMS
from virtshim.moves.fingerprints import Fingerprint, fingerprint
from virtshim.moves.values import MEMORY_FILE, VmRecord
from virtshim.moves.volume_process import volume_fingerprint
from virtshim.system.files import free_bytes, private, remove_tree, replace_bytes, space_taken, sync
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

_HALF: Final = "memory.half"
_DISK = re.compile(r"vms/[0-9a-f]{64}/root")
# Bytes. A record has one or two KiB.
_LONGEST: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
# A tuple, as `virtshim.store.rows` has it: nested dataclasses are reached through a container type.
_VM: TypeAdapter[tuple[VmRecord]] = TypeAdapter(tuple[VmRecord])


class SavedVmFiles:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._trouble = TroubleLog(log, over="vm.readable")

    def get(self, disk: str) -> VmRecord | None:
        path = self._path(disk, VM_RECORD)
        try:
            with open(path, "rb", opener=private) as file:
                found = _VM.validate_json(file.read(_LONGEST))[0]
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, InvalidRequest, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else str(exc).partition("\n")[0]
            raise InternalError(f"the record of a virtual machine cannot be read from {path}: {why}") from exc
        if found.disk != disk:
            raise InternalError(f"the record of a virtual machine in {path} is that of another one")
        return found

    def all(self, *, strict: bool = False) -> Sequence[VmRecord]:
        found = []
        for disk in self._disks():
            try:
                found += [vm] if (vm := self.get(disk)) is not None else []
            except InternalError as exc:
                self._trouble.met("vm.unreadable", disk, error=str(exc))
                if strict:
                    raise
            else:
                self._trouble.over(disk)
        return sorted(found, key=lambda vm: vm.readable)

    def put(self, vm: VmRecord) -> None:
        path = self._path(vm.disk, VM_RECORD)
        with self._errors(f"the record of virtual machine {vm.readable} cannot be written"):
            path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            replace_bytes(str(path), _VM.dump_json((vm,)))

    def begin(self, disk: str) -> str:
        path = self._path(disk, _HALF)
        with self._errors(f"{path} cannot be removed"):
            path.unlink(missing_ok=True)
        return str(path)

    def flush(self, disk: str) -> None:
        path = self._path(disk, _HALF)
        with self._errors(f"{path} cannot be written"):
            sync(path)

    def finish(self, disk: str) -> int:
        half, final = self._path(disk, _HALF), self._path(disk, MEMORY_FILE)
        with self._errors(f"{final} cannot be written"):
            sync(half)
            size = half.stat().st_size
            half.rename(final)
            sync(final.parent)
        return size

    def fingerprints(
        self, container: Container, seconds: float, leave_off: threading.Event
    ) -> Mapping[str, Fingerprint]:
        root = fingerprint(root_disk_of(self._layout, container), is_file=True)
        until = time.monotonic() + seconds
        found = {"": root}
        for one in container.granted.blocks:
            left = max(0.1, until - time.monotonic())
            found[one.container_path] = volume_fingerprint(one.host_path, left, leave_off, is_file=one.is_file)
        return found

    def root_fingerprint(self, disk: str) -> Fingerprint:
        return fingerprint(self._layout.pod_disk(disk), is_file=True)

    def memory(self, disk: str) -> str:
        return str(self._path(disk, MEMORY_FILE))

    def discard(self, disk: str) -> None:
        for name in (_HALF, MEMORY_FILE):
            path = self._path(disk, name)
            with self._errors(f"{path} cannot be removed"):
                path.unlink(missing_ok=True)

    def forget(self, disk: str) -> None:
        directory = self._path(disk, VM_RECORD).parent
        with self._errors(f"{directory} cannot be removed"), contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if name != VM_RECORD:
                    remove_tree(str(directory), name)
            sync(directory)
            remove_tree(str(directory.parent), directory.name)

    def disk_bytes(self, disk: str) -> int:
        path = self._layout.pod_disk(disk)
        with self._errors(f"{path} cannot be looked at"):
            return space_taken((path,))[0]

    def free_bytes(self) -> int:
        return free_bytes(self._layout.vms)

    def _disks(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._layout.vms) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            return [disk for name in names if _DISK.fullmatch(disk := f"{VMS}/{name}/root")]
        return []

    def _path(self, disk: str, name: str) -> Path:
        return Path(self._layout.kept(disk)).parent / name

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            kind = ResourceExhausted if exc.errno in _FULL else InternalError
            raise kind(f"{what}: {exc.strerror}") from exc
