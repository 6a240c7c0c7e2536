"""Brings files of the node to what is planned, and back. Whenever it is killed, the next run finishes or takes back: the manifest
says what is to be written before it is."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from virtshim.model.errors import WrongState
from virtshim.setup.tree import NodeTree, NoRegularFile

# What set-up wrote, so that it can be taken back: written before anything is changed.
# /var/lib/virtshim/setup/manifest.json

DIRECTORY: Final = "/var/lib/virtshim/setup"
FILE: Final = f"{DIRECTORY}/manifest.json"
LOCK: Final = f"{DIRECTORY}/lock"
BACKUPS: Final = f"{DIRECTORY}/backups"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Before:
    """A file as it was before set-up; its bytes are in `backup`."""

    sha256: str
    mode: int
    uid: int
    gid: int
    backup: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A file that is set-up's. `written`: digests of what it wrote there; more than one while it is changed. `before`: None if
    there was no such file."""

    path: str
    written: tuple[str, ...]
    before: Before | None = None

    def is_ours(self, content: bytes | None) -> bool:
        return content is not None and digest(content) in self.written

    def is_as_before(self, content: bytes | None) -> bool:
        if content is None or self.before is None:
            return content is None and self.before is None
        return digest(content) == self.before.sha256


@dataclass(frozen=True, slots=True)
class Manifest:
    """`directories`: those that set-up made, parents first. `enabled`, `started`, `masked`: units whose state it changed;
    `started` None: of a version that did not tell it from `enabled`. `pending`: what systemctl is still to be told, because files
    were changed, or are about to be; `owed` in manifests of earlier versions. `vms_only`: as the last set-up was asked."""

    version: int = _VERSION
    entries: tuple[Entry, ...] = ()
    directories: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    started: tuple[str, ...] | None = None
    pending: Annotated[tuple[tuple[str, ...], ...], Field(validation_alias=AliasChoices("pending", "owed"))] = ()
    vms_only: bool = False

    def entry(self, path: str) -> Entry | None:
        return next((one for one in self.entries if one.path == path), None)

    def without(self, path: str) -> Manifest:
        return replace(self, entries=tuple(one for one in self.entries if one.path != path))


_ADAPTER: Final = TypeAdapter(Manifest)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def dumped(manifest: Manifest) -> bytes:
    return _ADAPTER.dump_json(manifest, indent=2) + b"\n"


def parsed(text: bytes | None) -> Manifest:
    """The empty one for None. Raises WrongState."""
    if text is None:
        return Manifest()
    try:
        found = _ADAPTER.validate_json(text)
    except ValidationError as exc:
        raise WrongState(
            f"{FILE} is damaged ({exc.error_count()} faults): what set-up wrote is not known any more. Take it back by hand, "
            f"with what is in {BACKUPS}, and remove {DIRECTORY}"
        ) from exc
    if found.version != _VERSION:
        raise WrongState(f"{FILE} is of another version ({found.version}): use the virtshim that wrote it")
    return found


class Action(enum.Enum):
    CREATE = "create"
    REPLACE = "replace"
    """Of somebody else's, with a backup."""
    UPDATE = "update"
    """Of set-up's own."""
    SAME = "same"
    KEEP = "keep"
    """It is somebody's own, or was changed since."""
    RESTORE = "restore"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """`why` in a few words. `keeps`: a file that is there, and not set-up's, stays as it is."""

    path: str
    content: bytes
    why: str
    mode: int = 0o644
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """`old`, `new`: None for no file. `note` says why a file is kept. `is_back`: what an earlier set-up wrote is taken back."""

    path: str
    action: Action
    old: bytes | None
    new: bytes | None
    why: str = ""
    note: str = ""
    is_back: bool = False


def read_manifest(tree: NodeTree) -> Manifest:
    """Raises WrongState."""
    return parsed(tree.read(FILE))


def before(tree: NodeTree, manifest: Manifest) -> Mapping[str, bytes | None]:
    """What was there, of the files that still are set-up's."""
    return {
        entry.path: None if entry.before is None else tree.read(entry.before.backup)
        for entry in manifest.entries
        if _is_ours(tree, entry)
    }


def _is_ours(tree: NodeTree, entry: Entry) -> bool:
    try:
        return entry.is_ours(tree.read(entry.path))
    except NoRegularFile:
        return False


def planned(tree: NodeTree, manifest: Manifest, files: Sequence[PlannedFile]) -> list[Change]:
    """What has to be done, nothing of it done. What an earlier plan wrote, and this one does not have, goes."""
    wanted = {file.path for file in files}
    stale = [_taken_back(tree, entry) for entry in reversed(manifest.entries) if entry.path not in wanted]
    return [*(_change(tree, manifest.entry(file.path), file) for file in files), *stale]


def taken_back(tree: NodeTree, manifest: Manifest) -> list[Change]:
    return [_taken_back(tree, entry) for entry in reversed(manifest.entries)]


def _change(tree: NodeTree, entry: Entry | None, file: PlannedFile) -> Change:
    try:
        old = tree.read(file.path)
    except NoRegularFile:
        if entry is None and not file.keeps:
            raise
        note = "it was there before set-up" if entry is None else "it was changed since set-up wrote it"
        return Change(file.path, Action.KEEP, None, None, file.why, note)
    if entry is not None and not (entry.is_ours(old) or entry.is_as_before(old)):
        return Change(file.path, Action.KEEP, old, old, file.why, "it was changed since set-up wrote it")
    if old == file.content:
        return Change(file.path, Action.SAME, old, old, file.why)
    if old is None:
        return Change(file.path, Action.CREATE, None, file.content, file.why)
    if entry is not None and entry.is_ours(old):
        return Change(file.path, Action.UPDATE, old, file.content, file.why)
    if file.keeps and entry is None:
        return Change(file.path, Action.KEEP, old, old, file.why, "it was there before set-up")
    return Change(file.path, Action.REPLACE, old, file.content, file.why)


