"""The fake, and the VNC client with a server that the test scripts, fulfil the contract of Screenshots."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import zlib
from collections.abc import Callable

import pytest
from fakes.screenshots import FakeScreenshots

from virtshim.attach.screen import VncScreenshots
from virtshim.model.errors import DeadlineExceeded, InternalError, Unavailable
from virtshim.model.ids import ContainerId

A = ContainerId("a" * 64)
BLUE, RED = b"\xff\x00\x00\x00", b"\x00\x00\xff\x00"  # as they come: blue, green, red, nothing

Serve = Callable[[socket.socket], object]


class Screen:
    """Implements Screens on a VNC server that runs in a thread."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    def connect(self, container: ContainerId) -> socket.socket:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._run, args=(theirs,), daemon=True).start()
        return ours

    def _run(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError, AssertionError):  # the client may leave
            self._serve(connected)


class Gone:
    def connect(self, container: ContainerId) -> socket.socket:
        raise Unavailable("the VM has ended")


def begin(connected: socket.socket, width: int = 2, height: int = 2) -> None:
    """Serves the client until it asks for the picture."""
    connected.sendall(b"RFB 003.008\n")
    exactly(connected, 12)
    connected.sendall(b"\1\1")
    exactly(connected, 1)
    connected.sendall(struct.pack(">I", 0))
    exactly(connected, 1)
    connected.sendall(struct.pack(">HH16xI", width, height, 4) + b"QEMU")
    exactly(connected, 20 + 8 + 10)


def exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connected.recv(count - len(data))
        assert piece
        data += piece
    return data


def rectangle(left: int, top: int, across: int, down: int, pixels: bytes, encoding: int = 0) -> bytes:
    return struct.pack(">HHHHi", left, top, across, down, encoding) + pixels


def two_rows(connected: socket.socket) -> None:
    """Sends two rows in two updates, with a bell, colours and a text in between."""
    begin(connected)
    connected.sendall(struct.pack(">BxH", 0, 1) + rectangle(0, 0, 2, 1, BLUE + RED))
    connected.sendall(b"\2" + struct.pack(">BxHH", 1, 0, 1) + bytes(6) + struct.pack(">BxxxI", 3, 2) + b"hi")
    connected.sendall(struct.pack(">BxH", 0, 2) + rectangle(0, 1, 1, 1, RED) + rectangle(1, 1, 1, 1, BLUE))
    connected.recv(1)


def decoded(picture: bytes) -> tuple[int, int, bytes]:
    """Width, height and the unfiltered rows."""
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(picture):
        length = struct.unpack(">I", picture[at : at + 4])[0]
        kind, data = picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]
        assert struct.unpack(">I", picture[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = zlib.decompress(chunks[b"IDAT"])
    line = 1 + 3 * width
    return width, height, b"".join(rows[row * line + 1 : (row + 1) * line] for row in range(height))


def test_a_screen_becomes_a_png_of_its_size_and_colours() -> None:
    assert decoded(VncScreenshots(Screen(two_rows)).take(A, 20)) == (
        2, 2, b"\x00\x00\xff\xff\x00\x00" + b"\xff\x00\x00\x00\x00\xff",
    )  # fmt: skip
    assert decoded(FakeScreenshots().take(A, 20))[:2] == (1, 1)


@pytest.mark.parametrize("part", ["fake", "real"])
def test_an_ended_vm_has_no_screenshot(part: str) -> None:
    screenshots = FakeScreenshots() if part == "fake" else VncScreenshots(Gone())
    if isinstance(screenshots, FakeScreenshots):
        screenshots.gone = True
    with pytest.raises(Unavailable, match="ended"):
        screenshots.take(A, 20)


def test_a_silent_screen_fails_at_the_time_limit() -> None:
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        VncScreenshots(Screen(lambda connected: exactly(connected, 1))).take(A, 0.05)


def answers(*messages: bytes, width: int = 2, height: int = 2) -> Serve:
    def serve(connected: socket.socket) -> None:
        begin(connected, width, height)
        for message in messages:
            connected.sendall(message)

    return serve


def wants_password(connected: socket.socket) -> None:
    connected.sendall(b"RFB 003.008\n")
    exactly(connected, 12)
    connected.sendall(b"\1\2")


@pytest.mark.parametrize(
    "serve",
    [
        lambda connected: None,
        wants_password,
        answers(),
        answers(b"\x09"),
        answers(struct.pack(">BxxxI", 3, 1 << 31)),
        answers(struct.pack(">BxH", 0, 1) + rectangle(1, 0, 2, 2, BLUE * 4)),
        answers(struct.pack(">BxH", 0, 1) + rectangle(0, 0, 2, 2, BLUE * 4, encoding=5)),
        answers(struct.pack(">BxH", 0, 1) + rectangle(0, 0, 0, 0, b"")),
    ],
)
def test_a_lying_qemu_fails_its_own_screenshot_only(serve: Serve) -> None:
    with pytest.raises(InternalError, match="broke off"):
        VncScreenshots(Screen(serve)).take(A, 20)


def test_an_impossibly_large_screen_is_refused() -> None:
    def huge(connected: socket.socket) -> None:
        connected.sendall(b"RFB 003.008\n\1\1" + struct.pack(">I", 0) + struct.pack(">HH16xI", 65535, 65535, 0))
        exactly(connected, 100)

    with pytest.raises(InternalError, match="announces"):
        VncScreenshots(Screen(huge)).take(A, 20)
