"""`virtshim cp` copies files and directories into a VM and out of it: a tar stream through the guest's agent.

The guest may be hostile. So the reader for untrusted layers reads its archive, only files and directories are extracted, and no
symbolic link below the target is followed.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import NodeClient, connected
from virtshim.images.confined.layer_tar import BadTar, EntryKind, TarStream
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.model.text import printable_text
from virtshim.streaming import client as streaming
from virtshim.streaming.client import ERROR, STDERR, STDIN, STDOUT, StreamClient
from virtshim.streaming.ports import Streams
from virtshim.streaming.remotecommand_status import Exited, Failed, from_status

_PIECE: Final = 64 << 10
# Bytes of a command's errors that are shown.
_SHOWN: Final = 2000
# Says what the target is: a directory, or a new name in one.
_LOOK: Final = 'if [ -d "$1" ]; then echo inside; elif [ -d "$2" ]; then echo named; fi'


@dataclass(frozen=True, slots=True)
class Place:
    """`vm`: "" for this machine."""

    vm: str
    path: str


def parse_place(word: str) -> Place:
    """`VM:PATH`, or a path of this machine. A path with a colon begins with `/` or `./`."""
    vm, colon, path = word.partition(":")
    return Place(vm, path) if colon and not word.startswith((".", "/")) else Place("", word)


def copy(cri_socket: str, source: str, target: str) -> int:
    """Returns the exit code: 1 if something was left out. Raises ShimError."""
    here, there = parse_place(source), parse_place(target)
    if bool(here.vm) == bool(there.vm):
        raise InvalidRequest(
            "one of SOURCE and TARGET must be VM:PATH, such as web:/etc/hosts, and the other a path here"
        )
    if not (here.path and there.path):
        raise InvalidRequest("SOURCE and TARGET must name a file or a directory: the path is empty")
    with connected(cri_socket) as node:
        guest = _Guest(node, running_vm(here.vm or there.vm, node.pods(), node.vms()).id)
        return _bring_in(guest, here.path, there.path) if there.vm else _bring_out(guest, here.path, there.path)


class _Command:
    """A command in the guest. tarfile writes to its input, and `output` yields what it prints."""

    def __init__(self, client: StreamClient, *, wants_output: bool) -> None:
        self._client = client
        self._wants_output = wants_output
        self._output: list[bytes] = []
        self._errors = b""
        self._status = b""
        self._receive()  # data may have come with the handshake's answer

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), _PIECE):
            if self._client.is_closed:
                self.check()
                raise Unavailable("the command in the guest ended before it had read all data")
            self._client.send(STDIN, bytes(data[start : start + _PIECE]))
            while self._client.pending and not self._client.is_closed:
                self._wait()
        return len(data)

    def output(self) -> Iterator[bytes]:
        while self._output or not self._client.is_closed:
            if not self._output:
                self._wait()
            yield from self._output
            self._output.clear()

    def end(self) -> None:
        """Ends its input and waits for its end. Raises ShimError if it failed."""
        self._client.close_channel(STDIN)
        self._wants_output = False
        while not self._client.is_closed:
            self._wait()
        self.check()

    def check(self) -> None:
        """Raises ShimError if the command has ended and not succeeded."""
        if not self._status:
            raise Unavailable("the node closed the stream before the end of the copy; was virtshim stopped?")
        match from_status(self._status):
            case Exited(0):
                return
            case Exited(code):
                said = printable_text(self._errors.decode(errors="replace").strip())
                raise WrongState(f"the guest's command ended with code {code}: {said or 'it printed nothing'}")
            case Failed(message):
                raise WrongState(message)

    def _wait(self) -> None:
        sending = [self._client.fileno()] if self._client.pending else []
        readable, writable, _ = select.select([self._client.fileno()], sending, [])
        if writable:
            self._client.flush()
        if readable:
            self._receive()

    def _receive(self) -> None:
        for piece in self._client.receive():
            if piece.channel == STDOUT and self._wants_output:
                self._output.append(piece.data)
            elif piece.channel == STDERR:
                self._errors = (self._errors + piece.data)[-_SHOWN:]
            elif piece.channel == ERROR:
                self._status += piece.data


@dataclass(frozen=True, slots=True)
class _Guest:
    node: NodeClient
    vm: str

    @contextlib.contextmanager
    def running(self, *words: str, wants_output: bool = False) -> Iterator[_Command]:
        url = self.node.exec_url(self.vm, words, Streams(stdin=True, stdout=True, stderr=True))
        with contextlib.closing(streaming.connect(url)) as client:
            yield _Command(client, wants_output=wants_output)

    def says(self, *words: str) -> str:
        with self.running(*words, wants_output=True) as command:
            said = b"".join(command.output())
            command.check()
            return said.decode(errors="replace").strip()


def _bring_in(guest: _Guest, source: str, target: str) -> int:
    if not os.path.lexists(source):
        raise NotFound(f"{source} does not exist")
    parent, name = os.path.split(target.rstrip("/") or "/")
    match guest.says("sh", "-c", _LOOK, "sh", target, parent or "."):
        case "inside":
            directory, name = target, os.path.basename(os.path.abspath(source))
        case "named":
            directory = parent or "."
        case _:
            raise NotFound(f"the guest has no directory {parent or '.'}; make it with `virtshim exec` and mkdir -p")
    with guest.running("tar", "-x", "-f", "-", "-C", directory) as command:
        writer: Any = command
        try:
            # GNU's format, which busybox reads too.
            with tarfile.open(fileobj=writer, mode="w|", format=tarfile.GNU_FORMAT) as tar:
                tar.add(source, arcname=name, filter=_as_root)
        except OSError as exc:
            raise WrongState(f"{exc.filename or source} cannot be read: {exc.strerror or exc}") from exc
        command.end()
    return _report(_sockets(source))


def _sockets(source: str) -> list[str]:
    """The sockets below the source, which tarfile leaves out."""
    found = [source, *(os.path.join(at, name) for at, _, names in os.walk(source) for name in names)]
    return [path for path in found if Path(path).is_socket() and not os.path.islink(path)]


def _report(left_out: Sequence[str]) -> int:
    for one in left_out:
        print(f"cp: left out, because it is neither a file nor a directory: {printable_text(one)}", file=sys.stderr)
    return 1 if left_out else 0


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _bring_out(guest: _Guest, source: str, target: str) -> int:
    parent, name = os.path.split(source.rstrip("/") or "/")
    directory, new = (target, name) if os.path.isdir(target) else os.path.split(target.rstrip("/"))
    if not name or not new:
        raise InvalidRequest(f"{source or '/'} has no name of its own; name a file or a directory in it")
    try:
        place = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise NotFound(f"{directory} cannot be opened: {exc.strerror}") from exc
    try:
        with guest.running("tar", "-c", "-f", "-", "-C", parent or ".", "--", name, wants_output=True) as command:
            try:
                left_out = unpack(command.output(), place, new)
            except BadTar as exc:
                command.end()  # its own error says more
                raise WrongState(f"the guest's tar sent a broken archive: {exc}") from exc
            except OSError as exc:
                raise WrongState(f"{exc.filename or target} cannot be written: {exc.strerror or exc}") from exc
            command.check()
    finally:
        os.close(place)
    return _report(left_out)


def unpack(chunks: Iterator[bytes], place: int, new: str) -> Sequence[str]:
    """Makes the archive's files and directories in the directory `place`; its top has the name `new` there. Returns the names of
    links and devices, which are left out. Raises BadTar, OSError."""
    left_out: list[str] = []
    modes: list[tuple[tuple[str, ...], int]] = []
    tar = TarStream(chunks)
    while (entry := tar.next()) is not None:
        parts = tuple(part for part in PurePosixPath(entry.name).parts if part != ".")
        if not parts or parts[0] == "/" or ".." in parts or "\0" in entry.name:
            raise BadTar(f"it names {printable_text(entry.name[:200])}, which was not requested")
        parts = (new, *parts[1:])
        if entry.kind is EntryKind.DIRECTORY:
            with _opened(place, parts[:-1]) as above, contextlib.suppress(FileExistsError):
                os.mkdir(parts[-1], 0o700, dir_fd=above)
                modes.append((parts, entry.mode & 0o777))
        elif entry.kind is EntryKind.FILE:
            with _opened(place, parts[:-1]) as above:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(parts[-1], flags, 0o600, dir_fd=above)
            with open(descriptor, "wb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(0, "it exists and is not a file", parts[-1])
                file.writelines(tar.data())
                os.fchmod(descriptor, entry.mode & 0o777)
        else:
            left_out.append(entry.name)
    for parts, mode in reversed(modes):
        with _opened(place, parts) as directory:
            os.fchmod(directory, mode)
    return left_out


@contextlib.contextmanager
def _opened(place: int, parts: Sequence[str]) -> Iterator[int]:
    """The directory at that path below `place`. Follows no symbolic link."""
    descriptor = os.dup(place)
    try:
        for part in parts:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)
