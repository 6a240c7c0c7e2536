"""A guest as in `kernel_guest`, whose one NIC is a connection to passt: each frame follows its length."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator
from typing import Self

from kernel_guest import KernelGuest

from tapmanager.links import netns

_TUNSETIFF, _TAP, _NO_PI = 0x400454CA, 0x0002, 0x1000
_LARGEST = 70_000


class PasstGuest(KernelGuest):
    """Owns `connection`."""

    def __init__(self, connection: int, mac: str) -> None:
        super().__init__([{"mac": mac}], [connection])
        self._received = b""

    def __enter__(self) -> Self:
        netns.create(self.path)
        self._inner = [netns.run_inside(self.path, _plain_tap)]
        self._thread.start()
        self.run("sysctl", "-qw", "net.ipv6.conf.nic0.accept_dad=0")
        self.ip(f"link set nic0 address {self._macs[0]} mtu 65520 up")
        return self

    def listener(self, port: int, kind: int = socket.SOCK_STREAM, family: int = socket.AF_INET) -> socket.socket:
        return listener(self.path, port, kind, family)

    def addresses(self) -> list[str]:
        lines = self.run("ip", "-o", "address", "show", "dev", "nic0").splitlines()
        return [line.split()[3] for line in lines if "scope link" not in line]

    def _run(self) -> None:
        (stream,), (tap,) = self._fds, self._inner
        with select.epoll() as poll:
            for fd in (stream, tap, self._stop_read):
                poll.register(fd, select.EPOLLIN)
            while True:
                for fd, _ in poll.poll():
                    if fd == self._stop_read:
                        return
                    data = os.read(fd, _LARGEST)
                    if fd == tap:
                        _write_all(stream, struct.pack("!I", len(data)) + data)
                    elif not data:  # passt has ended
                        poll.unregister(fd)
                    for frame in self._frames(data if fd == stream else b""):
                        os.write(tap, frame)

    def _frames(self, data: bytes) -> Iterator[bytes]:
        self._received += data
        while len(self._received) >= 4:
            (length,) = struct.unpack_from("!I", self._received)
            if len(self._received) < 4 + length:
                return
            yield self._received[4 : 4 + length]
            self._received = self._received[4 + length :]


def listener(path: str, port: int, kind: int = socket.SOCK_STREAM, family: int = socket.AF_INET) -> socket.socket:
    """A socket in the namespace at `path` that anybody can connect to."""

    def listen() -> socket.socket:
        made = socket.socket(family, kind)
        made.settimeout(20)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("", port))
        if kind == socket.SOCK_STREAM:
            made.listen()
        return made

    return netns.run_inside(path, listen)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _plain_tap() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"nic0", _TAP | _NO_PI))
    return fd
