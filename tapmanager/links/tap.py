"""Creates and opens persistent tap devices, and opens vhost-net. Tap functions must run inside the pod's namespace
(netns.run_inside)."""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tapmanager import protocol
from tapmanager.errors import TapmanagerError, wrong_state

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_TUNSETOWNER = 0x400454CC
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8

_SIOCETHTOOL = 0x8946
_ETHTOOL_GLINK = 0x0000000A

_IFF_TAP = 0x0002
_IFF_MULTI_QUEUE = 0x0100
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
# VNET_HDR passes partial checksums and large frames between guest and host, which gives most of the throughput.
_FLAGS = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tap to open, and the number of queues. A tap that was made without `multi_queue` has one queue."""

    name: str
    multi_queue: bool = False
    queues: int = 1


def create(name: str, owner: int, *, multi_queue: bool = False) -> None:
    """Creates a tap that outlives its descriptor, so that it can be opened again after a restart of tapmanager. Raises OSError.

    `owner`: the uid that may open the tap besides root. QEMU gets an open descriptor and needs no such right. With `multi_queue`,
    the tap can be opened several times at once; this costs 200 KiB of kernel memory, and hardly any time.
    """
    fd = _attach(name, multi_queue=multi_queue)
    try:
        fcntl.ioctl(fd, _TUNSETOWNER, owner)
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def open_tap(wanted: Wanted) -> list[int]:
    """Opens a descriptor (close-on-exec) for each queue, which the caller owns. Raises TapmanagerError: failed-precondition while
    another process has the tap open, not-found if the tap is gone."""
    name = wanted.name
    try:
        socket.if_nametoindex(name)  # TUNSETIFF would silently create a new tap
    except OSError as exc:
        raise TapmanagerError("not-found", f"the tap {name} is gone; delete the pod to recreate it") from exc
    # A tap with a single queue cannot be opened twice. For one with several queues, only this check shows that it is not in use.
    if wanted.multi_queue and _is_open(name):
        raise _in_use(name)
    fds: list[int] = []
    try:
        for _ in range(wanted.queues if wanted.multi_queue else 1):
            fds.append(_attach(name, multi_queue=wanted.multi_queue))  # noqa: PERF401  those before a failure are closed
        # A tap keeps the offloads that its last user negotiated. Reset them to the kernel's defaults for the next user.
        fcntl.ioctl(fds[0], _TUNSETOFFLOAD, 0)
        fcntl.ioctl(fds[0], _TUNSETVNETHDRSZ, struct.pack("i", 10))
    except OSError as exc:
        protocol.close_all(fds)
        if exc.errno == errno.EBUSY:
            raise _in_use(name) from exc
        raise
    return fds


def open_taps(taps: Iterable[Wanted]) -> list[list[int]]:
    """Opens all taps or none."""
    opened: list[list[int]] = []
    try:
        opened.extend(open_tap(one) for one in taps)
    except BaseException:
        for fds in opened:
            protocol.close_all(fds)
        raise
    return opened


def _in_use(name: str) -> TapmanagerError:
    message = f"the tap {name} is in use by another process, because this pod's virtual machine is already running"
    return wrong_state(message)


def _is_open(name: str) -> bool:
    """Whether the tap is open. A tap has a carrier as long as a process holds one of its queues, even a disabled one."""
    answer = array.array("I", (_ETHTOOL_GLINK, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sQ16x", name.encode(), answer.buffer_info()[0]))
    return answer[1] != 0


def _attach(name: str, *, multi_queue: bool) -> int:
    flags = _FLAGS | (_IFF_MULTI_QUEUE if multi_queue else 0)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except BaseException:
        os.close(fd)
        raise
    return fd


# vhost-net: the kernel itself transfers frames between a tap's queue and the guest's memory.
#
# QEMU may not open /dev/vhost-net. Instead it gets a descriptor for each queue, as for the tap. The device node may exist
# although the kernel lacks the module, or a container lacks the right to use it, so tapmanager tests the device.

log = logging.getLogger(__name__)

VHOST_DEVICE = "/dev/vhost-net"

_GET_FEATURES = 0x8008AF00
_SET_OWNER = 0xAF01
# A feature that every guest since 2014 negotiates.
_VERSION_1 = 1 << 32


def vhost_trouble(device: str = VHOST_DEVICE) -> str:
    """Why vhost-net does not work on this machine; "" if it does."""
    try:
        fd = _open(device)
    except OSError as exc:
        return f"{device}: {exc.strerror}"
    try:
        # The second call makes this process the owner. All further calls would need a guest's memory.
        features = struct.unpack("Q", fcntl.ioctl(fd, _GET_FEATURES, bytes(8)))[0]
        fcntl.ioctl(fd, _SET_OWNER)
    except OSError as exc:
        return f"{device} does not answer as vhost-net: {exc.strerror}"
    finally:
        os.close(fd)
    return "" if features & _VERSION_1 else f"{device} does not support virtio 1.0"


class VhostNet:
    """Thread-safe. `wanted`: whether VMs should use it. `trouble`: why the device does not work."""

    def __init__(
        self, *, wanted: bool = True, device: str = VHOST_DEVICE, trouble: Callable[[str], str] = vhost_trouble
    ) -> None:
        self._trouble = trouble
        self.wanted = wanted
        self._device = device
        self._works = False
        self._told = ""
        self._lock = threading.Lock()

    def open(self, count: int) -> list[int]:
        """Opens `count` descriptors (close-on-exec), which the caller owns. Returns none if vhost-net does not work, which is
        logged once."""
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
        """Tests the device until it has worked once, because the module may be loaded later."""
        if self._works:
            return ""
        why = self._trouble(self._device)
        self._works = not why
        return why

    def _tell(self, why: str) -> None:
        with self._lock:
            if why != self._told:
                self._told = why
                log.info("vhost_net.not_used why=%s; QEMU transfers guests' frames", why)


def _open(device: str) -> int:
    return os.open(device, os.O_RDWR | os.O_CLOEXEC)
