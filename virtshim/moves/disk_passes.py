"""A disk on its way to another node, in passes: the first ones while the guest runs, the last one while it stands still. Each
pass sends the blocks that are no longer as they were sent, so the last one is short.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from virtshim.model.errors import Aborted, InternalError, InvalidRequest, ResourceExhausted
from virtshim.peers.ports import PeerLink

_BLOCK: Final = 1 << 20
# A longer one is refused. Its list of blocks has to fit into one message.
_MOST_BLOCKS: Final = 120_000
# Bytes per second. A node that takes less keeps the VM from other things for too long.
_SLOWEST: Final = 2 << 20
_ZEROS: Final = hashlib.blake2b(bytes(_BLOCK), digest_size=16).digest()
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskSender:
    """Reads the file `path`. One thread at a time. `broken`: ends a pass, with Aborted."""

    def __init__(self, path: str, broken: threading.Event) -> None:
        self._path = path
        self._broken = broken
        self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # Of each block that the other node has.
        self._sums: dict[int, bytes] = {}

    def close(self) -> None:
        os.close(self._file)

    def send(self, link: PeerLink, timeout: float) -> int:
        """One pass. Returns how many bytes were sent."""
        size = os.fstat(self._file).st_size
        if size > _BLOCK * _MOST_BLOCKS:
            raise ResourceExhausted(f"the root disk has {size} bytes, and {_BLOCK * _MOST_BLOCKS} can be moved at most")
        count = -(-size // _BLOCK)
        self._sums = {
            number: found for number, found in self._sums.items() if number < count
        }  # the rest was cut off there
        blocks = [number for number, data in self._blocks(range(count)) if self._is_new(number, data)]
        link.send({"size": size, "blocks": blocks}, timeout)
        patience = timeout + len(blocks) * _BLOCK / _SLOWEST
        with (
            closed_after(patience, link),
            _beside(lambda pipe: self._feed(pipe, blocks), writes=True) as pipe,
        ):
            return link.send_file(pipe, timeout)

    def _is_new(self, number: int, data: bytes) -> bool:
        return _sum(data) != self._sums.get(number, _ZEROS)

    def _feed(self, pipe: int, blocks: Sequence[int]) -> None:
        for number, data in self._blocks(blocks):
            self._sums[number] = _sum(data)  # of what is sent: the guest may write meanwhile
            _write(pipe, data.ljust(_BLOCK, b"\0"))

    def _blocks(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        for number in numbers:
            if self._broken.is_set():
                raise Aborted("the move was broken off")
            try:
                yield number, os.pread(self._file, _BLOCK, number * _BLOCK)
            except OSError as exc:
                raise InternalError(f"the root disk {self._path} cannot be read: {exc.strerror}") from exc


class DiskReceiver:
    """Writes to the file `path`, which keeps its owner, and which a QEMU that waits may have opened already."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with self._errors():
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        os.close(self._file)

    def receive(self, link: PeerLink, told: dict[str, Any], timeout: float) -> None:
        """One pass, of which `told` is the message."""
        size, blocks = _announced(told)
        if blocks is None:
            raise InvalidRequest(f"node {link.peer}: sent a pass of a disk with impossible blocks")
        with self._errors():
            os.ftruncate(self._file, size)
        with _beside(lambda pipe: self._store(pipe, blocks, size), writes=False) as pipe:
            if link.receive_file(pipe, len(blocks) * _BLOCK, timeout) != len(blocks) * _BLOCK:
                raise InvalidRequest(f"node {link.peer}: sent another number of blocks than it said")

    def sync(self) -> None:
        with self._errors():
            os.fsync(self._file)

    def _store(self, pipe: int, blocks: Sequence[int], size: int) -> None:
        with open(pipe, "rb", closefd=False) as source, self._errors():
            for number in blocks:
                data = source.read(_BLOCK)
                if len(data) < _BLOCK:
                    return  # the link has broken, and says so
                _write_at(self._file, data[: size - number * _BLOCK], number * _BLOCK)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            kind = ResourceExhausted if exc.errno in _FULL else InternalError
            raise kind(f"the root disk {self._path} cannot be written: {exc.strerror}") from exc


@contextlib.contextmanager
def closed_after(seconds: float, link: PeerLink) -> Iterator[None]:
    """Closes the link if the block takes longer: a node that is slow at each step, but never too slow, is too slow."""
    timer = threading.Timer(seconds, link.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announced(told: dict[str, Any]) -> tuple[int, list[int] | None]:
    """The size of the disk, and the numbers of the blocks that follow; None if they are impossible."""
    size, blocks = told.get("size"), told.get("blocks")
    if not isinstance(size, int) or not 0 <= size <= _BLOCK * _MOST_BLOCKS:
        return 0, None
    if not isinstance(blocks, list) or not all(isinstance(one, int) and 0 <= one * _BLOCK < size for one in blocks):
        return 0, None
    return size, blocks


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data.ljust(_BLOCK, b"\0"), digest_size=16).digest()


def _write(pipe: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(pipe, left) :]


def _write_at(file: int, data: bytes, at: int) -> None:
    """All of it: a file system that is about to be full takes a part without an error."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written


class _PipeThread(threading.Thread):
    """Works at one end of a pipe."""

    def __init__(self, work: Callable[[int], None], pipe: int) -> None:
        super().__init__(name="disk-pass", daemon=True)
        self._work = work
        self._pipe = pipe
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work(self._pipe)
        except BrokenPipeError:
            pass  # whoever has the other end knows why
        except Exception as exc:  # noqa: BLE001  passed on
            self.error = exc
        finally:
            os.close(self._pipe)


@contextlib.contextmanager
def _beside(work: Callable[[int], None], *, writes: bool) -> Iterator[int]:
    """Yields one end of a pipe, while `work` writes to the other one, or reads from it. Raises what `work` raises."""
    read, write = os.pipe2(os.O_CLOEXEC)
    own, its = (read, write) if writes else (write, read)
    thread = _PipeThread(work, its)
    try:
        yield own
    finally:
        os.close(own)
        thread.join()
        if thread.error is not None:
            raise thread.error
