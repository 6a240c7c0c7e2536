"""Sends the layers of an image to the child that unpacks them, and writes the disk and the files that the child returns.

This process does not look into the layers: it checks only their length and digest. One thread serves both directions: while the
child is not ready for more of a layer, the thread writes bytes of the disk.
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
# Every node unpacks and digests faster than this.
_BYTES_A_CPU_SECOND = 32 << 20

_POLL = 0.2
_STUCK = 120.0
_END = 10.0
_PIECE = 1 << 18
_LONGEST_REFUSAL = 2000
# The longest size that the child may announce.
_MOST_DIGITS = 30


@dataclass(frozen=True, slots=True)
class Layer:
    """`what`: its name in error texts. `digest`: of the blob. `diff`: the digest of the unpacked layer; the same as `digest` if
    it must not be checked. `open`: begins the download. `is_disk`: the unpacked layer is the disk itself."""

    what: str
    digest: str
    diff: str
    open: Callable[[], Generator[bytes, None, None]]
    is_disk: bool = False


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How to unpack an image's layers. `max_bytes`: limit of an unpacked layer. `parser`: reads the layers. `check`: raises if
    the pull must end. `file_made`: called after each file, because while many small files are written no bytes arrive."""

    max_bytes: int
    parser: Parser
    check: Callable[[], None]
    file_made: Callable[[], None] = lambda: None

    def bounds(self, packed: int | None) -> Bounds:
        """Limits for layers of `packed` bytes in all as downloaded; None if that is unknown."""
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
        """Unpacks `layers`, which come from the top down and have `packed` bytes in all. Writes the disk below `place` to `disk`,
        files in /boot to `boot`, and all files to `tree`. Returns whether there is a disk or a kernel. Raises InvalidRequest for
        damaged layers and for an image without disk, kernel and files; also what the downloads, `disk` and `tree` raise."""
        bounds = self.bounds(packed)
        with self.parser.unpack(bounds) as child, selectors.DefaultSelector() as selector:
            callbacks = (self.check, self.file_made)
            exchange = _Exchange(image, child, selector, _Targets(disk, boot, tree), callbacks, bounds)
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
class _Targets:
    """Writers for what the child returns."""

    disk: DiskWriter
    boot: ArrivingBoot | None
    tree: TreeWriter | None


class _Exchange:
    """The exchange of frames with one child, over two pipes."""

    def __init__(
        self,
        image: str,
        child: Piped,
        selector: selectors.BaseSelector,
        targets: _Targets,
        callbacks: tuple[Callable[[], None], Callable[[], None]],
        bounds: Bounds,
    ) -> None:
        self._image = image
        self._child = child
        self._selector = selector
        self.has_disk = True
        self._disk, self._boot, self._tree = targets.disk, targets.boot, targets.tree
        self._check, self._file_made = callbacks
        self._bounds = bounds
        self._head = bytearray()
        self._kind, self._left, self._text = b"", 0, bytearray()
        self._answered = b""
        self._moved_at = time.monotonic()
        selector.register(child.answers, selectors.EVENT_READ)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Raises InvalidRequest if the child refuses the layers."""
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
            # The child has refused the layers, or died. `_wait` raises its last answer.
            while True:
                self._wait()
        return count

    def _wait(self) -> None:
        """Waits briefly for either pipe, and handles the child's output."""
        ready = self._selector.select(_POLL)
        self._check()
        if any(key.fd == self._child.answers for key, _ in ready):
            self._take()
        if ready:
            self._moved_at = time.monotonic()
        elif time.monotonic() - self._moved_at > _STUCK:
            raise DeadlineExceeded(f"image {self._image!r}: unpacking its layers makes no progress; pull it again")

    def _take(self) -> None:
        """Handles the frames of one read. Bytes of the disk are written at once."""
        try:
            data = os.read(self._child.answers, _PIECE)
        except BlockingIOError:
            return
        if not data:
            raise self._error_of(self._child.end(_END))
        rest = memoryview(data)
        while rest:
            rest = rest[self._taken(rest) :]

    def _taken(self, data: memoryview) -> int:
        """Handles the bytes that belong to the current head or payload. Returns their number."""
        wanted = self._left or frames.HEAD_BYTES - len(self._head)
        piece = bytes(data[:wanted])
        if not self._left:
            self._head += piece
            if len(self._head) < frames.HEAD_BYTES:
                return len(piece)
            try:
                self._kind, self._left = frames.parse_head(bytes(self._head))
            except ValueError as exc:
                raise self._invalid_answer() from exc
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
            is_boot_file = self._boot is not None and self._boot.takes(data)
        except ValueError as exc:
            raise self._invalid_answer() from exc
        if not is_boot_file:
            self._disk.write(data)

    def _begin_file(self) -> None:
        try:
            path, size = frames.parse_words(bytes(self._text))
            if self._boot is None:
                raise self._invalid_answer()
            self._boot.begin(path, size)
        except ValueError as exc:
            raise self._invalid_answer() from exc

    def _frame(self) -> None:
        """Handles a frame that is complete."""
        if self._kind == frames.REFUSED:
            raise InvalidRequest(printable_text(self._text[:_LONGEST_REFUSAL].decode(errors="replace")))
        if self._kind == frames.SIZE:
            if not self._text.isdigit() or len(self._text) > _MOST_DIGITS:
                raise self._invalid_answer()
            self._disk.expect(int(self._text))
        elif self._kind == frames.FILE:
            self._begin_file()
        elif self._kind in (frames.END, frames.DONE):
            self._answered = self._kind
        elif self._kind == frames.NO_DISK:
            self.has_disk = False
        elif self._kind in (frames.ENTRY, frames.NO_TREE):
            self._tree_frame()
        elif self._kind not in (frames.DATA, frames.PIECE):
            raise self._invalid_answer()

    def _tree_frame(self) -> None:
        if self._tree is not None and self._kind == frames.ENTRY:
            self._tree.tell(bytes(self._text))
            self._file_made()
        elif self._tree is not None:
            self._tree.refuse(printable_text(self._text[:_LONGEST_REFUSAL].decode(errors="replace")))

    def _invalid_answer(self) -> InternalError:
        return InternalError(
            f"image {self._image!r}: the child that unpacks its layers sent invalid data; pull it again"
        )

    def _error_of(self, done: Finished) -> ShimError:
        what = f"image {self._image!r}: unpacking its layers"
        if done.returncode == frames.CANNOT_CONFINE:
            return InternalError(f"{what} could not start: {done.summary()}")
        if done.returncode == -signal.SIGXCPU:
            return InvalidRequest(
                f"{what} took more than {self._bounds.cpu_seconds} s of processor time, the limit for layers of its size; "
                "push the disk as qcow2, with fewer other files"
            )
        if done.returncode == -signal.SIGKILL:
            return InternalError(f"{what} was killed by signal 9 (no memory left?); pull it again")
        return InternalError(f"{what} failed: {done.summary()}; pull it again")
