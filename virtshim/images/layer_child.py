"""Feeds the layers of an image to the child that unpacks them, and writes the disk and the other files that come back.

What is known of the layers here is their length and digest. Both directions are served by one thread: while bytes of a layer
wait to be taken, bytes of the disk are written.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from virtshim.images.confined import frames
from virtshim.images.confined.frames import ALWAYS, DEFAULT_PLACE, RATIO
from virtshim.images.confinement import Bounds, Parser
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.kernels import ArrivingBoot
from virtshim.images.trees.writer import TreeWriter
from virtshim.model.errors import DeadlineExceeded, InternalError, InvalidRequest, ShimError
from virtshim.model.text import printable_text
from virtshim.system.process import Finished, Piped

_MEMORY = 512 << 20
LEAST_CPU_SECONDS = 60
# Slower than any node unpacks and digests.
_BYTES_A_CPU_SECOND = 32 << 20

_POLL = 0.2
_STUCK = 120.0
_END = 10.0
_PIECE = 1 << 18
_LONGEST_REFUSAL = 2000
# Of a size in a tar header.
_MOST_DIGITS = 30


@dataclass(frozen=True, slots=True)
class Layer:
    """`what` names it in error texts, `digest` is the blob's and `diff` the unpacked one's, the same where that is not to be
    checked; `open` begins its download; `is_disk`: unpacked it is the disk itself."""

    what: str
    digest: str
    diff: str
    open: Callable[[], Generator[bytes, None, None]]
    is_disk: bool = False


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How an image's layers are unpacked. `parser` reads them; no unpacked layer may have more than `max_bytes`; `check` raises
    when the pull must end; `file_made` is told of each file: many small ones keep a source waiting."""

    max_bytes: int
    parser: Parser
    check: Callable[[], None]
    file_made: Callable[[], None] = lambda: None

    def bounds(self, packed: int | None) -> Bounds:
        """For layers of so many bytes in all, as they are downloaded; None: nobody says."""
        plain = self.max_bytes if packed is None else min(self.max_bytes, max(ALWAYS, RATIO * packed))
        return Bounds(_MEMORY, LEAST_CPU_SECONDS + plain // _BYTES_A_CPU_SECOND)

    def run(
        self,
        image: str,
        layers: Iterable[Layer],
        disk: DiskWriter,
        packed: int | None = None,
        place: str = DEFAULT_PLACE,
        boot: ArrivingBoot | None = None,
        tree: TreeWriter | None = None,
    ) -> bool:
        """`layers` from the top one down, of so many bytes in all; the disk is below `place` in them, what they have in /boot is
        for `boot`, and their files go to `tree`. Returns whether there is a disk, or a kernel, which needs none. Raises
        InvalidRequest if there is neither, and no other files, or they are damaged, and what a layer's download, the disk and
        the tree raise."""
        bounds = self.bounds(packed)
        with self.parser.unpack(bounds) as child, selectors.DefaultSelector() as selector:
            tell = (self.check, self.file_made)
            exchange = _Exchange(image, child, selector, _Arriving(disk, boot, tree), tell, bounds)
            exchange.send(frames.BEGIN, frames.words(image, str(self.max_bytes), place))
            for layer in layers:
                kind = frames.WHOLE if layer.is_disk else frames.TAR
                exchange.send(frames.LAYER, frames.words(layer.what, layer.digest, layer.diff, kind))
                with contextlib.closing(layer.open()) as chunks:
                    for chunk in chunks:
                        exchange.send(frames.DATA, chunk)
                exchange.send(frames.END)
                exchange.await_answer(frames.END)
            exchange.send(frames.DONE)
            exchange.await_answer(frames.DONE)
            return exchange.has_disk


@dataclass(frozen=True, slots=True)
class _Arriving:
    """What comes back, and where it goes."""

    disk: DiskWriter
    boot: ArrivingBoot | None
    tree: TreeWriter | None


class _Exchange:
    """The two pipes of one child."""

    def __init__(
        self,
        image: str,
        child: Piped,
        selector: selectors.BaseSelector,
        arriving: _Arriving,
        tell: tuple[Callable[[], None], Callable[[], None]],
        bounds: Bounds,
    ) -> None:
        self._image = image
        self._child = child
        self._selector = selector
        self.has_disk = True
        self._disk, self._boot, self._tree = arriving.disk, arriving.boot, arriving.tree
        self._check, self._file_made = tell
        self._bounds = bounds
        self._head = bytearray()
        self._kind, self._left, self._text = b"", 0, bytearray()
        self._answered = b""
        self._moved_at = time.monotonic()
        selector.register(child.answers, selectors.EVENT_READ)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Raises InvalidRequest if the child refuses what it was given."""
        self._moved_at = time.monotonic()
        for data in (frames.head(kind, len(payload)), payload):
            rest = memoryview(data)
            while rest:
                rest = rest[self._written(rest) :]

    def await_answer(self, kind: bytes) -> None:
        self._moved_at = time.monotonic()
        while self._answered != kind:
            self._wait()
        self._answered = b""

    def _written(self, data: memoryview) -> int:
        count = 0
        try:
            count = os.write(self._child.feed, data)
        except BlockingIOError:
            self._selector.register(self._child.feed, selectors.EVENT_WRITE)
            try:
                self._wait()
            finally:
                self._selector.unregister(self._child.feed)
        except BrokenPipeError:
            # It has refused, or died: its last words are on their way.
            while True:
                self._wait()
        return count

    def _wait(self) -> None:
        """For either pipe, a moment; takes what the child says."""
        ready = self._selector.select(_POLL)
        self._check()
        if any(key.fd == self._child.answers for key, _ in ready):
            self._take()
        if ready:
            self._moved_at = time.monotonic()
        elif time.monotonic() - self._moved_at > _STUCK:
            raise DeadlineExceeded(f"image {self._image!r}: unpacking its layers makes no progress; pull it again")

    def _take(self) -> None:
        """One read, of as many frames as come. The disk's bytes go on as they come."""
        try:
            data = os.read(self._child.answers, _PIECE)
        except BlockingIOError:
            return
        if not data:
            raise self._dead(self._child.end(_END))
        rest = memoryview(data)
        while rest:
            rest = rest[self._taken(rest) :]

    def _taken(self, data: memoryview) -> int:
        """How much of it was of the head, or the payload, that is not whole yet."""
        wanted = self._left or frames.HEAD_BYTES - len(self._head)
        piece = bytes(data[:wanted])
        if not self._left:
            self._head += piece
            if len(self._head) < frames.HEAD_BYTES:
                return len(piece)
            try:
                self._kind, self._left = frames.parse_head(bytes(self._head))
            except ValueError as exc:
                raise self._nonsense() from exc
            self._head.clear()
            self._text.clear()
        else:
            self._left -= len(piece)
            if self._kind == frames.DATA:
                self._write(piece)
            elif self._kind != frames.PIECE:
                self._text += piece
            elif self._tree is not None:
                self._tree.write(piece)
        if not self._left:
            self._frame()
        return len(piece)

    def _write(self, data: bytes) -> None:
        try:
            is_boots = self._boot is not None and self._boot.takes(data)
        except ValueError as exc:
            raise self._nonsense() from exc
        if not is_boots:
            self._disk.write(data)

    def _begin_file(self) -> None:
        try:
            path, size = frames.parse_words(bytes(self._text))
            if self._boot is None:
                raise self._nonsense()
            self._boot.begin(path, size)
        except ValueError as exc:
            raise self._nonsense() from exc

    def _frame(self) -> None:
        """A frame is whole."""
        if self._kind == frames.REFUSED:
            raise InvalidRequest(printable_text(self._text[:_LONGEST_REFUSAL].decode(errors="replace")))
        if self._kind == frames.SIZE:
            if not self._text.isdigit() or len(self._text) > _MOST_DIGITS:
                raise self._nonsense()
            self._disk.expect(int(self._text))
        elif self._kind == frames.FILE:
            self._begin_file()
        elif self._kind in (frames.END, frames.DONE):
            self._answered = self._kind
        elif self._kind == frames.NO_DISK:
            self.has_disk = False
        elif self._kind in (frames.ENTRY, frames.NO_TREE):
            self._told_of_files()
        elif self._kind not in (frames.DATA, frames.PIECE):
            raise self._nonsense()

    def _told_of_files(self) -> None:
        if self._tree is not None and self._kind == frames.ENTRY:
            self._tree.tell(bytes(self._text))
            self._file_made()
        elif self._tree is not None:
            self._tree.refuse(printable_text(self._text[:_LONGEST_REFUSAL].decode(errors="replace")))

    def _nonsense(self) -> InternalError:
        return InternalError(f"image {self._image!r}: what unpacks its layers answers with nonsense; pull it again")

    def _dead(self, done: Finished) -> ShimError:
        what = f"image {self._image!r}: unpacking its layers"
        if done.returncode == frames.CANNOT_CONFINE:
            return InternalError(f"{what} is not begun: {done.summary()}")
        if done.returncode == -signal.SIGXCPU:
            return InvalidRequest(
                f"{what} took more than {self._bounds.cpu_seconds} s of processor time, the limit for layers of its size; "
                "push the disk as qcow2, with less beside it"
            )
        if done.returncode == -signal.SIGKILL:
            return InternalError(f"{what} was killed by signal 9 (no memory left?); pull it again")
        return InternalError(f"{what} failed: {done.summary()}; pull it again")
