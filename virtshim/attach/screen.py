"""The screens of VMs: connections to the VNC sockets that their QEMUs made. Implements `virtshim.streaming.ports.Screens`.

While a VM starts, its QEMU owns the directory of its VNC socket. So QEMU could have put something else under that name.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Callable
from typing import Final

import structlog

from virtshim.model.errors import DeadlineExceeded, InternalError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout, vnc_socket
from virtshim.streaming.ports import Screens
from virtshim.system.peers import WrongPeer, connect_to

# PNG files of pictures in 24-bit colour. Pure. The format: W3C, "Portable Network Graphics".

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# Bits per sample, and the number for colour without alpha; then deflate, the only filter method, and no interlace.
_RGB: Final = (8, 2, 0, 0, 0)


def png_encoded(width: int, height: int, pixels: bytes) -> bytes:
    """`pixels`: red, green and blue, a byte each, row by row."""
    row = width * 3
    rows = b"".join(b"\0" + pixels[start : start + row] for start in range(0, row * height, row))
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *_RGB)),
            _chunk(b"IDAT", zlib.compress(rows, 6)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# Takes pictures of VMs' screens as a VNC client (RFC 6143). Implements `virtshim.vm.ports.Screenshots`.
#
# libvirt's own screenshot is not used: QEMU would have to write a file, which a confined QEMU may not. The size and
# time of QEMU's answers are limited.

_VERSION: Final = b"RFB 003.008\n"
_NO_PASSWORD: Final = 1
_RAW: Final = 0
# 32 bits a pixel, 24 of them used, little-endian: blue, green, red, nothing.
_FORMAT: Final = struct.pack(">BBBBHHHBBBxxx", 32, 24, 0, 1, 255, 255, 255, 16, 8, 0)
_PIXEL: Final = 4
# Screens of guests are smaller, so a larger size from QEMU is refused.
_MOST_PIXELS: Final = 64 << 20
_MOST_TEXT: Final = 1 << 20
# Messages of a server.
_UPDATE, _COLOURS, _BELL, _CUT_TEXT = range(4)


class VncScreenshots:
    def __init__(self, screens: Screens) -> None:
        self._screens = screens

    def take(self, container: ContainerId, timeout: float) -> bytes:
        until = time.monotonic() + timeout
        with contextlib.closing(self._screens.connect(container)) as screen:
            try:
                return _picture(_Server(screen, until))
            except TimeoutError as exc:
                raise DeadlineExceeded(
                    f"the screen of container {container.short} did not answer in {timeout:g} s"
                ) from exc
            except (OSError, EOFError) as exc:
                raise InternalError(f"the screen of container {container.short} broke off: {exc}") from exc


class _Server:
    """The connection to a VNC server. Reads and writes until a point of the monotonic clock. Raises OSError,
    TimeoutError, EOFError."""

    def __init__(self, connected: socket.socket, until: float) -> None:
        self._socket = connected
        self._until = until

    def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(self._left())
            piece = self._socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError("QEMU closed it")
            data += piece
        return bytes(data)

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(f">{layout}", self.read(struct.calcsize(f">{layout}")))

    def write(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(data)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _picture(server: _Server) -> bytes:
    width, height = _begun(server)
    server.write(struct.pack(">Bxxx", 0) + _FORMAT)
    server.write(struct.pack(">BxHi", 2, 1, _RAW))
    server.write(struct.pack(">BBHHHH", 3, 0, 0, 0, width, height))
    pixels, missing = bytearray(width * height * 3), width * height
    while missing > 0:
        kind = server.numbers("B")[0]
        if kind == _UPDATE:
            for _ in range(server.numbers("xH")[0]):
                missing -= _rectangle(server, pixels, width, height)
        elif kind == _COLOURS:
            server.read(6 * server.numbers("xHH")[1])
        elif kind == _CUT_TEXT:
            server.read(_bounded(server.numbers("xxxI")[0], _MOST_TEXT))
        elif kind != _BELL:
            raise OSError(f"it sends a message of kind {kind}")
    return png_encoded(width, height, bytes(pixels))


def _begun(server: _Server) -> tuple[int, int]:
    """Makes the handshake. Returns the screen's size."""
    server.read(len(_VERSION))
    server.write(_VERSION)
    kinds = server.read(server.numbers("B")[0])
    if _NO_PASSWORD not in kinds:
        raise OSError("it wants a password")
    server.write(bytes([_NO_PASSWORD]))
    if server.numbers("I")[0]:
        raise OSError("it lets nobody in")
    server.write(b"\1")  # beside others
    width, height, name = server.numbers("HH16xI")
    server.read(_bounded(name, _MOST_TEXT))
    if not width or not height:
        raise OSError("it is empty")
    _bounded(width * height, _MOST_PIXELS)
    return width, height


def _rectangle(server: _Server, pixels: bytearray, width: int, height: int) -> int:
    """Reads one rectangle. Returns its number of pixels."""
    left, top, across, down, encoding = server.numbers("HHHHi")
    if encoding != _RAW or left + across > width or top + down > height or not across * down:
        raise OSError("it sent data that nobody requested")
    for line in range(top, top + down):
        row = server.read(across * _PIXEL)
        rgb = bytearray(across * 3)
        rgb[0::3], rgb[1::3], rgb[2::3] = row[2::4], row[1::4], row[0::4]
        start = (line * width + left) * 3
        pixels[start : start + across * 3] = rgb
    return across * down


def _bounded(number: int, most: int) -> int:
    if number > most:
        raise OSError(f"it announces {number}, but at most {most} is allowed")
    return number


log = structlog.get_logger(__name__)

# Seconds for a QEMU that serves another client's handshake.
_CONNECT: Final = 5


class ScreenSockets:
    def __init__(self, layout: Layout, qemu_of: Callable[[ContainerId], int | None]) -> None:
        """`qemu_of`: the process id of the container's QEMU, None if there is none."""
        self._layout = layout
        self._qemu_of = qemu_of

    def connect(self, container: ContainerId) -> socket.socket:
        pid = self._qemu_of(container)
        if pid is None:
            raise Unavailable("the VM has ended")
        try:
            return connect_to(vnc_socket(self._layout, container), pid, _CONNECT)
        except WrongPeer as exc:
            log.warning("security.foreign_screen", container=container.short, error=str(exc))
            raise Unavailable(f"its screen's socket was replaced: {exc}") from exc
        except OSError as exc:
            raise Unavailable(f"its screen: {(exc.strerror or str(exc)).lower()}") from exc
