"""What set-up wrote, so that it can be taken back: written before anything is changed. /var/lib/virtshim/setup/manifest.json"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter, ValidationError

from virtshim.domain.errors import WrongState

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
    `started` None: of a version that did not tell it from `enabled`. `owed`: what systemctl is still to be told, because files
    were changed, or are about to be. `vms_only`: as the last set-up was asked."""

    version: int = _VERSION
    entries: tuple[Entry, ...] = ()
    directories: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    started: tuple[str, ...] | None = None
    owed: tuple[tuple[str, ...], ...] = ()
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
