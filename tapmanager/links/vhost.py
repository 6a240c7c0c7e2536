"""vhost-net: the kernel itself moves the frames between a tap's queue and the guest's memory, where that works.

A QEMU cannot open /dev/vhost-net and need not: it gets a descriptor for each queue, as it gets the tap's. That the device is
there proves nothing (a kernel without the module has its node, a container may have it without the right to use it): it is tried.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
from collections.abc import Callable

from tapmanager import protocol

log = logging.getLogger(__name__)

DEVICE = "/dev/vhost-net"

_GET_FEATURES = 0x8008AF00
_SET_OWNER = 0xAF01
# What every guest since 2014 negotiates.
_VERSION_1 = 1 << 32


def trouble(device: str = DEVICE) -> str:
    """Why it does not work on this machine, "" if it does."""
    try:
        fd = _open(device)
    except OSError as exc:
        return f"{device}: {exc.strerror}"
    try:
        # The second makes this process its user: the rest needs a guest's memory.
        features = struct.unpack("Q", fcntl.ioctl(fd, _GET_FEATURES, bytes(8)))[0]
        fcntl.ioctl(fd, _SET_OWNER)
    except OSError as exc:
        return f"{device} does not answer as vhost-net: {exc.strerror}"
    finally:
        os.close(fd)
    return "" if features & _VERSION_1 else f"{device} knows no virtio 1.0"


class VhostNet:
    """Thread-safe. `wanted`: whether VMs are to have it. `trouble`: why the device does not work."""

    def __init__(self, *, wanted: bool = True, device: str = DEVICE, trouble: Callable[[str], str] = trouble) -> None:
        self._trouble = trouble
        self.wanted = wanted
        self._device = device
        self._works = False
        self._told = ""
        self._lock = threading.Lock()

    def open(self, count: int) -> list[int]:
        """That many descriptors (close-on-exec), which the caller owns; none where it does not work, which is logged once."""
        if not self.wanted:
            return []
        fds: list[int] = []
        try:
            if why := self._why_not():
                self._tell(why)
                return []
            for _ in range(count):
                fds.append(_open(self._device))  # noqa: PERF401  those before a failure are closed
        except OSError as exc:
            protocol.close_all(fds)
            self._works = False
            self._tell(f"{self._device}: {exc.strerror}")
            return []
        return fds

    def _why_not(self) -> str:
        """Tried until it has worked once: a module may be loaded later."""
        if self._works:
            return ""
        why = self._trouble(self._device)
        self._works = not why
        return why

    def _tell(self, why: str) -> None:
        with self._lock:
            if why != self._told:
                self._told = why
                log.info("vhost_net.not_used why=%s; QEMU moves the guests' frames itself", why)


def _open(device: str) -> int:
    return os.open(device, os.O_RDWR | os.O_CLOEXEC)
