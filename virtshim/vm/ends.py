"""How VMs end: which guests shut down, why a start failed, and QEMU's exit before libvirt reports it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final
from xml.etree.ElementTree import Element

import libvirt
import structlog

from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import VMS, vm_uuid
from virtshim.model.vm import OffReason, Power, PowerState
from virtshim.system.threads import lasting
from virtshim.vm import qemu_process
from virtshim.vm.errors import code_of, message_of, translated
from virtshim.vm.xml_text import parsed

# Remembers which guests shut their VMs down, as an empty file per VM, named by its UUID.
#
# libvirt only remembers in memory why a VM is off. The embedded one dies with this process, and the next one reports a
# crash, or nothing. The files are not synced, because the writes of a killed process are not lost.


class GuestEnds:
    """`directory`: "" keeps nothing. Thread-safe. Raises nothing: without a file, libvirt's answer counts."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # Written by an earlier process.
        self._before = set(self._listed())

    def add(self, domain: uuid.UUID) -> None:
        """Called on libvirt's event thread."""
        if self._directory:
            with contextlib.suppress(OSError):
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                os.close(os.open(self._path(domain), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def forget(self, domain: uuid.UUID) -> None:
        self._before.discard(domain)
        if self._directory:
            with contextlib.suppress(OSError):
                os.unlink(self._path(domain))

    def has(self, domain: uuid.UUID) -> bool:
        """Whether an earlier process saw the VM's guest shut down."""
        return domain in self._before

    def keep(self, there: Collection[uuid.UUID]) -> None:
        """Forgets all other VMs."""
        for domain in self._listed():
            if domain not in there:
                self.forget(domain)

    def _listed(self) -> list[uuid.UUID]:
        found = []
        if self._directory:
            with contextlib.suppress(OSError):
                for name in os.listdir(self._directory):
                    with contextlib.suppress(ValueError):
                        found.append(uuid.UUID(name))
        return found

    def _path(self, domain: uuid.UUID) -> str:
        return os.path.join(self._directory, str(domain))


# Why a start failed. libvirt has one error code for every exit of QEMU during its start, and adds QEMU's output. So only
# this module matches message text. Unknown text changes nothing.

# The text of qemuProcessReportLogError and qemuMonitorIO, followed by QEMU's output, if any.
_ENDED: Final = re.compile(
    r"(?:closed the monitor|exited while connecting to monitor)(?::\s*(?P<said>.*))?\s*$", re.DOTALL
)
_NO_MEMORY: Final = re.compile(r"cannot set up guest memory|Cannot allocate memory|unable to map backing store")
_SIGNALLED: Final = re.compile(r"terminating on signal \d+")


def start_failed(name: str, exc: libvirt.libvirtError, words: str) -> ShimError:
    """The error to raise for `exc`, which `virDomain.create` raised. `words`: QEMU's output that libvirt has not read."""
    what = f"start VM {name}"
    found = _ENDED.search(message_of(exc)) if code_of(exc) == libvirt.VIR_ERR_INTERNAL_ERROR else None
    if found is None:
        return _with(words, translated(what, exc))
    said = "\n".join(part for part in ((found["said"] or "").strip(), words) if part)
    if _NO_MEMORY.search(said):
        return ResourceExhausted(
            f"{what}: not enough memory on this machine; lower the container's memory limit, or free some. QEMU said: {said}"
        )
    if not said or _SIGNALLED.search(said):
        return Unavailable(
            f"{what}: QEMU was killed during its start, by a signal or by the OOM killer (see the kernel's log). "
            f"A retry may succeed. {said}".rstrip()
        )
    return _with(words, translated(what, exc))


def _with(words: str, error: ShimError) -> ShimError:
    return type(error)(f"{error}: {words}") if words else error


# QEMU's exits as the kernel reports them, until libvirt does. Must not claim more than is certain.
#
# After QEMU closed its monitor, libvirt checks for its end every 200 ms and keeps the VM locked meanwhile. So its event
# comes late, and callers wait. A pidfd reports the end at once. The reason follows libvirt's rule: "destroyed" if we
# asked for that; "shut down" if QEMU reported a shutdown, which libvirt writes into the VM's status file before it lets
# QEMU end (qemuProcessHandleShutdown); otherwise "crashed". Under a libvirtd somebody else may have destroyed the VM, so
# there libvirt's own event decides the last case.
#
# QEMU also reports a shutdown if it gets a SIGTERM from outside. libvirt's event says so, but its state does not. So it
# is remembered here, and counts as destroyed. libvirt's state changes before its events are delivered, so virtshim
# waits for the event before it reports the shutdown of a VM that it has seen running.

log = structlog.get_logger(__name__)

# The beginning of a status file; `state` is one of virsh's words.
_STATE: Final = re.compile(rb"<domstatus state='(\w+)'")
_BEGINNING: Final = 4096
# Seconds from libvirt's status file to its event, while QEMU ends.
_EVENT_WAIT: Final = 0.1
# Seconds from libvirt's state "shut down" to its event, on a busy node.
_LATE_EVENT: Final = 5.0


@dataclass(slots=True)
class _WatchedQemu:
    """One QEMU. `why`: set if we are about to end it; `by`: set once it is known who shut it down; `is_reported`: libvirt has
    reported its end."""

    domain: uuid.UUID
    name: str
    why: OffReason | None = None
    by: OffReason | None = None
    is_reported: bool = False


class QemuExitWatcher:
    """`notify` is called from a separate thread when `over` has a new answer for a domain. `directory`: see
    `qemu_process.pid_directory`; "" follows nothing. `is_embedded`: libvirt is in this process."""

    def __init__(self, directory: str, notify: Callable[[uuid.UUID], None], *, is_embedded: bool) -> None:
        self._directory = directory
        self._notify = notify
        self._is_embedded = is_embedded
        # A libvirtd remembers by itself.
        self._guest_ends = GuestEnds(os.path.join(directory, "guest-ends") if directory and is_embedded else "")
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._ended_from_outside: set[uuid.UUID] = set()
        # VMs whose end an event will report.
        self._awaited: set[uuid.UUID] = set()
        self._descriptors: dict[int, _WatchedQemu] = {}
        self._over: dict[uuid.UUID, PowerState] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._poll = select.epoll()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._closing, select.EPOLLIN)

    def over(self, domain: uuid.UUID) -> PowerState | None:
        """OFF with the reason, from QEMU's end until libvirt reports it; otherwise None: ask libvirt."""
        with self._lock:
            return self._over.get(domain)

    def corrected(self, domain: uuid.UUID, reported: PowerState) -> PowerState:
        """Corrects the state that libvirt reports. Waits for the event of a shutdown, so it must not be called on libvirt's event
        thread."""
        if reported.power is not Power.OFF:
            return reported
        with self._news:
            if reported.reason is OffReason.SHUTDOWN and not self._news.wait_for(
                lambda: domain not in self._awaited, _LATE_EVENT
            ):
                self._awaited.discard(domain)
                log.warning("qemu.end.no_event", domain=str(domain))
            from_outside = domain in self._ended_from_outside
        if reported.reason is OffReason.SHUTDOWN and from_outside:
            return PowerState(Power.OFF, OffReason.DESTROYED)
        if reported.reason in (OffReason.CRASHED, OffReason.UNKNOWN) and self._guest_ends.has(domain):
            return PowerState(Power.OFF, OffReason.SHUTDOWN)
        return reported

    def forget(self, domain: uuid.UUID) -> None:
        """For a domain that is about to start or is removed."""
        with self._lock:
            self._ended_from_outside.discard(domain)
        self._guest_ends.forget(domain)
        self._drop(domain)

    def expect_event(self, domain: uuid.UUID) -> None:
        """For a domain that is about to start, or is found running: libvirt will report its end to us."""
        with self._lock:
            self._awaited.add(domain)

    def keep(self, there: Collection[uuid.UUID]) -> None:
        """Forgets all other domains, which are gone."""
        self._guest_ends.keep(there)

    def follow(self, domain: uuid.UUID, name: str) -> None:
        """For a running domain. If its QEMU is not found, because it has just ended, libvirt reports the end. A second call does
        nothing."""
        if not self._directory:
            return
        with self._lock:
            if self._closed or self._of(domain):
                return
            descriptor = _pidfd(self._directory, name, domain)
            if descriptor is None:
                return
            try:
                if self._thread is None:
                    self._thread = lasting(self._run, "qemu-ends")
                self._poll.register(descriptor, select.EPOLLIN)
            except BaseException:  # the next call must start again
                os.close(descriptor)
                raise
            self._descriptors[descriptor] = _WatchedQemu(domain, name)

    def will_destroy(self, domain: uuid.UUID) -> None:
        with self._lock:
            for followed in self._of(domain):
                followed.why = OffReason.DESTROYED

    def shutting_down(self, domain: uuid.UUID, *, by_host: bool) -> None:
        """QEMU has reported a shutdown by its guest or by the host. The first report counts, because libvirt also sends a signal
        to a QEMU whose guest has shut down. Called on libvirt's event thread."""
        if not by_host:  # first, because libvirt ends QEMU from here on
            self._guest_ends.add(domain)
        with self._news:
            for followed in self._of(domain):
                followed.by = followed.by or (OffReason.DESTROYED if by_host else OffReason.SHUTDOWN)
                by_host = followed.by is OffReason.DESTROYED
            if by_host:
                self._ended_from_outside.add(domain)
            self._awaited.discard(domain)
            self._news.notify_all()

    def stopped(self, domain: uuid.UUID) -> None:
        """libvirt has reported the end. Called on libvirt's event thread."""
        self._drop(domain)

    def forget_exits(self) -> None:
        """Events may have been lost, so libvirt must be asked."""
        with self._news:
            self._over.clear()
            self._awaited.clear()
            self._news.notify_all()

    def close(self) -> None:
        """A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._closing, 1)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()
            self._poll.close()
            os.close(self._closing)

    def _of(self, domain: uuid.UUID) -> list[_WatchedQemu]:
        return [followed for followed in self._descriptors.values() if followed.domain == domain]

    def _drop(self, domain: uuid.UUID) -> None:
        with self._news:
            self._over.pop(domain, None)
            self._awaited.discard(domain)
            self._news.notify_all()
            for descriptor, followed in list(self._descriptors.items()):
                if followed.domain == domain:
                    followed.is_reported = True
                    self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        del self._descriptors[descriptor]
        self._poll.unregister(descriptor)
        os.close(descriptor)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._closing:
                    return
                with self._lock:
                    followed = self._descriptors.get(descriptor)
                if followed is not None:
                    self._tell_of(descriptor, followed)

    def _tell_of(self, descriptor: int, followed: _WatchedQemu) -> None:
        try:
            self._ended(descriptor, followed)
        except Exception:  # any error: the ends of other VMs must be reported
            log.exception("qemu.end.crashed", name=followed.name)
            with self._lock:  # libvirt reports this one; without this the epoll would report it for ever
                if descriptor in self._descriptors:
                    self._forget(descriptor)

    def _ended(self, descriptor: int, followed: _WatchedQemu) -> None:
        why = followed.why or self._why(followed)
        with self._lock:
            if followed.is_reported:
                return
            self._forget(descriptor)
            if why is None:
                return
            self._over[followed.domain] = PowerState(Power.OFF, why)
        self._notify(followed.domain)

    def _why(self, followed: _WatchedQemu) -> OffReason | None:
        """None: libvirt will report the reason."""
        match _last_state(self._directory, followed.name):
            case "":
                return None
            case "shutdown":
                with self._news:
                    self._news.wait_for(lambda: followed.by or followed.is_reported, _EVENT_WAIT)
                    return followed.by
            case _:
                return OffReason.CRASHED if self._is_embedded else None


def _pidfd(directory: str, name: str, domain: uuid.UUID) -> int | None:
    pid = qemu_process.find(directory, name, domain)
    if pid is None:
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if qemu_process.find(directory, name, domain) != pid:  # another process may have got the number meanwhile
        os.close(descriptor)
        return None
    return descriptor


def _last_state(directory: str, name: str) -> str:
    """The VM's last state in libvirt's status file; "" if libvirt has removed it, because it has finished with the VM."""
    try:
        with open(f"{directory}/{name}.xml", "rb") as file:
            found = _STATE.search(file.read(_BEGINNING))
    except OSError:
        return ""
    return found[1].decode() if found else ""


def has_reusable_parts(definition: str, container: ContainerId) -> bool:
    """Whether a later VM may get something of this VM's: a block device, UEFI's variables, a TPM, or a writable disk that
    outlives its container.

    libvirt restores their owners and labels, and ends the swtpm, up to 200 ms after QEMU has ended. A VM that took one of them
    before then would find it in use, or lose it. The root disk of a VM that outlives its pods does not count: its next VM has the
    same UUID, so libvirt defines it only when the earlier VM is finished."""
    domain = parsed(definition)
    if domain.find("os/nvram") is not None or domain.find("devices/tpm") is not None:
        return True
    own = domain.findtext("uuid", "")
    return any(_outlives(one, container, own) for one in domain.iterfind("devices/disk"))


def _outlives(disk: Element, container: ContainerId, domain: str) -> bool:
    source = disk.find("source")
    if disk.get("type") == "block":
        return True
    if source is None or disk.find("readonly") is not None:
        return False
    path = PurePath(source.get("file", ""))
    if str(vm_uuid(f"{VMS}/{path.parent.name}/{path.stem}")) == domain:
        return False
    return path.parent.name != container.value
