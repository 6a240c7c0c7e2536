"""One connection to libvirt, which reconnects by itself. It knows nothing about VMs.

A thread opens the connection, waits until it is lost, closes it, and tries again with growing pauses. Calls never wait
for the thread: without a connection they fail at once with Unavailable, and `trouble` has the thread's last error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

import libvirt
import structlog

from virtshim.model.errors import InternalError, ShimError, Unavailable
from virtshim.system.threads import lasting
from virtshim.vm.disk_chains import OPEN_IMAGES_SINCE
from virtshim.vm.errors import code_of, message_of, talking_to_libvirt, translated
from virtshim.vm.events import start_event_loop
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.xml_text import parsed

log = structlog.get_logger(__name__)

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0

# If libvirtd does not answer for 5 x 5 s, the connection and all calls that wait for it are given up.
_KEEPALIVE_INTERVAL: Final = 5
_KEEPALIVE_COUNT: Final = 5

# Drivers inside this process (embedded QEMU, test) raise these for calls that only make sense with a remote driver.
_NOT_HERE: Final = frozenset({libvirt.VIR_ERR_NO_SUPPORT, libvirt.VIR_ERR_INTERNAL_ERROR})


class Connection:
    """Call `start` once, then `using` from any thread. An embedded driver cannot be lost, and a process can open one
    only about seven times, because of libvirt's table of drivers. So a process has one Connection, and must restart if
    an embedded root fails."""

    def __init__(self, uri: str, group_of_vms: int | None = None) -> None:
        """`group_of_vms`: the group of VMs that have their own user, if it differs from libvirt's group for QEMU, which
        other users may be members of."""
        self._uri = uri
        self._group_of_vms = group_of_vms
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._opened = threading.Event()
        self._closing = False
        self._conn: libvirt.virConnect | None = None
        self._trouble = f"libvirt at {uri} has not been connected yet"
        self._prepare: list[Callable[[libvirt.virConnect], None]] = []
        self._notify: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._qemu_ids: tuple[libvirt.virConnect, QemuIds | None] | None = None

    def on_open(self, prepare: Callable[[libvirt.virConnect], None], notify: Callable[[], None]) -> None:
        """Must be called before `start`. On each new connection, on the connection's thread: `prepare` runs before
        others can use it (an error closes it for another try), `notify` as soon as they can."""
        self._prepare.append(prepare)
        self._notify.append(notify)

    def start(self) -> None:
        """Starts connecting and returns at once."""
        start_event_loop()
        with self._lock:
            if self._thread is None:
                self._thread = lasting(self._keep_open, "libvirt-connection")

    def wait_open(self, seconds: float) -> bool:
        """True once there is a connection."""
        return self._opened.wait(seconds)

    def trouble(self) -> str:
        """Why there is no connection; "" if there is one."""
        with self._lock:
            return self._trouble

    def close(self) -> None:
        """Closes the connection. VMs keep running; a second call does nothing."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()

    @contextlib.contextmanager
    def using(self, what: str) -> Iterator[libvirt.virConnect]:
        """Yields the connection for a few calls. Translates libvirt's errors; one because of a lost connection becomes
        Unavailable."""
        with self._lock:
            conn, trouble = self._conn, self._trouble
        if conn is None:
            raise Unavailable(f"{what}: {trouble}")
        try:
            yield conn
        except libvirt.libvirtError as exc:
            if _is_alive(conn):
                raise translated(what, exc) from exc
            self._wake.set()
            raise Unavailable(f"{what}: the connection to libvirt was lost: {message_of(exc)}") from exc

    def qemu_ids(self) -> QemuIds | None:
        """The user that libvirt runs QEMU as; None if that is libvirt's own user, or there is no QEMU (test driver).
        Asked once for each connection, because libvirt examines the whole machine for the answer, which takes
        milliseconds."""
        with self.using("ask libvirt who runs QEMU") as conn:
            known = self._qemu_ids
            if known is None or known[0] is not conn:
                self._qemu_ids = known = (conn, _qemu_ids(conn, self._group_of_vms))
            return known[1]

    def _keep_open(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closing:
            if self._conn is None and not self._try_to_open():
                self._wake.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                if not self._closing:
                    self._wake.clear()
                continue
            pause = _FIRST_PAUSE
            self._wake.wait()
            self._wake.clear()
            self._drop_if_lost()
        self._drop(f"the connection to libvirt at {self._uri} is closed")

    def _try_to_open(self) -> bool:
        conn: libvirt.virConnect | None = None
        try:
            with talking_to_libvirt(f"libvirt at {self._uri} cannot be reached"):
                conn = libvirt.open(self._uri)
                self._watch(conn)
                for prepare in self._prepare:
                    prepare(conn)
        except Exception as exc:  # any error: this thread must never end
            _close(conn)
            with self._lock:
                new, self._trouble = str(exc) != self._trouble, str(exc)
            if new:
                log.warning("libvirt.connection.failed", error=str(exc), exc_info=not isinstance(exc, ShimError))
            return False
        with self._lock:
            self._conn, self._trouble = conn, ""
        self._opened.set()
        for notify in self._notify:
            try:
                notify()
            except Exception:  # any error: this thread must never end, and the connection works
                log.exception("libvirt.connection.notify_crashed")
        log.info("libvirt.connection.opened", uri=self._uri)
        return True

    def _watch(self, conn: libvirt.virConnect) -> None:
        """Registers for the end of the connection, if it can end."""
        try:
            conn.setKeepAlive(_KEEPALIVE_INTERVAL, _KEEPALIVE_COUNT)
            conn.registerCloseCallback(self._ended, None)
        except libvirt.libvirtError as exc:
            if code_of(exc) not in _NOT_HERE:
                raise

    def _ended(self, _conn: libvirt.virConnect, _reason: int, _opaque: object) -> None:
        """Runs on libvirt's event thread, so it only hands over."""
        self._wake.set()

    def _drop_if_lost(self) -> None:
        if self._conn is not None and not self._closing and not _is_alive(self._conn):
            log.warning("libvirt.connection.lost", uri=self._uri)
            self._drop(f"the connection to libvirt at {self._uri} was lost")

    def _drop(self, trouble: str) -> None:
        with self._lock:
            conn, self._conn, self._trouble = self._conn, None, trouble
        self._opened.clear()
        _close(conn)


def _is_alive(conn: libvirt.virConnect) -> bool:
    try:
        return bool(conn.isAlive())
    except libvirt.libvirtError:
        return False


def _close(conn: libvirt.virConnect | None) -> None:
    if conn is not None:
        with contextlib.suppress(libvirt.libvirtError):
            conn.close()


def _qemu_ids(conn: libvirt.virConnect, group_of_vms: int | None) -> QemuIds | None:
    capabilities = parsed(conn.getCapabilities())
    for label in capabilities.iterfind("host/secmodel[model='dac']/baselabel"):
        uid, _, gid = (label.text or "").lstrip("+").partition(":")
        try:
            gets_images = conn.getLibVersion() >= OPEN_IMAGES_SINCE
            return QemuIds(int(uid), int(gid.lstrip("+")), group_of_vms=group_of_vms, gets_images=gets_images)
        except ValueError as exc:
            raise InternalError(f"libvirt gives QEMU's user as {label.text!r}, not as numeric IDs") from exc
    return None