def _taken_back(tree: NodeTree, entry: Entry) -> Change:
    kept = f"; what was there before is in {entry.before.backup}" if entry.before else ""
    changed = Change(
        entry.path, Action.KEEP, None, None, note=f"it was changed since set-up wrote it{kept}", is_back=True
    )
    try:
        old = tree.read(entry.path)
    except NoRegularFile:
        return changed
    if entry.is_as_before(old):
        return Change(entry.path, Action.SAME, old, old, is_back=True)
    if not entry.is_ours(old):
        return replace(changed, old=old, new=old)
    if entry.before is None:
        return Change(entry.path, Action.REMOVE, old, None, is_back=True)
    was = tree.read(entry.before.backup)
    if was is None:
        note = f"what was there before is gone: {entry.before.backup}"
        return Change(entry.path, Action.KEEP, old, old, note=note, is_back=True)
    return Change(entry.path, Action.RESTORE, old, was, is_back=True)


def apply(tree: NodeTree, manifest: Manifest, changes: Sequence[Change], modes: Mapping[str, int]) -> Manifest:
    """Does them; `make_state_directory` was called before. `modes`: of files that are made."""
    writes = [one for one in changes if one.action in (Action.CREATE, Action.REPLACE, Action.UPDATE)]
    for change in writes:
        assert change.new is not None
        known = manifest.entry(change.path) if change.action is Action.UPDATE else None
        entry = known or Entry(change.path, (), _before(tree, change))
        entry = replace(entry, written=(*entry.written, digest(change.new)))
        manifest = replace(manifest.without(change.path), entries=(*manifest.without(change.path).entries, entry))
    missing = [one for change in writes for one in _missing(tree, change.path)]
    manifest = replace(manifest, directories=tuple(dict.fromkeys((*manifest.directories, *missing))))
    save(tree, manifest)
    for change in writes:
        saved = entry_of.before if (entry_of := manifest.entry(change.path)) else None
        if saved is not None and change.action is Action.REPLACE and change.old is not None:
            tree.write(saved.backup, change.old, 0o600)
    for directory in dict.fromkeys(missing):
        tree.make_directory(directory)
    for change in writes:
        assert change.new is not None
        # A file that was there stays as closed as it was.
        before = entry_of.before if (entry_of := manifest.entry(change.path)) else None
        if before is None:
            tree.write(change.path, change.new, modes.get(change.path, 0o644))
        else:
            tree.write(change.path, change.new, before.mode, (before.uid, before.gid))
    manifest = _undone(tree, manifest, [one for one in changes if one.is_back and one.action is not Action.KEEP])
    settled = (replace(entry, written=entry.written[-1:]) for entry in manifest.entries)
    return save(tree, replace(manifest, entries=tuple(settled)))


def undo(tree: NodeTree, manifest: Manifest, changes: Sequence[Change]) -> Manifest:
    """Takes all back but what is kept; `forget` follows."""
    return _undone(tree, save(tree, manifest), changes)


def forget(tree: NodeTree, manifest: Manifest) -> None:
    """Afterwards set-up knows nothing of the node any more."""
    for directory in reversed(manifest.directories):
        tree.remove_directory(directory)
    tree.remove(FILE)
    tree.remove(LOCK)
    tree.remove_directory(BACKUPS)
    tree.remove_directory(DIRECTORY)
    for directory in reversed(manifest.directories):  # those of the manifest itself
        tree.remove_directory(directory)


def _undone(tree: NodeTree, manifest: Manifest, changes: Sequence[Change]) -> Manifest:
    for change in changes:
        entry = manifest.entry(change.path)
        tree.remove_unfinished(change.path)
        if change.action is Action.REMOVE:
            tree.remove(change.path)
        elif change.action is Action.RESTORE and entry is not None and entry.before is not None:
            was = entry.before
            tree.write(change.path, change.new or b"", was.mode, (was.uid, was.gid))
        if change.action is not Action.KEEP or entry is None or entry.before is None:
            if entry is not None and entry.before is not None:
                tree.remove(entry.before.backup)
            manifest = save(tree, manifest.without(change.path))
    return manifest


def make_state_directory(tree: NodeTree) -> tuple[str, ...]:
    """Where the manifest and the lock are; the directories that it made for them."""
    missing = _missing(tree, f"{BACKUPS}/any")
    for directory in missing:
        tree.make_directory(directory, 0o700 if directory in (DIRECTORY, BACKUPS) else 0o755)
    return tuple(missing)


def save(tree: NodeTree, manifest: Manifest) -> Manifest:
    tree.write(FILE, dumped(manifest), 0o600)
    return manifest


def _before(tree: NodeTree, change: Change) -> Before | None:
    """Where its backup goes: no file there has another content."""
    if change.old is None:
        return None
    name = backup = f"{BACKUPS}/{change.path.strip('/').replace('/', '+')}"
    number = 1
    while (there := tree.read(backup)) is not None and there != change.old:
        number, backup = number + 1, f"{name}.{number}"
    found = tree.status(change.path)
    return Before(digest(change.old), found.st_mode & 0o7777, found.st_uid, found.st_gid, backup)


def _missing(tree: NodeTree, path: str) -> list[str]:
    """Directories on the way to it that are not there, parents first."""
    parts = path.strip("/").split("/")[:-1]
    ways = [f"/{'/'.join(parts[:count])}" for count in range(1, len(parts) + 1)]
    return [way for way in ways if not tree.is_directory(way)]
