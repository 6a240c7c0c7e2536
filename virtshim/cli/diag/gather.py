"""Runs collectors in parallel, each with its own limits of time and size. Files that a collector found before its time was up
are kept; an error becomes a file beside them. Writes all files into one archive."""

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
    """Limits in bytes: of one file, and of all files of one collector."""

    file: int = 4 << 20
    collector: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """The node to examine. If its settings file could not be read, `settings` are the defaults and `trouble` says why."""

    settings: Settings
    config_file: str
    secrets: Secrets
    directory: str = ""
    """Directory of a node that `up --dir` runs; "" for an installed node."""
    trouble: str = ""


# (path below the collector's directory, content)
File = tuple[str, str]
Collector = Callable[[Node], Iterable[File]]


@dataclass(slots=True)
class Gathered:
    """What one collector found. The text still holds secrets: `Secrets.cleaned` removes them when all collectors have ended."""

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
            raise OverflowError(f"more than {self.room.collector >> 20} MiB; {path} and later files are left out")
        self.files[path] = kept


def _end_of(text: str, most: int) -> str:
    """The end of the text, from the start of a line: half a line may hold half a secret, which would not be recognized."""
    end = text[-most:]
    return f"... {len(text)} characters, the last of them:\n{end[end.find(chr(10)) + 1 :]}"


def gather(
    collectors: Mapping[str, Collector], node: Node, limit: float = LIMIT, room: Room = Room()
) -> Sequence[Gathered]:
    """Results in the collectors' order, after at most `limit` seconds. A collector that hangs is left on its thread."""
    until = time.monotonic() + limit
    under_way = [_begun(Gathered(name, room=room), collector, node) for name, collector in collectors.items()]
    found = []
    for gathered, ended in under_way:
        if ended.wait(max(0.0, until - time.monotonic())):
            found.append(gathered)
        else:
            files = dict(gathered.files)
            found.append(
                Gathered(
                    gathered.name,
                    files,
                    limit,
                    f"did not end within {limit:g} s; these are the files that it had found",
                )
            )
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


def write_archive(directory: str, name: str, files: Mapping[str, str], now: int) -> str:
    """Writes DIRECTORY/NAME.tar.gz, with all files below NAME/, and returns its path. Only root can read the archive. It
    appears under its name only when it is complete. Raises InvalidRequest if it cannot be written."""
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
