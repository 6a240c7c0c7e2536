"""Files of templates. Implements `virtshim.templates.ports.TemplateFiles`.

A finished template has no file with a name: its memory and the state of its devices are memfds, and its disk is unlinked. So a
killed virtshim leaves nothing of it, and no other process can open it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from virtshim.disks.checkpoint_archives import share_blocks
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.files import remove_tree
from virtshim.templates.values import Template
from virtshim.vm.warm_xml import virtual_size

# All that there are: nobody can write, change the size, or change the seals.
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})
_PIECE: Final = 1 << 24
_HEAD: Final = 1 << 12
# The suffix of the container's own root disk, while a copy of the template's disk is in its place.
_OWN: Final = ".own"


class TemplateFileStore:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def begin(self, template: ContainerId, disk: int) -> str:
        layout = self._layout
        with _errors("a template's directories"):
            for path, mode in (
                (layout.templates, 0o711),
                (layout.template_dir(template), 0o711),
                (layout.socket_dir(template), 0o700),
            ):
                os.makedirs(path, exist_ok=True)
                os.chmod(path, mode)
            path = f"{layout.template_dir(template)}/root.qcow2"
            _copy(disk, path)
            return path

    def memory(self, size: int) -> int:
        with _errors("a template's memory"):
            memory = os.memfd_create("virtshim-template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(memory, size)
            except BaseException:
                os.close(memory)
                raise
            return memory

    def devices(self) -> int:
        with _errors("a template's devices"):
            return os.memfd_create("virtshim-devices", os.MFD_CLOEXEC)

    def seal(self, template: ContainerId, memory: int, devices: int) -> Template:
        _seal(memory)
        with _errors("a template's disk"):
            disk = os.open(
                f"{self._layout.template_dir(template)}/root.qcow2", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            taken = sum(os.fstat(one).st_blocks << 9 for one in (memory, devices, disk))
            return Template(memory, devices, disk, taken)

    def remove(self, template: ContainerId) -> None:
        with _errors("a template's directories"):
            remove_tree(self._layout.sockets, template.short)
            remove_tree(self._layout.vnc_sockets, template.short)
            remove_tree(self._layout.templates, template.value)

    def remove_leftovers(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._layout.templates):
                with contextlib.suppress(InvalidRequest):
                    self.remove(ContainerId(name))

    def open_disk(self, container: ContainerId) -> tuple[int, int]:
        with _errors("a root disk"):
            disk = os.open(self._layout.root_disk(container), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return disk, virtual_size(os.pread(disk, _HEAD, 0))
            except BaseException:
                os.close(disk)
                raise

    def put_disk(self, container: ContainerId, template: Template) -> None:
        path = self._layout.root_disk(container)
        half = f"{path}.half"
        with _errors("a root disk"):
            found = os.stat(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(half)
            _copy(template.disk, half)
            os.chmod(half, found.st_mode & 0o777)
            os.chown(half, found.st_uid, found.st_gid)
            os.rename(path, f"{path}{_OWN}")
            os.rename(half, path)

    def has_own_disk_aside(self, container: ContainerId) -> bool:
        return os.path.lexists(f"{self._layout.root_disk(container)}{_OWN}")

    def take_back(self, container: ContainerId) -> bool:
        path = self._layout.root_disk(container)
        with _errors("a root disk"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}.half")
            try:
                os.rename(f"{path}{_OWN}", path)
            except FileNotFoundError:
                return False
            return True

    def keep_disk(self, container: ContainerId) -> None:
        with _errors("a root disk"):
            Path(f"{self._layout.root_disk(container)}{_OWN}").unlink(missing_ok=True)


def _seal(memory: int) -> None:
    try:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as exc:
        raise Unavailable(f"a template's memory can still be written to: {exc.strerror}") from exc


def _copy(source: int, path: str) -> None:
    """Shares blocks if the file system can. Holes stay holes. Not synced: a power cut also ends the VM."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as new:
        with open(source, "rb", closefd=False) as old:
            if share_blocks(old, new):
                return
        size = os.fstat(source).st_size
        os.ftruncate(new.fileno(), size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError as exc:
                if exc.errno == errno.ENXIO:  # the rest is a hole
                    return
                raise
            end = os.lseek(source, at, os.SEEK_HOLE)
            while at < end:
                at += os.copy_file_range(source, new.fileno(), min(_PIECE, end - at), at, at)


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        kind = ResourceExhausted if exc.errno in _FULL else InternalError
        raise kind(f"{what} cannot be made or removed: {exc.strerror or exc}") from exc
