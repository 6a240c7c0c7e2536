"""The admin socket's door stays open, whatever fails while somebody comes in."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.cri.operator.server import RootGate


@pytest.fixture
def door(tmp_path: Path) -> Iterator[str]:
    """Behind it, each caller is answered "hello"."""
    behind, path = str(tmp_path / "behind"), str(tmp_path / "door")
    server = socket.create_server(behind, family=socket.AF_UNIX, backlog=100)

    def answer() -> None:
        while True:
            try:
                caller, _ = server.accept()
            except OSError:
                return
            with caller:
                caller.sendall(b"hello")

    answering = threading.Thread(target=answer)
    answering.start()
    gate = RootGate(path, behind, allowed=os.getuid(), again=0.001)
    gate.start()
    yield path
    gate.stop()
    server.shutdown(socket.SHUT_RDWR)
    answering.join()
    server.close()


def heard(door: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(60)
        caller.connect(door)
        try:
            return caller.recv(100)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_an_accept_that_fails_is_tried_again(door: str, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The kernel is not to be brought to it for one process alone."""
    accept, failures = socket.socket.accept, [OSError(number, os.strerror(number))]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        found = accept(listener)
        if listener.getsockname() == door and failures:
            found[0].close()
            raise failures.pop()
        return found

    assert heard(door) == b"hello"
    monkeypatch.setattr(socket.socket, "accept", failing)
    assert [heard(door) for _ in range(4)][-1] == b"hello"
    assert failures == []


def test_callers_that_no_thread_can_be_had_for_are_hung_up_on_and_keep_no_place(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may have as many as there is memory for."""

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as none_left:
        none_left.setattr(threading.Thread, "start", no_thread)
        assert {heard(door) for _ in range(70)} == {b""}
    assert heard(door) == b"hello"
