"""Sends a disk to another node in passes. The first passes run while the guest runs, the last one while it is paused. Each pass
sends the blocks that have changed since they were sent, so the last pass is short.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from virtshim.model.errors import Aborted, InternalError, InvalidRequest, ResourceExhausted, ShimError, Unavailable
from virtshim.peers.ports import PeerLink

_BLOCK: Final = 1 << 20
# A longer disk is refused, because its list of blocks must fit into one message.
_MOST_BLOCKS: Final = 120_000
# Bytes per second. A node that takes or sends less keeps the VM from other things for too long.
_SLOWEST: Final = 2 << 20
# Bytes that stay free on the file system, for the other VMs of the node.
_MARGIN: Final = 64 << 20
_ZEROS: Final = hashlib.blake2b(bytes(_BLOCK), digest_size=16).digest()
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskSender:
    """Reads the file `path`. One thread at a time. `broken`: ends a pass, with Aborted."""

    def __init__(self, path: str, broken: threading.Event) -> None:
        self._path = path
        self._broken = broken
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise InternalError(f"the root disk {path} cannot be read: {exc.strerror}") from exc
        # The checksum of each block that the other node has.
        self._sums: dict[int, bytes] = {}

    def close(self) -> None:
        os.close(self._file)

    def send(self, link: PeerLink, timeout: float) -> int:
        """Sends one pass. Returns how many bytes were sent."""
        size = os.fstat(self._file).st_size
        if size > _BLOCK * _MOST_BLOCKS:
            raise ResourceExhausted(f"the root disk has {size} bytes, and {_BLOCK * _MOST_BLOCKS} can be moved at most")
        count = -(-size // _BLOCK)
        self._sums = {
            number: found for number, found in self._sums.items() if number < count
        }  # the rest was cut off there
        blocks = [number for number, data in self._blocks(range(count)) if self._is_new(number, data)]
        link.send({"size": size, "blocks": blocks}, timeout)
        with (
            closed_after(_patience(blocks, timeout), link),
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
    """Writes to the file `path`, which keeps its owner, and which a QEMU that waits may have opened already. `free`: tells the
    bytes that are free on its file system."""

    def __init__(self, path: str, free: Callable[[], int]) -> None:
        self._path = path
        self._free = free
        # The blocks that have arrived.
        self._has: set[int] = set()
        with self._errors():
            self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(self._file, 0)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        os.close(self._file)

    def receive(self, link: PeerLink, told: dict[str, Any], timeout: float) -> None:
        """Receives one pass. `told`: the message that announces it."""
        size, blocks = _announced(told)
        if blocks is None:
            raise InvalidRequest(f"node {link.peer}: sent a pass of a disk with impossible blocks")
        self._has = {one for one in self._has if one * _BLOCK < size}
        self._refuse_without_room(set(blocks) - self._has)
        with self._errors():
            os.ftruncate(self._file, size)
        with (
            closed_after(_patience(blocks, timeout), link),
            _beside(lambda pipe: self._store(pipe, blocks, size), writes=False) as pipe,
        ):
            if link.receive_file(pipe, len(blocks) * _BLOCK, timeout) != len(blocks) * _BLOCK:
                raise InvalidRequest(f"node {link.peer}: sent another number of blocks than it said")
        self._has.update(blocks)

    def _refuse_without_room(self, new: Collection[int]) -> None:
        """The disk may have grown since the other node said how much it takes, and an attacker may control that node."""
        with self._errors():
            free = self._free()
        if len(new) * _BLOCK + _MARGIN > free:
            raise ResourceExhausted(
                f"{len(new)} MiB more of the root disk are to come, and {free >> 20} MiB are free below paths.state_dir; make "
                "room on this node"
            )

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
def closed_after(seconds: float, *links: PeerLink) -> Iterator[None]:
    """Closes the links if the block takes longer than `seconds`; the block then raises Unavailable. Each step has a limit of its
    own, but a node could take almost that long for every step."""
    over = threading.Event()

    def close() -> None:
        over.set()
        for link in links:
            link.close()

    timer = threading.Timer(seconds, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ShimError as exc:
        if over.is_set():
            raise Unavailable(f"node {links[0].peer}: is too slow: {seconds:g} s were not enough") from exc
        raise
    finally:
        timer.cancel()


def _announced(told: dict[str, Any]) -> tuple[int, list[int] | None]:
    """The size of the disk, and the numbers of the blocks that follow; None if they are impossible."""
    size, blocks = told.get("size"), told.get("blocks")
    if not isinstance(size, int) or not 0 <= size <= _BLOCK * _MOST_BLOCKS:
        return 0, None
    if not isinstance(blocks, list) or not all(isinstance(one, int) and 0 <= one * _BLOCK < size for one in blocks):
        return 0, None
    if any(one >= later for one, later in itertools.pairwise(blocks)):  # a pass with repeated blocks could be endless
        return 0, None
    return size, blocks


def _patience(blocks: Sequence[int], idle: float) -> float:
    """Seconds for a pass."""
    return idle + len(blocks) * _BLOCK / _SLOWEST


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


def wide_pipe() -> tuple[int, int]:
    """Both ends of a pipe that holds a chunk of a link, if the system allows that: with the usual 64 KiB, each chunk would take
    many turns of its reader and its writer."""
    read, write = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _BLOCK)
    return read, write


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
    read, write = wide_pipe()
    own, its = (read, write) if writes else (write, read)
    try:
        thread = _PipeThread(work, its)
    except RuntimeError as exc:
        os.close(read)
        os.close(write)
        raise ResourceExhausted(f"no thread for a pass over a disk: {exc}") from exc
    try:
        yield own
    finally:
        os.close(own)
        thread.join()
        if thread.error is not None:
            raise thread.error
