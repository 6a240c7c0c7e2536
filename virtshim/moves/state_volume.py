"""The state of a VM on a volume of its pod (`virtshim.io/state-volume`), so that the VM's next pod may run on another node.

StopPodSandbox copies the VM's files (root disk, firmware variables, saved memory) to the volume before kubelet unmounts it. The
next pod's node copies them back if its own files are older.

A sealed record on the volume counts the VM's starts. A node writes the next number there before it starts the VM. A node with a
lower number in its own record has stale files, and each memory is continued once.

The volume's server may be gone, so all access to the volume is another process's (`virtshim.moves.volume_process`), with a limit
of time.

Tenants may write to the volume. The record has an HMAC with the cluster's key (`saved.key_file`) and the hash of each file.
virtshim checks the HMAC before it parses the record, and uses only this node's copy of a file, whose hash it has checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import os
import re
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from pydantic import TypeAdapter, ValidationError

from virtshim.model.errors import (
    Aborted,
    InvalidRequest,
    ResourceExhausted,
    ShimError,
    Unavailable,
    WrongState,
)
from virtshim.model.ids import SandboxId
from virtshim.model.layout import VM_RECORD, Layout
from virtshim.model.sandbox import identity
from virtshim.moves.ports import SavedVms
from virtshim.moves.values import MEMORY_FILE, Brought, OnVolume, SavedLimits, SavedState, VmRecord
from virtshim.moves.volume_process import MARGIN, ODD, StoredFile, VolumePlace, opened_volume
from virtshim.system.clock import Clock
from virtshim.system.files import free_bytes, remove_tree, sync, without_waiting
from virtshim.system.live import Live
from virtshim.vm.disk_chains import move_images

log = structlog.get_logger(__name__)

_SEALED_AS: Final = b"virtshim state volume 1\n"
# Bytes of the key.
_LEAST_KEY: Final = 32
_MOST_KEY: Final = 4096
# Where files are kept until all of them are there.
_HALF: Final = "state.half"
# The interfaces of a pod, as containerd and Multus name them.
_NICS: Final = ("eth0", *(f"net{number}" for number in range(1, 8)))
_UNKNOWN: Final = "its state volume has no record of it, so its memory may have been used elsewhere"
_NAME: Final = re.compile(r"[a-z][A-Za-z0-9._-]{0,99}")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class VolumeRecord:
    """What the volume says of the VM."""

    # namespace/name/container
    vm: str
    # Counts the VM's starts, on all nodes.
    generation: int
    # The last start: its random name, the id of its node, and that node's host name.
    start: str
    node: str
    host: str
    # Whether the volume has the files as they were when that pod had stopped.
    is_complete: bool
    # When the VM was started or copied last, in nanoseconds since the epoch.
    at: int
    # The generation that the files belong to; 0 without files.
    files_of: int = 0
    # The directory of images on the node that has saved it, which the root disk's header names.
    images: str = ""
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    record: VmRecord | None = None


# A tuple, as `virtshim.store.rows` has it: nested dataclasses are reached through a container type.
_SHAPE: TypeAdapter[tuple[VolumeRecord]] = TypeAdapter(tuple[VolumeRecord])


@dataclass(frozen=True, slots=True)
class StateVolumeFiles:
    """Implements `virtshim.moves.ports.StateVolumes`. `node_id`: of this node's database."""

    node_id: Callable[[], str]
    layout: Layout
    vms: SavedVms
    clock: Clock
    limits: Live[SavedLimits]

    def check(self) -> None:
        state_key(self.limits.now.key_file)

    def macs(self, namespace: str, vm: str) -> Mapping[str, str]:
        try:
            key = state_key(self.limits.now.key_file)
        except WrongState:
            return {}
        return {name: _mac(hmac.digest(key, f"mac\0{namespace}\0{vm}\0{name}".encode(), "sha256")) for name in _NICS}

    def bring(self, volume: str, disk: str, vm: str, leave_off: threading.Event) -> Brought:
        with self._opened(volume, disk, leave_off) as place:
            there, known = place.record(vm), self.vms.get(disk)
            mine = known.volume if known is not None else OnVolume()
            if there is None:
                self._lose_memory(known)
                return Brought(mine)
            if self._is_newest(mine, there):
                return Brought(mine)
            if there.generation < mine.generation:
                raise WrongState(
                    f"the state volume of virtual machine {vm} is older than this node's record of it (start {there.generation}, "
                    f"and {mine.generation} here): it was restored from a backup, or it is another volume. To use what the "
                    f"volume has, remove this node's files with `virtshim vms rm {vm.rpartition('/')[0]}`"
                )
            lost = "" if there.is_complete else _lost(there)
            now = OnVolume(there.generation, there.start, there.at if there.is_complete else 0)
            if there.files_of and there.record is not None:
                self._fetch(place, disk, there, now, lost)
            elif known is not None:
                self.vms.put(dataclasses.replace(known.with_state(None), volume=now, lost=lost))
                self.vms.discard(disk)
            return Brought(now, lost)

    def start(self, volume: str, disk: str, sandbox: SandboxId, leave_off: threading.Event) -> VmRecord:
        known = self.vms.get(disk)
        if known is None:
            raise Aborted("the record of the virtual machine is gone; create the container again")
        with self._opened(volume, disk, leave_off, make=True) as place:
            there = place.record(known.readable)
            if there is None:
                self._lose_memory(known)
                known = self.vms.get(disk) or known
            elif not self._is_newest(known.volume, there):
                raise Aborted(
                    f"virtual machine {known.readable} was started on node {there.host} after this container was created; "
                    "create the container again"
                )
            # From here on StopPodSandbox copies the VM, wherever a kill comes.
            mine = dataclasses.replace(known.volume, path=volume, sandbox=sandbox)
            self.vms.put(dataclasses.replace(known, volume=mine))
            mine = dataclasses.replace(mine, generation=mine.generation + 1, start=secrets.token_hex(8), published_at=0)
            before = there or VolumeRecord(known.readable, 0, "", "", "", is_complete=False, at=0)
            place.keep(
                dataclasses.replace(
                    before,
                    generation=mine.generation,
                    start=mine.start,
                    node=self.node_id(),
                    host=socket.gethostname(),
                    is_complete=False,
                    at=self.clock.now_ns(),
                    files={name: file for name, file in before.files.items() if name != MEMORY_FILE},
                )
            )
            now = dataclasses.replace(known, volume=mine)
            self.vms.put(now)
            place.remove_others(before.files_of)
            place.remove_file(before.files_of, MEMORY_FILE)  # this node has its own copy
        return now

    def publish(self, disk: str) -> None:
        self.check()
        try:
            self._publish(disk)
        except WrongState as exc:  # what a tenant has put there
            raise Aborted(str(exc)) from exc

    def _publish(self, disk: str) -> None:
        known = self.vms.get(disk)
        if known is None:
            raise Aborted("the record of the virtual machine is gone")
        if known.saved is not None and known.saved.taken_by is not None:  # used up, and not yet removed
            known = known.with_state(None)
        saved = known.saved
        if saved is not None and saved.disks and saved.disks.get("") != self.vms.root_fingerprint(disk):
            known = dataclasses.replace(
                known.with_state(None), lost="its root disk was changed after its memory was saved"
            )
        with self._opened(known.volume.path, disk, threading.Event()) as place:
            there = place.record(known.readable)
            if there is None:
                raise Aborted("the volume has no record of the VM's start: it is not mounted, or is another one")
            mine = known.volume
            if self._is_own_start(mine, there):
                mine = dataclasses.replace(mine, generation=there.generation, start=there.start)
            if (mine.generation, mine.start) != (there.generation, there.start):
                raise Aborted(f"node {there.host} has started the virtual machine since")
            known = dataclasses.replace(known, volume=mine)
            if not there.is_complete:
                place.remove_others(there.files_of)
                files = self._copied(place, known)
                there = dataclasses.replace(
                    there,
                    is_complete=True,
                    at=self.clock.now_ns(),
                    files_of=mine.generation,
                    images=self.layout.images,
                    files=files,
                    record=known,
                )
                place.keep(there)
            self.vms.put(dataclasses.replace(known, volume=dataclasses.replace(mine, published_at=there.at)))
            place.remove_others(there.files_of)

    def _is_newest(self, mine: OnVolume, there: VolumeRecord) -> bool:
        """Whether this node's files are the VM's newest. The volume may name the start that this node knows, and have newer
        files nevertheless: this node has looked while the VM ran elsewhere."""
        if self._is_own_start(mine, there):
            return True
        is_same = (mine.generation, mine.start) == (there.generation, there.start)
        return is_same and (mine.published_at > 0 or not there.is_complete or there.node == self.node_id())

    def _is_own_start(self, mine: OnVolume, there: VolumeRecord) -> bool:
        """Whether this node has counted that start on the volume, and died before it did so in its own record."""
        return there.node == self.node_id() and not there.is_complete and there.generation == mine.generation + 1

    def _lose_memory(self, known: VmRecord | None) -> None:
        """If a volume no longer knows a VM that it has known, nobody knows which node has used the memory."""
        if known is not None and known.saved is not None and known.volume.generation:
            self.vms.put(dataclasses.replace(known.with_state(None), lost=_UNKNOWN))
            self.vms.discard(known.disk)

    def _copied(self, place: _Place, vm: VmRecord) -> dict[str, StoredFile]:
        directory = self._directory(vm.disk)
        left_out = "" if vm.saved is not None else MEMORY_FILE
        names = sorted(name for name in os.listdir(directory) if _is_state(name) and name != left_out)
        place.make_room(sum((directory / name).stat().st_size for name in names))
        place.begin()
        files = {}
        for name in names:
            files[name] = place.add(name, directory / name)
        place.finish(vm.volume.generation)
        return files

    def _fetch(self, place: _Place, disk: str, there: VolumeRecord, now: OnVolume, lost: str) -> None:
        assert there.record is not None
        saved = there.record.saved
        has_lapsed = saved is not None and self.clock.now_ns() > self.limits.now.until(saved.saved_at)
        with_memory = there.is_complete and not has_lapsed
        wanted = {name: file for name, file in there.files.items() if with_memory or name != MEMORY_FILE}
        if any(not _is_state(name) for name in wanted):
            raise WrongState("the record on the state volume names files that are no VM's")
        self._replace_files(place, there, there.record, wanted)
        self.vms.put(
            dataclasses.replace(
                there.record,
                saved=self._of_this_node(disk, saved) if saved is not None and with_memory else None,
                lapsed_at=0 if lost else self.clock.now_ns() if has_lapsed else there.record.lapsed_at,
                volume=now,
                lost=lost or there.record.lost,
            )
        )
        log.info("vm.state.fetched", vm=there.vm, node=there.host, files=len(wanted), memory=with_memory)

    def _replace_files(
        self, place: _Place, there: VolumeRecord, record: VmRecord, wanted: Mapping[str, StoredFile]
    ) -> None:
        directory, is_new = self._directory(record.disk), self.vms.get(record.disk) is None
        try:
            self._fetch_files(place, there, record, wanted, is_new=is_new)
        except (OSError, ShimError) as exc:
            with contextlib.suppress(OSError):  # the next call repeats this
                remove_tree(str(directory), _HALF)
                if is_new:
                    remove_tree(str(directory.parent), directory.name)
            if isinstance(exc, ShimError):
                raise
            kind = ResourceExhausted if exc.errno in _FULL else Unavailable
            raise kind(f"the files of the virtual machine cannot be written to {directory}: {exc.strerror}") from exc

    def _fetch_files(
        self, place: _Place, there: VolumeRecord, record: VmRecord, wanted: Mapping[str, StoredFile], *, is_new: bool
    ) -> None:
        directory = self._directory(record.disk)
        half = directory / _HALF
        need = sum(file.bytes for file in wanted.values())
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        remove_tree(str(directory), _HALF)
        if (free := free_bytes(directory)) < need + MARGIN:
            raise ResourceExhausted(
                f"the files of the virtual machine have {need} bytes, and this node has {free} free below paths.state_dir"
            )
        if is_new:  # so that `SaveVm.expire` finds what a kill leaves
            self.vms.put(record.forgotten())
        half.mkdir(mode=0o700)
        for name, file in wanted.items():
            place.bring(there.files_of, name, file, half / name)
        if (root := half / Path(self.layout.pod_disk(record.disk)).name).exists():
            move_images(str(root), there.images, self.layout.images)
        # A crash from here on leaves a record that is older than the volume's, so this is done again.
        self.vms.put(record.forgotten())
        for name in os.listdir(directory):
            if name not in (VM_RECORD, _HALF):
                remove_tree(str(directory), name)
        for name in wanted:
            (half / name).rename(directory / name)
        half.rmdir()
        sync(directory)

    def _of_this_node(self, disk: str, saved: SavedState) -> SavedState:
        """The copy of the root disk is another file, with the content that the hash has proved."""
        root = self.vms.root_fingerprint(disk)
        return dataclasses.replace(saved, disks={**saved.disks, "": root} if saved.disks else {})

    def _directory(self, disk: str) -> Path:
        return Path(self.layout.kept(disk)).parent

    @contextlib.contextmanager
    def _opened(self, volume: str, disk: str, leave_off: threading.Event, *, make: bool = False) -> Iterator[_Place]:
        key = state_key(self.limits.now.key_file)
        name = f"virtshim-{identity(disk)}"
        try:
            with opened_volume(volume, leave_off) as opened:
                opened.enter(name, make=make)
                yield _Place(opened, name, key)
        except OSError as exc:
            if exc.errno in ODD:
                raise WrongState(
                    f"something is in the way on the state volume ({exc.strerror}); remove {name} from it to start the VM "
                    "without the state there"
                ) from exc
            kind = ResourceExhausted if exc.errno in _FULL else Unavailable
            raise kind(f"the state volume cannot be used: {exc.strerror or exc}") from exc


