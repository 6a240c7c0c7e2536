"""Persistent tap devices by name: create, open. Must run inside the pod's namespace (netns.run_inside)."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable

from tapmanager import protocol
from tapmanager.errors import TapmanagerError

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_TUNSETOWNER = 0x400454CC
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8

_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
# VNET_HDR lets checksums and large frames pass unfinished between guest and host: most of the throughput.
_FLAGS = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR


def create(name: str, owner: int) -> None:
    """A tap that outlives its descriptor, so that it can be opened again after any of our restarts. Raises OSError.

    `owner` is the uid that may open it besides root; QEMU gets an open descriptor and needs no more.
    """
    fd = _attach(name)
    try:
        fcntl.ioctl(fd, _TUNSETOWNER, owner)
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def open_tap(name: str) -> int:
    """A descriptor (close-on-exec) the caller owns. Raises TapmanagerError: failed-precondition while another process has the
    tap, not-found if it is gone."""
    try:
        socket.if_nametoindex(name)  # TUNSETIFF would silently make a new tap
    except OSError as exc:
        raise TapmanagerError("not-found", f"the tap {name} is gone; delete the pod to recreate it") from exc
    try:
        fd = _attach(name)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            message = f"the tap {name} is in use by another process: this pod's virtual machine is already running"
            raise TapmanagerError("failed-precondition", message) from exc
        raise
    # A tap remembers what its last user negotiated; the next one starts from the kernel's defaults.
    fcntl.ioctl(fd, _TUNSETOFFLOAD, 0)
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", 10))
    return fd


def open_taps(names: Iterable[str]) -> list[int]:
    """All, or none."""
    fds: list[int] = []
    try:
        fds.extend(open_tap(name) for name in names)
    except BaseException:
        protocol.close_all(fds)
        raise
    return fds


def _attach(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _FLAGS))
    except BaseException:
        os.close(fd)
        raise
    return fd
