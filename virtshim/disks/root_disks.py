"""Root disks: one copy-on-write qcow2 a container, or one for all attempts of a pod's container, on top of its image."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from virtshim.disks.disk_places import tpm_uuids
from virtshim.model.errors import InternalError, InvalidRequest, NotFound, ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat, Image
from virtshim.model.layout import KERNELS, NVRAM, Layout, empty_disk_name
from virtshim.model.usage import DiskUsage
from virtshim.model.vm import Disk
from virtshim.system.files import free_bytes, remove_tree, space_taken, sync
from virtshim.system.process import Finished, run

# Overlays as qemu-img made them, kept in memory: the next one over the same base, of the same size, is a copy.
#
# A new overlay holds nothing but a header, empty tables, and its base's path: some hundred bytes in 200 KiB of zeros.
# qemu-img takes 10 ms to make one, half of it waiting for the disk. Nothing of this is on disk, so nothing of it can
# be stale, half-made or left behind: the first overlay after a start of virtshim is qemu-img's again.

_BLOCK = 4096
# A node has few images, and a pod's size of its disk is seldom its own alone; one takes 1 KiB.
_MOST = 256


@dataclass(frozen=True, slots=True)
class OverlayKey:
    """All that one new overlay differs in from another."""

    base_path: str
    base_format: DiskFormat
    size: int


@dataclass(frozen=True, slots=True)
class _Template:
    """A file's length, and its blocks that are not all zeros: (offset, bytes)."""

    length: int
    blocks: tuple[tuple[int, bytes], ...]


class OverlayTemplates:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[OverlayKey, _Template] = {}

    def learn(self, key: OverlayKey, path: str) -> None:
        """`path` is such an overlay, and nobody has used it yet. Raises OSError."""
        with open(path, "rb") as file:
            content = file.read()
        blocks = ((offset, content[offset : offset + _BLOCK]) for offset in range(0, len(content), _BLOCK))
        template = _Template(len(content), tuple((offset, block) for offset, block in blocks if any(block)))
        with self._lock:
            if len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = template

    def copy(self, key: OverlayKey, path: str) -> bool:
        """Makes the overlay `path`, which must not be there; False if no such overlay is known. A power cut may take it: its VM
        ends then, too. Raises OSError, with a part of it made."""
        with self._lock:
            template = self._kept.get(key)
        if template is None:
            return False
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, template.length)
            for offset, block in template.blocks:
                os.pwrite(descriptor, block, offset)
        finally:
            os.close(descriptor)
        return True


SERIAL = "root"

_CREATE_TIMEOUT = 30.0
_SECTOR = 512
_MAX_BYTES = 1 << 46
# With less than this left, a failed qemu-img has met a full disk: it needs 200 KiB.
_ROOM_WANTED = 1 << 20
_HALF = ".half"
_POD = re.compile(r"[0-9a-f]{64}")


