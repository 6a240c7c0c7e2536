"""Runs collectors beside each other, each with a time limit and room of its own. What one has found when its time is over stays;
what went wrong is a file beside it."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from virtshim.cli.diag.secrets import Secrets
from virtshim.config.settings import Settings
from virtshim.model.errors import InvalidRequest
from virtshim.system.files import sync

# Seconds.
LIMIT: Final = 60.0


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one file, and of all that one collector finds."""

    file: int = 4 << 20
    collector: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """What is looked at. `settings` are the defaults if the file could not be read: `trouble` says why then."""

    settings: Settings
    config_file: str
    secrets: Secrets
    directory: str = ""
    """Of a node that `up --dir` runs; "" for an installed one."""
    trouble: str = ""


# Path below the collector's own directory, and content.
File = tuple[str, str]
Collector = Callable[[Node], Iterable[File]]


@dataclass(slots=True)
class Gathered:
    """One collector's. Text is as it was found: `Secrets.cleaned` is for when all have ended."""

    name: str
    files: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""
    room: Room = Room()
    _used: int = 0

    def add(self, path: str, text: str) -> None:
        kept = text if len(text) <= self.room.file else _end_of(text, self.room.file)
        self._used += len(kept)
        if self._used > self.room.collector:
            raise OverflowError(f"more than {self.room.collector >> 20} MiB; {path} and what follows is left out")
        self.files[path] = kept


def _end_of(text: str, most: int) -> str:
    """From the beginning of a line on: half a line is half a secret, which nobody recognizes."""
    end = text[-most:]
    return f"... {len(text)} characters, the last of them:\n{end[end.find(chr(10)) + 1 :]}"


def gather(
    collectors: Mapping[str, Collector], node: Node, limit: float = LIMIT, room: Room = Room()
) -> Sequence[Gathered]:
    """In the collectors' order, after `limit` seconds at most: one that hangs is left behind on its thread."""
    until = time.monotonic() + limit
    under_way = [_begun(Gathered(name, room=room), collector, node) for name, collector in collectors.items()]
    found = []
    for gathered, ended in under_way:
        if ended.wait(max(0.0, until - time.monotonic())):
            found.append(gathered)
        else:
            files = dict(gathered.files)
            found.append(Gathered(gathered.name, files, limit, f"did not end within {limit:g} s; this is what it had"))
    return found


def _begun(gathered: Gathered, collector: Collector, node: Node) -> tuple[Gathered, threading.Event]:
    ended = threading.Event()

    def run() -> None:
        since = time.monotonic()
        try:
            for path, text in collector(node):
                gathered.add(path, text)
        except Exception as exc:  # noqa: BLE001  the edge of a thread: one that fails must not stop the others
            gathered.trouble = f"{type(exc).__name__}: {exc}"
        gathered.seconds = time.monotonic() - since
        ended.set()

    threading.Thread(target=run, name=f"diag-{gathered.name}", daemon=True).start()
    return gathered, ended


# One tarball, root's alone, that appears when it is whole.


def archive_write(directory: str, name: str, files: Mapping[str, str], now: int) -> str:
    """DIRECTORY/NAME.tar.gz, in which all is below NAME/. Its path; raises InvalidRequest where it cannot be written."""
    path = f"{directory}/{name}.tar.gz"
    part = f"{directory}/.{name}.part"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                with tarfile.open(fileobj=file, mode="w:gz") as archive:
                    for below, text in files.items():
                        content = text.encode(errors="replace")
                        entry = tarfile.TarInfo(f"{name}/{below}")
                        entry.size, entry.mode, entry.mtime = len(content), 0o600, now
                        archive.addfile(entry, io.BytesIO(content))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            sync(directory)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be written: {exc.strerror}; name a directory with room for it") from exc
    return path