def state_key(path: str) -> bytes:
    """The key that seals states on volumes. `path`: saved.key_file. Raises WrongState."""
    if not path:
        raise WrongState(
            "annotation virtshim.io/state-volume: this node has no key for states on volumes; set saved.key_file to a file "
            "that all nodes of the cluster have"
        )
    try:
        with open(path, "rb", opener=without_waiting) as file:
            found = os.fstat(file.fileno())
            key = file.read(_MOST_KEY + 1)
    except OSError as exc:
        raise WrongState(f"saved.key_file: {path} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise WrongState(f"saved.key_file: {path} must be a regular file of root with mode 0600")
    if not _LEAST_KEY <= len(key) <= _MOST_KEY:
        raise WrongState(f"saved.key_file: {path} must have {_LEAST_KEY} to {_MOST_KEY} bytes of random data")
    return key


class _Place(VolumePlace):
    """A VM's directory on a volume, whose record is sealed with `key`."""

    def __init__(self, opened: VolumePlace, name: str, key: bytes) -> None:
        super().__init__(opened.asked)
        self._name = name
        self._key = key

    def record(self, vm: str) -> VolumeRecord | None:
        """None if the volume has no record. Raises WrongState for one that is not whole, or not of this VM and cluster."""
        try:
            text = self.read()
        except OSError as exc:
            if exc.errno in ODD:
                raise self._refused(vm, "is not a regular file") from exc
            raise
        if text is None:
            return None
        seal, _, body = text.partition(b"\n")
        if not hmac.compare_digest(seal, self._seal(body)):
            raise self._refused(vm, "was changed, cut, or sealed with another cluster's key")
        try:
            found = _SHAPE.validate_json(body)[0]
        except (ValidationError, InvalidRequest) as exc:
            raise self._refused(vm, "is that of a newer version of virtshim") from exc
        if found.vm != vm:
            raise self._refused(vm, f"is that of virtual machine {found.vm}")
        return found

    def keep(self, record: VolumeRecord) -> None:
        body = _SHAPE.dump_json((record,))
        self.write(self._seal(body) + b"\n" + body)

    def bring(self, generation: int, name: str, expected: StoredFile, to: Path) -> None:
        """Raises WrongState for a file that is not the one that was saved."""
        if self.fetch(generation, name, expected.bytes, to) != expected:
            raise WrongState(f"the file {name} on the state volume is not the one that was saved; {self._remedy()}")

    def _seal(self, body: bytes) -> bytes:
        return hmac.digest(self._key, _SEALED_AS + body, "sha256").hex().encode()

    def _refused(self, vm: str, what: str) -> ShimError:
        return WrongState(f"the record of virtual machine {vm} on its state volume {what}; {self._remedy()}")

    def _remedy(self) -> str:
        return f"restore the volume, or remove {self._name} from it to start the VM without that state"


def _is_state(name: str) -> bool:
    """Whether a file of a VM's directory belongs to its state: all files but the record and half-written files."""
    return bool(_NAME.fullmatch(name)) and name != VM_RECORD and not name.endswith((".half", ".new"))


def _mac(digest: bytes) -> str:
    """Locally administered, unicast."""
    octets = bytes([digest[0] & 0xFC | 0x02]) + digest[1:6]
    return octets.hex(":")


def _lost(there: VolumeRecord) -> str:
    at = datetime.fromtimestamp(there.at / 10**9, UTC).isoformat(timespec="seconds")
    kept = "its root disk is the one of the last copy" if there.files_of else "nothing of it was copied"
    where = f"node {there.host}, which started the VM at {at}, has not copied it to its state volume"
    return f"{where}: its memory is lost, and {kept}"
