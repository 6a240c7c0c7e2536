"""Serves DHCP on every pod's tap from one thread.

Each tap has a raw packet socket, made in the pod's namespace and bound to the tap: answers leave by the tap only, and it
sees the guest's frames before the bridge does. No failure of one tap reaches another: a socket that fails is closed, one
that is flooded is not read for the rest of its second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

from tapmanager.dhcp.lease_plan import Lease, answer

log = logging.getLogger(__name__)

_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_SOL_PACKET = 263
_PACKET_QDISC_BYPASS = 20
_PACKET_OUTGOING = 4
_RECEIVE_BUFFER = 64 * 1024
# More frames than the buffer holds: the kernel counts at least 256 bytes for each.
_BACKLOG = 2 * _RECEIVE_BUFFER // 256
# Requests of one guest served in a second; a boot takes two to four.
_PER_SECOND = 32
# Errors after which the socket still works: ENETDOWN comes once when the tap goes down; the others concern one frame.
_TRANSIENT = frozenset({errno.ENETDOWN, errno.ENOBUFS, errno.EMSGSIZE, errno.EINTR})

# Classic BPF (linux/filter.h): code, jump if true, jump if false, operand.
_FILTER = (
    (0x28, 0, 0, 12),  # ldh [12]
    (0x15, 0, 8, 0x0800),  # IPv4
    (0x30, 0, 0, 23),  # ldb [23]
    (0x15, 0, 6, 17),  # UDP
    (0x28, 0, 0, 20),  # ldh [20]
    (0x45, 4, 0, 0x3FFF),  # a fragment
    (0xB1, 0, 0, 14),  # ldxb 4*([14]&0xf)
    (0x48, 0, 0, 16),  # ldh [x+16]
    (0x15, 0, 1, 67),  # to the server's port
    (0x06, 0, 0, 0xFFFF),  # take it
    (0x06, 0, 0, 0),  # drop it
)


def open_socket(tap: str) -> socket.socket:
    """A filtered packet socket on `tap`; must run in the pod's namespace. Raises OSError."""
    # Protocol 0 receives nothing, so that nothing slips in before the filter is there. ETH_P_ALL, for a bridge takes the
    # frames of its ports before sockets of one protocol see them.
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
    try:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in _FILTER))
        program = struct.pack("HL", len(_FILTER), ctypes.addressof(code))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        # When QEMU opens the tap, the kernel puts the tap's queue in place a moment later and drops what is sent until then:
        # the answer to a guest that asks at once. So the queue is bypassed.
        sock.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
        sock.bind((tap, _ETH_P_ALL))
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(slots=True)
class _Served:
    owner: str
    sock: socket.socket
    lease: Lease
    left: int = _PER_SECOND
    paused: bool = False


class DhcpServer:
    """Thread-safe. `start` once; `stop` closes all sockets and leaves the taps alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.EpollSelector()
        self._served: dict[int, _Served] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dhcp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        os.write(self._wake_write, b".")
        self._thread.join(timeout=5.0)
        with self._lock:
            for served in self._served.values():
                served.sock.close()
            self._served.clear()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def serve(self, owner: str, sock: socket.socket, lease: Lease) -> None:
        """Takes over `sock` (of `open_socket`), and answers on it until `forget(owner)`."""
        with self._lock:
            self._served[sock.fileno()] = _Served(owner, sock, lease)
            self._selector.register(sock, selectors.EVENT_READ)

    def forget(self, owner: str) -> None:
        """Closes the owner's sockets: an open one would keep the pod's namespace alive. No error if there are none."""
        with self._lock:
            for fd in [fd for fd, served in self._served.items() if served.owner == owner]:
                self._drop(fd)

    def owners(self) -> frozenset[str]:
        with self._lock:
            return frozenset(served.owner for served in self._served.values())

    def _drop(self, fd: int) -> None:
        served = self._served.pop(fd)
        if not served.paused:
            self._selector.unregister(fd)
        served.sock.close()

    def _run(self) -> None:
        refill_at = time.monotonic() + 1.0
        while not self._stopping:
            ready = self._selector.select(timeout=max(0.0, refill_at - time.monotonic()) if self._is_paused() else None)
            with self._lock:
                if time.monotonic() >= refill_at:
                    self._refill()
                    refill_at = time.monotonic() + 1.0
                for key, _ in ready:
                    if key.fd in self._served:
                        self._handle_frame(key.fd)

    def _is_paused(self) -> bool:
        with self._lock:
            return any(served.paused for served in self._served.values())

    def _refill(self) -> None:
        for served in self._served.values():
            served.left = _PER_SECOND
            if served.paused:
                _discard_backlog(served.sock)
                served.paused = False
                self._selector.register(served.sock, selectors.EVENT_READ)

    def _handle_frame(self, fd: int) -> None:
        """One frame of one tap: the selector is level-triggered, so the others have their turn before the next."""
        served = self._served[fd]
        try:
            data, address = served.sock.recvfrom(2048)
            reply = None if address[2] == _PACKET_OUTGOING else answer(data, served.lease)
            if reply is not None:
                served.sock.send(reply)
        except BlockingIOError:
            pass
        except OSError as exc:
            log.info("dhcp.socket_error sandbox=%s error=%s", served.owner, exc)
            if exc.errno not in _TRANSIENT:
                self._drop(fd)
        served.left -= 1
        if served.left <= 0 and fd in self._served:
            log.warning("dhcp.flooded sandbox=%s per_second=%d", served.owner, _PER_SECOND)
            served.paused = True
            self._selector.unregister(fd)


def _discard_backlog(sock: socket.socket) -> None:
    """What a flood left in the buffer is stale: the guest's next request shall not wait behind it."""
    with contextlib.suppress(OSError):
        for _ in range(_BACKLOG):
            sock.recv(1)