class RootDiskStore:
    """Implements `virtshim.disks.ports.RootDisks`."""

    def __init__(self, layout: Layout, tpm_states: str = "", run: Callable[..., Finished] = run) -> None:
        """`tpm_states`: the directory where libvirt keeps what TPMs remember, by UUID. `run` is for qemu-img."""
        self._run = run
        self._layout = layout
        self._tpm_states = tpm_states
        self._templates = OverlayTemplates()

    def create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Grows only: a smaller `size_bytes` than the image's own size is ignored, as cutting would destroy the disk."""
        what = f"container {container}"
        size = _size(base, base_path, size_bytes)
        disk = self._layout.root_disk(container)
        self.make_directory(container)
        try:
            Path(disk).unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"{what}: its earlier root disk cannot be removed: {exc.strerror}") from exc
        self._overlay(what, disk, base, base_path, size)
        return Disk(path=disk, format=DiskFormat.QCOW2, serial=SERIAL)

    def make_directory(self, container: ContainerId) -> None:
        try:
            self._make_directories(container)
        except OSError as exc:
            raise InternalError(f"container {container}: its directory cannot be made: {exc.strerror}") from exc

    def create_pod_disk(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        """As `create`. The final name is given when all of it is on disk."""
        size = _size(base, base_path, size_bytes)
        final = Path(self._layout.pod_disk(name))
        half = final.with_suffix(_HALF)
        try:
            _make_directory(self._layout.pod_disks, 0o711)
            _make_directory(str(final.parent), 0o711)
            half.unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"pod disk {name}: its directory cannot be made: {exc.strerror}") from exc
        self._overlay("a disk that stays with its pod", str(half), base, base_path, size)
        try:
            sync(half)
            os.link(half, final)  # unlike a rename it never replaces
            half.unlink()
            sync(final.parent)
        except OSError as exc:
            half.unlink(missing_ok=True)
            raise InternalError(f"pod disk {name} cannot be put in its place: {exc.strerror}") from exc
        return Disk(path=str(final), format=DiskFormat.QCOW2, serial=SERIAL)

    def pod_disk(self, name: str) -> Disk | None:
        path = self._layout.pod_disk(name)
        return Disk(path=path, format=DiskFormat.QCOW2, serial=SERIAL) if os.path.lexists(path) else None

    def delete_pod_disks(self, pod: str) -> None:
        try:
            for uuid in tpm_uuids(self._layout, pod) if self._tpm_states else ():
                remove_tree(self._tpm_states, uuid)
            remove_tree(self._layout.pod_disks, pod)
        except OSError as exc:
            raise InternalError(f"the disks of pod {pod} cannot be removed: {exc.strerror}") from exc

    def pods_with_disks(self) -> frozenset[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._layout.pod_disks) as entries:
            return frozenset(entry.name for entry in entries if _POD.fullmatch(entry.name))
        return frozenset()

    def _overlay(self, what: str, disk: str, base: Image, base_path: str, size: int) -> None:
        key = OverlayKey(base_path, base.format, size)
        try:
            if self._templates.copy(key, disk):
                return
        except OSError as exc:
            raise self._failure(what, disk, f"it cannot be written: {exc.strerror}") from exc
        # The backing format is always given: a raw base whose guest-written bytes look like qcow2 must never be probed.
        # -u: it is not opened either; size and format are known, and a stranger wrote it.
        argv = [
            "qemu-img",
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-F",
            base.format.value,
            "-b",
            base_path,
            disk,
            str(size),
        ]
        done = self._run(argv, timeout=_CREATE_TIMEOUT)
        if done.returncode != 0:
            raise self._failure(what, disk, done.summary())
        with contextlib.suppress(OSError):  # the next one is qemu-img's, too
            self._templates.learn(key, disk)

    def delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        try:
            if disk_alone:
                Path(self._layout.root_disk(container)).unlink(missing_ok=True)
                Path(self._layout.container_dir(container), NVRAM).unlink(missing_ok=True)
                own = Path(self._layout.container_dir(container))
                for file in (*own.glob(empty_disk_name("*")), *own.glob(f"{KERNELS}*")):
                    file.unlink(missing_ok=True)
                return
            remove_tree(self._layout.sockets, container.short)
            remove_tree(self._layout.vnc_sockets, container.short)
            # Last: of a container without a record this alone is known, to who repeats it.
            remove_tree(self._layout.containers, container.value)
        except OSError as exc:
            raise InternalError(f"container {container}: its files cannot be removed: {exc.strerror}") from exc

    def existing(self) -> frozenset[ContainerId]:
        found = set()
        with contextlib.suppress(FileNotFoundError), os.scandir(self._layout.containers) as entries:
            for entry in entries:
                with contextlib.suppress(InvalidRequest):
                    container = ContainerId(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        found.add(container)
        return frozenset(found)

    def use(self, container: ContainerId, pod_disk: str = "") -> DiskUsage | None:
        directory = Path(self._layout.container_dir(container))
        try:
            room = os.statvfs(directory)
        except FileNotFoundError:
            return None
        disk = (Path(self._layout.pod_disk(pod_disk)),) if pod_disk else ()
        used, inodes = space_taken((directory, *directory.rglob("*"), *disk))
        return DiskUsage(
            taken_at=time.time_ns(),
            directory=self._layout.containers,
            used_bytes=used,
            inodes_used=inodes,
            filesystem_bytes=room.f_blocks * room.f_frsize,
            filesystem_inodes=room.f_files,
            filesystem_inodes_free=room.f_ffree,
        )

    def free_bytes(self) -> int:
        return free_bytes(self._layout.containers)

    def _make_directories(self, container: ContainerId) -> None:
        """Searchable by all, as the QEMU user must reach its disk; the files are 0600. The sockets' directory is root's alone:
        libvirt binds the sockets and passes them on, and one VM's QEMU must not reach another's agent."""
        layout = self._layout
        for path, mode in (
            (layout.containers, 0o711),
            (layout.container_dir(container), 0o711),
            (layout.sockets, 0o711),
            (layout.socket_dir(container), 0o700),
        ):
            _make_directory(path, mode)

    def _failure(self, what: str, disk: str, words: str) -> InternalError | ResourceExhausted:
        Path(disk).unlink(missing_ok=True)
        if self.free_bytes() < _ROOM_WANTED:
            return ResourceExhausted(f"{what}: no space for its root disk in {os.path.dirname(disk)}")
        return InternalError(f"{what}: its root disk cannot be made: {words}")


def _size(base: Image, base_path: str, wanted: int) -> int:
    """Bytes, whole sectors. Raises InvalidRequest, NotFound."""
    if wanted > _MAX_BYTES:
        raise InvalidRequest(f"a root volume of {wanted} bytes is too large; at most {_MAX_BYTES} are possible")
    if not Path(base_path).is_file():
        raise NotFound(f"the file of image {base.digest} is gone from this node; pull the image again")
    return -(-max(base.virtual_size, wanted) // _SECTOR) * _SECTOR


def _make_directory(path: str, mode: int) -> None:
    directory = Path(path)
    directory.mkdir(mode=mode, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o777 != mode:
        directory.chmod(mode)
