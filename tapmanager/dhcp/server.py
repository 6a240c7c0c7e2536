"""Serves DHCP, DHCPv6 and router advertisements on the taps of all pods, from one thread.

A failure of one tap does not affect others: a failed socket is closed, a flooded one is not read for the rest of the second, and
slow work runs in the background (`beside`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from tapmanager.dhcp.opened import RECEIVE_BUFFER, Beside, GuestNic

log = logging.getLogger(__name__)

_PACKET_OUTGOING = 4
# More frames than the buffer can hold: the kernel counts at least 256 bytes for each.
_BACKLOG = 2 * RECEIVE_BUFFER // 256
# Requests per second that one guest may send. A boot needs two to four.
_PER_SECOND = 32
# Errors after which the socket still works: ENETDOWN occurs once when the tap goes down, the others concern one frame.
_TRANSIENT = frozenset({errno.ENETDOWN, errno.ENOBUFS, errno.EMSGSIZE, errno.EINTR})


@dataclass(slots=True)
class _Served:
    owner: str
    sock: socket.socket
    nic: GuestNic
    left: int = _PER_SECOND
    paused: bool = False


class DhcpServer:
    """Thread-safe. Call `start` once. `stop` closes all sockets and leaves the taps alone. `beside`: runs background work for
    this server's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.EpollSelector()
        self._served: dict[int, _Served] = {}
        self._due: dict[GuestNic, float] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self.beside = Beside(self._wake)
        self._thread = threading.Thread(target=self._run, name="dhcp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        self._wake()
        self._thread.join(timeout=5.0)
        self.beside.close()  # it uses the descriptors that are closed next
        with self._lock:
            for served in self._served.values():
                served.sock.close()
            self._served.clear()
            self._due.clear()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def serve(self, owner: str, nic: GuestNic) -> None:
        """Takes over the NIC's sockets, and answers on them until `forget(owner)`."""
        with self._lock:
            for sock in nic.sockets:
                self._served[sock.fileno()] = _Served(owner, sock, nic)
                self._selector.register(sock, selectors.EVENT_READ)
            self._due[nic] = 0.0
        self._wake()

    def forget(self, owner: str) -> None:
        """Closes the owner's sockets, because an open one would keep the pod's namespace alive. No error if there are none."""
        with self._lock:
            for fd in [fd for fd, served in self._served.items() if served.owner == owner]:
                self._drop(fd)

    def owners(self) -> frozenset[str]:
        with self._lock:
            return frozenset(served.owner for served in self._served.values())

    def flooded(self) -> frozenset[str]:
        """Owners with a socket that is currently not read."""
        with self._lock:
            return frozenset(served.owner for served in self._served.values() if served.paused)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
            os.write(self._wake_write, b".")

    def _drop(self, fd: int) -> None:
        served = self._served.pop(fd)
        self._due.pop(served.nic, None)
        if not served.paused:
            self._selector.unregister(fd)
        served.sock.close()

    def _run(self) -> None:
        refill_at = time.monotonic() + 1.0
        while not self._stopping:
            ready = self._selector.select(timeout=self._sleep(refill_at))
            with self._lock:
                now = time.monotonic()
                if now >= refill_at:
                    self._refill()
                    refill_at = now + 1.0
                for key, _ in ready:
                    if key.fd in self._served:
                        self._handle_frame(key.fd)
                    elif key.fd == self._wake_read:
                        os.read(self._wake_read, 4096)
                self.beside.finish()
                for nic in [nic for nic, due in self._due.items() if due <= now]:
                    self._due[nic] = nic.tick(now)

    def _sleep(self, refill_at: float) -> float | None:
        """Seconds until work is due."""
        with self._lock:
            due = [one for one in self._due.values() if one < math.inf]
            if any(served.paused for served in self._served.values()):
                due.append(refill_at)
            return max(0.0, min(due) - time.monotonic()) if due else None

    def _refill(self) -> None:
        for served in self._served.values():
            served.left = _PER_SECOND
            if served.paused:
                _discard_backlog(served.sock)
                served.paused = False
                self._selector.register(served.sock, selectors.EVENT_READ)

    def _handle_frame(self, fd: int) -> None:
        """Handles one frame of one tap. The selector is level-triggered, so the other taps come before this tap's next frame."""
        served = self._served[fd]
        try:
            data, address = served.sock.recvfrom(2048)
            if address[2] != _PACKET_OUTGOING:
                served.nic.take(served.sock, data, time.monotonic())
                if served.nic in self._due:
                    self._due[served.nic] = 0.0  # the frame may have changed the work that is due
        except BlockingIOError:
            pass
        except OSError as exc:
            log.info("dhcp.socket_error sandbox=%s error=%s", served.owner, exc)
            if exc.errno not in _TRANSIENT:
                self._drop(fd)
        served.left -= 1
        if served.left <= 0 and fd in self._served:
            if served.sock is served.nic.tap:
                log.warning("dhcp.flooded sandbox=%s per_second=%d", served.owner, _PER_SECOND)
            served.paused = True
            self._selector.unregister(fd)


def _discard_backlog(sock: socket.socket) -> None:
    """Drops the frames that a flood left in the buffer, so that the guest's next request need not wait behind them."""
    with contextlib.suppress(OSError):
        for _ in range(_BACKLOG):
            sock.recv(1)
