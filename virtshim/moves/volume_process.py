"""Uses volumes through a separate process (`virtshim.moves.volume_child`), because any access to a volume hangs if its server is
gone. The process is killed when it has made no progress for some time, or when the caller gives up.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from virtshim.model.errors import Aborted, InternalError, ResourceExhausted, Unavailable
from virtshim.model.text import escaped
from virtshim.moves.fingerprints import Fingerprint, unreadable
from virtshim.moves.ports import PATIENCE
from virtshim.system.process import Piped, piped

# Seconds between two looks at whether the caller has given up.
_POLL: Final = 0.2
_PIECE: Final = 1 << 16
# Bytes that stay free beside the files.
MARGIN: Final = 16 << 20
# Errors that say that something else is in place of a file or directory, or that files are not virtshim's.
ODD: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY})
_START: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from virtshim.moves.volume_child import main; main(sys.argv[2:])"
)
_ROOT: Final = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`sha256`: in hex."""

    bytes: int
    sha256: str


class VolumeProcess:
    """`volume`: its path, for messages. `leave_off`: set when the caller gives up. `patience`: seconds without any progress after
    which the volume counts as hung."""

    def __init__(self, child: Piped, volume: str, leave_off: threading.Event, patience: float) -> None:
        self._patience = patience
        self._child = child
        self._volume = volume
        self._leave_off = leave_off
        self._read = bytearray()

    def ask(self, do: str, *arguments: object) -> Any:
        """Raises OSError of the task, Unavailable if the volume hangs, Aborted if the caller gives up."""
        until = time.monotonic() + self._patience
        left = memoryview(json.dumps([do, *arguments]).encode() + b"\n")
        while left:
            self._wait(self._child.feed, select.POLLOUT, until)
            try:
                left = left[os.write(self._child.feed, left[:_PIECE]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None
        answer = self._answer()
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"])
        return answer["is"]

    def _answer(self) -> Any:
        until = time.monotonic() + self._patience
        while True:
            line, end, rest = self._read.partition(b"\n")
            if end:
                self._read = rest
                if line != b".":
                    return json.loads(line)
                until = time.monotonic() + self._patience
                continue
            self._wait(self._child.answers, select.POLLIN, until)
            with contextlib.suppress(BlockingIOError):
                found = os.read(self._child.answers, _PIECE)
                if not found:
                    raise self._ended()
                self._read += found

    def _wait(self, descriptor: int, event: int, until: float) -> None:
        waiting = select.poll()
        waiting.register(descriptor, event)
        while True:
            if self._leave_off.is_set():
                raise Aborted("the container is being stopped, so its virtual machine's volume is left alone")
            left = until - time.monotonic()
            if waiting.poll(max(0.0, min(left, _POLL)) * 1000):
                return
            if left <= 0:
                raise Unavailable(
                    f"the volume at {escaped(self._volume, 300)} has not answered for {self._patience:.2g} s; its server may be "
                    "gone, so check the node's mounts"
                )

    def _ended(self) -> InternalError:
        return InternalError(
            f"the process that uses the volume at {escaped(self._volume, 300)} has ended: {self._child.end(1.0).summary()}"
        )


@contextlib.contextmanager
def volume_process(volume: str, leave_off: threading.Event, patience: float) -> Iterator[VolumeProcess]:
    """Runs the process within the block. Afterwards it is gone, unless the kernel cannot kill it while the volume hangs. Raises
    InternalError."""
    with piped([sys.executable, "-I", "-S", "-c", _START, _ROOT, str(os.getpid())]) as child:
        yield VolumeProcess(child, volume, leave_off, patience)


class VolumePlace:
    """A VM's directory on a volume. Raises OSError, and what `VolumeProcess.ask` raises."""

    def __init__(self, asked: VolumeProcess) -> None:
        self.asked = asked

    def enter(self, name: str, *, make: bool) -> None:
        """Keeps other nodes away. Raises Unavailable if one is there. `make`: makes the directory."""
        if not self.asked.ask("lock", name, make):
            raise Unavailable("another node uses the VM's state volume now; a retry may succeed")

    def read(self) -> bytes | None:
        """The record; one that is too long has one byte more than allowed."""
        found = self.asked.ask("read")
        return None if found is None else base64.b64decode(found)

    def write(self, record: bytes) -> None:
        self.asked.ask("write", base64.b64encode(record).decode())

    def free_bytes(self) -> int:
        return int(self.asked.ask("free_bytes"))

    def make_room(self, need: int) -> None:
        """Raises ResourceExhausted. Half-written files of an earlier attempt go first."""
        self.asked.ask("remove_half")
        if (free := self.free_bytes()) < need + MARGIN:
            raise ResourceExhausted(
                f"the state volume has {free} bytes free, and the VM's files have {need}; give it room for two copies"
            )

    def begin(self) -> None:
        self.asked.ask("begin")

    def add(self, name: str, source: Path) -> StoredFile:
        return StoredFile(*self.asked.ask("add", name, str(source)))

    def finish(self, generation: int) -> None:
        """The added files become those of that generation."""
        self.asked.ask("finish", generation)

    def fetch(self, generation: int, name: str, size: int, to: Path) -> StoredFile | None:
        """None if the volume has no such file of that size."""
        found = self.asked.ask("fetch", generation, name, size, str(to))
        return None if found is None else StoredFile(*found)

    def remove_file(self, generation: int, name: str) -> None:
        self.asked.ask("remove_file", generation, name)

    def remove_others(self, generation: int) -> None:
        """Removes the files of all other generations."""
        self.asked.ask("remove_others", generation)


@contextlib.contextmanager
def opened_volume(path: str, leave_off: threading.Event) -> Iterator[VolumePlace]:
    """Holds the volume open, so that it is not unmounted meanwhile."""
    with volume_process(path, leave_off, PATIENCE) as asked:
        try:
            asked.ask("volume", path)
        except FileNotFoundError as exc:
            raise Aborted("the pod's state volume is no longer mounted on this node") from exc
        except OSError as exc:
            raise Unavailable(f"the state volume cannot be opened: {exc.strerror}") from exc
        yield VolumePlace(asked)


def volume_fingerprint(path: str, seconds: float, leave_off: threading.Event, *, is_file: bool) -> Fingerprint:
    """Like `fingerprint`, for a disk on a volume, which may hang. Raises Unavailable, at the latest after `seconds`, Aborted,
    InternalError."""
    with volume_process(path, leave_off, seconds) as asked:
        try:
            return Fingerprint(*asked.ask("fingerprint", path, is_file))
        except OSError as exc:
            raise unreadable(path, exc) from exc
