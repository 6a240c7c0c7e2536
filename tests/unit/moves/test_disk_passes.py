"""A disk reaches the other node in passes, and each pass sends what has changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted, ShimError, Unavailable
from virtshim.moves.disk_passes import DiskReceiver, DiskSender, wide_pipe

MIB = 1 << 20


class Link:
    """One end of a link whose other end is in this process."""

    peer = "other"

    def __init__(self, out: Queue[Any], into: Queue[Any]) -> None:
        self.out = out
        self.into = into

    def send(self, message: Mapping[str, object], timeout: float) -> None:
        self.out.put(dict(message))

    def receive(self, timeout: float) -> dict[str, Any]:
        found: dict[str, Any] = self.into.get(timeout=timeout)
        return found

    def send_file(self, source: int, idle: float) -> int:
        total = 0
        while data := os.read(source, 300_000):
            self.out.put(data)
            total += len(data)
        self.out.put(b"")
        return total

    def receive_file(self, sink: int, most: int, idle: float) -> int:
        total = 0
        while data := self.into.get(timeout=idle):
            if isinstance(data, ShimError):
                raise data
            left = memoryview(data)
            while left:
                left = left[os.write(sink, left) :]
            total += len(data)
        return total

    def refuse(self, error: ShimError) -> None:
        self.out.put(error)

    def close(self) -> None:
        pass


class Move:
    def __init__(self, directory: Path, content: bytes) -> None:
        self.source, self.target = directory / "source", directory / "target"
        self.source.write_bytes(content)
        self.target.write_bytes(b"an earlier disk, which goes")
        there, back = Queue[Any](), Queue[Any]()
        self.ours, self.theirs = Link(there, back), Link(back, there)
        self.free = 1 << 40
        self.sender = DiskSender(str(self.source), threading.Event())
        self.receiver = DiskReceiver(str(self.target), lambda: self.free)

    def one_pass(self) -> int:
        """The number of bytes that were sent."""
        sent: list[int] = []
        thread = threading.Thread(target=lambda: sent.append(self.sender.send(self.ours, 10)))
        thread.start()
        self.receiver.receive(self.theirs, self.theirs.receive(10), 10)
        thread.join()
        return sent[0]


@pytest.fixture
def move(tmp_path: Path) -> Iterator[Move]:
    made = Move(tmp_path, os.urandom(3 * MIB) + bytes(5 * MIB) + b"the last, short block")
    with contextlib.closing(made.sender), contextlib.closing(made.receiver):
        yield made


def test_a_chunk_of_a_link_fits_into_a_pipe_at_once():
    read, write = wide_pipe()
    os.set_blocking(write, False)
    with os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0) as end:
        assert end.write(bytes(MIB)) == MIB  # nobody reads


def test_a_pipe_is_made_although_the_system_allows_no_wide_ones(monkeypatch):
    def refused(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", refused)
    read, write = wide_pipe()
    os.close(read)
    os.close(write)


def test_the_first_pass_sends_all_but_zeros(move):
    assert move.one_pass() == 4 * MIB
    assert move.target.read_bytes() == move.source.read_bytes()


def test_a_later_pass_sends_only_what_has_changed(move):
    move.one_pass()
    with move.source.open("r+b") as file:
        file.seek(2 * MIB + 5)
        file.write(b"changed")
    assert move.one_pass() == MIB
    assert move.target.read_bytes() == move.source.read_bytes()
    assert move.one_pass() == 0


def test_blocks_that_became_zero_are_sent(move):
    move.one_pass()
    with move.source.open("r+b") as file:
        file.write(bytes(MIB))
    assert move.one_pass() == MIB
    assert move.target.read_bytes() == move.source.read_bytes()


@pytest.mark.parametrize("size", [9 * MIB + 17, MIB // 2, 0])
def test_a_disk_that_grows_or_shrinks_meanwhile_arrives_as_it_is(move, size):
    move.one_pass()
    os.truncate(move.source, size)
    move.one_pass()
    assert move.target.read_bytes() == move.source.read_bytes()


def test_the_file_stays_the_one_that_qemu_has_open(move):
    before = move.target.stat().st_ino
    move.one_pass()
    assert move.target.stat().st_ino == before


@pytest.mark.parametrize(
    "told",
    [
        {"size": MIB, "blocks": [1]},
        {"size": MIB, "blocks": [-1]},
        {"size": MIB, "blocks": [0.5]},
        {"size": MIB, "blocks": ["0"]},
        {"size": -1, "blocks": []},
        {"size": 1 << 60, "blocks": []},
        {"size": "1", "blocks": []},
        {"size": MIB, "blocks": "0"},
        {"size": 2 * MIB, "blocks": [0, 0]},
        {"size": 2 * MIB, "blocks": [1, 0]},
        {"blocks": [0]},
    ],
)
def test_an_impossible_pass_is_refused_before_anything_is_written(move, told):
    with pytest.raises(InvalidRequest, match="node other: sent a pass of a disk with impossible blocks"):
        move.receiver.receive(move.theirs, told, 10)


def test_a_pass_with_too_few_bytes_is_refused(move):
    move.ours.send({}, 1)
    move.theirs.receive(1)
    move.ours.out.put(b"x" * MIB)
    move.ours.out.put(b"")
    with pytest.raises(InvalidRequest, match="another number of blocks"):
        move.receiver.receive(move.theirs, {"size": 2 * MIB, "blocks": [0, 1]}, 10)


def test_a_link_that_breaks_is_the_error(move):
    move.ours.out.put(b"x" * MIB)
    move.ours.refuse(Unavailable("node other: closed the connection"))
    with pytest.raises(Unavailable):
        move.receiver.receive(move.theirs, {"size": 2 * MIB, "blocks": [0, 1]}, 10)


def test_a_pass_that_trickles_has_the_time_of_its_blocks(move, monkeypatch):
    cut = threading.Event()

    def trickle(sink: int, most: int, idle: float) -> int:
        while not cut.wait(0.01):
            os.write(sink, b"x")
        raise Unavailable("node other: closed the connection")

    monkeypatch.setattr(move.theirs, "receive_file", trickle)
    monkeypatch.setattr(move.theirs, "close", cut.set)
    with pytest.raises(Unavailable, match=r"node other: is too slow: 0\.6 s were not enough"):
        move.receiver.receive(move.theirs, {"size": MIB, "blocks": [0]}, 0.1)


def test_a_disk_for_which_there_is_no_room_is_refused_before_it_is_received(move):
    move.free = 66 * MIB
    with pytest.raises(ResourceExhausted, match=r"3 MiB more .* and 66 MiB are free .* make room on this node"):
        move.receiver.receive(move.theirs, {"size": 3 * MIB, "blocks": [0, 1, 2]}, 10)


def test_blocks_that_have_arrived_need_no_more_room(move):
    move.one_pass()
    move.free = 64 * MIB
    with move.source.open("r+b") as file:
        file.write(b"changed")
    assert move.one_pass() == MIB
    assert move.target.read_bytes() == move.source.read_bytes()


def test_a_file_system_that_fills_up_meanwhile_is_the_error(move, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    move.ours.out.put(b"x" * MIB)
    move.ours.refuse(Unavailable("node other: closed the connection"))
    with pytest.raises(ResourceExhausted, match="cannot be written: No space left on device"):
        move.receiver.receive(move.theirs, {"size": MIB, "blocks": [0]}, 10)


@pytest.mark.parametrize(
    "take", [lambda path: DiskSender(path, threading.Event()), lambda path: DiskReceiver(path, lambda: 1 << 40)]
)
def test_a_link_in_place_of_the_disk_is_refused(tmp_path, take):
    own = tmp_path / "own"
    own.write_bytes(b"a file of the node")
    link = tmp_path / "root"
    link.symlink_to(own)
    with pytest.raises(InternalError, match=f"the root disk {link} cannot be"):
        take(str(link))
    assert own.read_bytes() == b"a file of the node"


def test_a_disk_that_shrinks_and_has_its_content_again_arrives_as_it_is(move):
    content = move.source.read_bytes()
    move.one_pass()
    os.truncate(move.source, MIB // 2)
    move.one_pass()
    move.source.write_bytes(content)
    move.one_pass()
    assert move.target.read_bytes() == content


def test_a_block_of_which_a_full_file_system_takes_a_part_arrives_whole(move, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, bytes(data)[:300_000], at))
    move.one_pass()
    assert move.target.read_bytes() == move.source.read_bytes()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_disk_that_cannot_be_emptied_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.touch()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = descriptors()
    monkeypatch.setattr(os, "ftruncate", broken)
    with pytest.raises(InternalError, match="Input/output error"):
        DiskReceiver(str(disk), lambda: 1 << 40)
    assert descriptors() == before


def test_a_pass_without_a_thread_fails_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"x" * MIB)
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "disk-pass":
            raise RuntimeError("can't start new thread")
        start(thread)

    with contextlib.closing(DiskSender(str(disk), threading.Event())) as sender:
        before = descriptors()
        monkeypatch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(ResourceExhausted, match="no thread"):
            sender.send(Link(Queue(), Queue()), 1)
        assert descriptors() == before
