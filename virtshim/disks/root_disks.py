"""Root disks: copy-on-write qcow2 files on top of an image. Each belongs to one container, or to all attempts of a pod's
container."""

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
from virtshim.model.layout import KERNELS, NVRAM, VM_RECORD, Layout, empty_disk_name
from virtshim.model.usage import DiskUsage
from virtshim.model.vm import Disk
from virtshim.system.files import free_bytes, make_directory, remove_tree, space_taken, sync
from virtshim.system.process import Finished, run

_BLOCK = 4096
# Far more combinations of image and size than a node uses; a template takes 1 KiB.
_MAX_TEMPLATES = 256


@dataclass(frozen=True, slots=True)
class OverlayKey:
    """New overlays with the same key are identical."""

    base_path: str
    base_format: DiskFormat
    size: int


@dataclass(frozen=True, slots=True)
class _Template:
    """A file's length, and its blocks that are not all zeros, as (offset, bytes)."""

    length: int
    blocks: tuple[tuple[int, bytes], ...]


class OverlayTemplates:
    """Copies overlays that qemu-img made, because qemu-img takes 10 ms for one, half of that waiting for the disk. A new overlay
    has a header, empty tables and its base's path: a few hundred bytes in 200 KiB of zeros. The templates are only in memory,
    so they cannot be stale or incomplete. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[OverlayKey, _Template] = {}

    def learn(self, key: OverlayKey, path: str) -> None:
        """`path`: an overlay with this key that no VM has used yet. Raises OSError."""
        with open(path, "rb") as file:
            content = file.read()
        blocks = ((offset, content[offset : offset + _BLOCK]) for offset in range(0, len(content), _BLOCK))
        template = _Template(len(content), tuple((offset, block) for offset, block in blocks if any(block)))
        with self._lock:
            if len(self._kept) >= _MAX_TEMPLATES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = template

    def copy(self, key: OverlayKey, path: str) -> bool:
        """Creates the overlay `path`, which must not exist; False if there is no template. Does not sync it, because a power cut
        also ends the VM. Raises OSError, and may leave an incomplete file."""
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
# If less than this is free, qemu-img failed because the disk is full: it needs 200 KiB.
_ROOM_WANTED = 1 << 20
_HALF = ".half"
_POD = re.compile(r"[0-9a-f]{64}")


class RootDiskStore:
    """Implements `virtshim.disks.ports.RootDisks`."""

    def __init__(self, layout: Layout, tpm_states: str = "", run: Callable[..., Finished] = run) -> None:
        """`tpm_states`: libvirt's directory of TPM states, by UUID. `run`: runs qemu-img."""
        self._run = run
        self._layout = layout
        self._tpm_states = tpm_states
        self._templates = OverlayTemplates()

    def create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Ignores a `size_bytes` below the image's own size, because shrinking would destroy the file system."""
        what = f"container {container}"
        size = _size(base, base_path, size_bytes)
        disk = self._layout.root_disk(container)
        self.make_directory(container)
        try:
            Path(disk).unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"{what}: its existing root disk cannot be removed: {exc.strerror}") from exc
        self._overlay(what, disk, base, base_path, size)
        return Disk(path=disk, format=DiskFormat.QCOW2, serial=SERIAL)

    def make_directory(self, container: ContainerId) -> None:
        try:
            self._make_directories(container)
        except OSError as exc:
            raise InternalError(f"container {container}: its directory cannot be created: {exc.strerror}") from exc

    def create_pod_disk(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Like `create`. The disk gets its final name once all of it is on disk."""
        size = _size(base, base_path, size_bytes)
        final = Path(self._layout.pod_disk(name))
        half = final.with_suffix(_HALF)
        try:
            make_directory(final.parent.parent, 0o711)
            make_directory(final.parent, 0o711)
            half.unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"pod disk {name}: its directory cannot be created: {exc.strerror}") from exc
        self._overlay("a disk that stays with its pod", str(half), base, base_path, size)
        try:
            sync(half)
            os.link(half, final)  # unlike a rename, a link never replaces a file
            half.unlink()
            sync(final.parent)
        except OSError as exc:
            half.unlink(missing_ok=True)
            raise InternalError(f"pod disk {name} cannot be given its final name: {exc.strerror}") from exc
        return Disk(path=str(final), format=DiskFormat.QCOW2, serial=SERIAL)

    def pod_disk(self, name: str) -> Disk | None:
        path = self._layout.pod_disk(name)
        return Disk(path=path, format=DiskFormat.QCOW2, serial=SERIAL) if os.path.lexists(path) else None

    def delete_pod_disks(self, pod: str) -> None:
        try:
            for uuid in tpm_uuids(self._layout, pod) if self._tpm_states else ():
                remove_tree(self._tpm_states, uuid)
            directory = Path(self._layout.kept(f"{pod}/root")).parent
            if not (directory / VM_RECORD).exists():
                remove_tree(str(directory.parent), directory.name)
                return
            for name in os.listdir(directory):
                if name != VM_RECORD:
                    remove_tree(str(directory), name)
        except OSError as exc:
            raise InternalError(f"the disks of {pod} cannot be removed: {exc.strerror}") from exc

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
        # The backing format is always given, so qemu-img never probes a raw base whose bytes may imitate qcow2. With -u it does
        # not even open the base, which is untrusted.
        below = ("-F", base.format.value, "-b", base_path)
        argv = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", *below, disk, str(size)]
        done = self._run(argv, timeout=_CREATE_TIMEOUT)
        if done.returncode != 0:
            raise self._failure(what, disk, done.summary())
        with contextlib.suppress(OSError):  # qemu-img then makes the next overlay too
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
            # This directory goes last: `existing` finds a container without a record by it, so the deletion can be repeated.
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
        """Everybody may search the directories, because QEMU's user must reach its disk; the files have mode 0600. Only root may
        enter the sockets' directory: one VM's QEMU must not reach another VM's agent, and libvirt passes QEMU bound sockets."""
        layout = self._layout
        for path, mode in (
            (layout.containers, 0o711),
            (layout.container_dir(container), 0o711),
            (layout.sockets, 0o711),
            (layout.socket_dir(container), 0o700),
        ):
            make_directory(path, mode)

    def _failure(self, what: str, disk: str, words: str) -> InternalError | ResourceExhausted:
        Path(disk).unlink(missing_ok=True)
        if self.free_bytes() < _ROOM_WANTED:
            return ResourceExhausted(f"{what}: there is no space for its root disk in {os.path.dirname(disk)}")
        return InternalError(f"{what}: its root disk cannot be created: {words}")


def _size(base: Image, base_path: str, wanted: int) -> int:
    """The disk's size in bytes, a whole number of sectors. Raises InvalidRequest, NotFound."""
    if wanted > _MAX_BYTES:
        raise InvalidRequest(f"a root volume of {wanted} bytes is too large; at most {_MAX_BYTES} bytes are possible")
    if not Path(base_path).is_file():
        raise NotFound(f"the file of image {base.digest} is gone from this node; pull the image again")
    return -(-max(base.virtual_size, wanted) // _SECTOR) * _SECTOR
