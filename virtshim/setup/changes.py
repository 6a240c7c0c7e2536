"""Changes files of the node as planned, and reverts them. The manifest records each file before it is changed, so that after a
kill at any point the next run can finish or revert the changes."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from virtshim.model.errors import WrongState
from virtshim.setup.tree import NodeTree, NoRegularFile

# The manifest, /var/lib/virtshim/setup/manifest.json, records what setup wrote, so that setup can revert it. Setup writes the
# manifest before it changes anything.

DIRECTORY: Final = "/var/lib/virtshim/setup"
FILE: Final = f"{DIRECTORY}/manifest.json"
LOCK: Final = f"{DIRECTORY}/lock"
BACKUPS: Final = f"{DIRECTORY}/backups"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Before:
    """A file as it was before setup. `backup`: the path of its content."""

    sha256: str
    mode: int
    uid: int
    gid: int
    backup: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A file that setup wrote. `written`: digests of the content; more than one while setup changes the file. `before`: None if
    the file did not exist."""

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
    """What setup did. `directories`: the directories that it made, parents first. `enabled`, `started`, `masked`: units whose
    state it changed; `started` is None in a manifest of an older version, which had only `enabled`. `pending`: systemctl commands
    that are still to run, because files have changed or will change (`owed` in older manifests). `vms_only`: the choice of
    the last setup."""

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


def read_manifest(tree: NodeTree) -> Manifest:
    """Raises WrongState."""
    if (text := tree.read(FILE)) is None:
        return Manifest()
    try:
        found = _ADAPTER.validate_json(text)
    except ValidationError as exc:
        raise WrongState(
            f"{FILE} is damaged ({exc.error_count()} faults): it no longer tells what setup wrote. Revert the changes by hand, "
            f"with the backups in {BACKUPS}, and remove {DIRECTORY}"
        ) from exc
    if found.version != _VERSION:
        raise WrongState(
            f"{FILE} has version {found.version}, which this virtshim does not support; use the virtshim that wrote it"
        )
    return found


class Action(enum.Enum):
    CREATE = "create"
    REPLACE = "replace"
    """Replaces a file of somebody else, with a backup."""
    UPDATE = "update"
    """Updates a file that setup wrote."""
    SAME = "same"
    KEEP = "keep"
    """Keeps a file that belongs to somebody else, or that was changed since setup wrote it."""
    RESTORE = "restore"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to write. `why`: the reason in a few words. `keeps`: leave an existing file alone if setup did not write it."""

    path: str
    content: bytes
    why: str
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Files to write for one subject, and the problems that the operator has to solve."""

    files: tuple[PlannedFile, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one file. `old`, `new`: the content, None for no file. `note`: why the file is kept. `is_back`: the change
    reverts an earlier setup."""

    path: str
    action: Action
    old: bytes | None
    new: bytes | None
    why: str = ""
    note: str = ""
    is_back: bool = False


def before(tree: NodeTree, manifest: Manifest) -> Mapping[str, bytes | None]:
    """The content before setup of each file that nobody changed since setup wrote it."""
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
    """The changes to make. Files of an earlier plan that are not in this one are reverted. Changes nothing itself."""
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
        note = "it existed before setup" if entry is None else "it was changed since setup wrote it"
        return Change(file.path, Action.KEEP, None, None, file.why, note)
    if entry is not None and not (entry.is_ours(old) or entry.is_as_before(old)):
        return Change(file.path, Action.KEEP, old, old, file.why, "it was changed since setup wrote it")
    if old == file.content:
        return Change(file.path, Action.SAME, old, old, file.why)
    if old is None:
        return Change(file.path, Action.CREATE, None, file.content, file.why)
    if entry is not None and entry.is_ours(old):
        return Change(file.path, Action.UPDATE, old, file.content, file.why)
    if file.keeps and entry is None:
        return Change(file.path, Action.KEEP, old, old, file.why, "it existed before setup")
    return Change(file.path, Action.REPLACE, old, file.content, file.why)


def _taken_back(tree: NodeTree, entry: Entry) -> Change:
    kept = f"; its former content is in {entry.before.backup}" if entry.before else ""
    changed = Change(
        entry.path, Action.KEEP, None, None, note=f"it was changed since setup wrote it{kept}", is_back=True
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
        note = f"the backup of its former content is gone: {entry.before.backup}"
        return Change(entry.path, Action.KEEP, old, old, note=note, is_back=True)
    return Change(entry.path, Action.RESTORE, old, was, is_back=True)


def apply(tree: NodeTree, manifest: Manifest, changes: Sequence[Change]) -> Manifest:
    """Makes the changes. Call `make_state_directory` first."""
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
        # An existing file keeps its mode.
        before = entry_of.before if (entry_of := manifest.entry(change.path)) else None
        if before is None:
            tree.write(change.path, change.new)
        else:
            tree.write(change.path, change.new, before.mode, (before.uid, before.gid))
    manifest = _undone(tree, manifest, [one for one in changes if one.is_back and one.action is not Action.KEEP])
    settled = (replace(entry, written=entry.written[-1:]) for entry in manifest.entries)
    return save(tree, replace(manifest, entries=tuple(settled)))


def undo(tree: NodeTree, manifest: Manifest, changes: Sequence[Change]) -> Manifest:
    """Reverts all changes except those of kept files. Call `forget` afterwards."""
    return _undone(tree, save(tree, manifest), changes)


def forget(tree: NodeTree, manifest: Manifest) -> None:
    """Removes the manifest and the backups."""
    for directory in reversed(manifest.directories):
        tree.remove_directory(directory)
    tree.remove(FILE)
    tree.remove(LOCK)
    tree.remove_directory(BACKUPS)
    tree.remove_directory(DIRECTORY)
    for directory in reversed(manifest.directories):  # the directories of the manifest itself
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
    """Makes the directory of the manifest and the lock. Returns the directories that it made."""
    missing = _missing(tree, f"{BACKUPS}/any")
    for directory in missing:
        tree.make_directory(directory, 0o700 if directory in (DIRECTORY, BACKUPS) else 0o755)
    return tuple(missing)


def save(tree: NodeTree, manifest: Manifest) -> Manifest:
    tree.write(FILE, _ADAPTER.dump_json(manifest, indent=2) + b"\n", 0o600)
    return manifest


def _before(tree: NodeTree, change: Change) -> Before | None:
    """Chooses the path of the backup, so that no existing backup has different content."""
    if change.old is None:
        return None
    name = backup = f"{BACKUPS}/{change.path.strip('/').replace('/', '+')}"
    number = 1
    while (there := tree.read(backup)) is not None and there != change.old:
        number, backup = number + 1, f"{name}.{number}"
    found = tree.status(change.path)
    return Before(digest(change.old), found.st_mode & 0o7777, found.st_uid, found.st_gid, backup)


def _missing(tree: NodeTree, path: str) -> list[str]:
    """The missing directories on the way to `path`, parents first."""
    parts = path.strip("/").split("/")[:-1]
    ways = [f"/{'/'.join(parts[:count])}" for count in range(1, len(parts) + 1)]
    return [way for way in ways if not tree.is_directory(way)]
