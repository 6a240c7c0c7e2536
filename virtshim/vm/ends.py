"""What of a VM the next one may have: libvirt is not through with it yet when QEMU has ended. Pure.

It gives devices their owners and labels back, and ends a TPM's swtpm, when it has seen QEMU's end, which is up to 200 ms after
the kernel has. A VM that takes one of them in between finds it taken, or taken away from it.
"""

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

import libvirt
import structlog
from lxml import etree

from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason, Power, PowerState
from virtshim.system.threads import lasting
from virtshim.vm import qemu_process
from virtshim.vm.errors import code_of, message_of, translated

# Which guests have shut their VMs down: empty files, one a VM, named by its UUID.
#
# libvirt remembers why a VM is off in memory. The embedded one dies with this process, and the next takes a VM that
# ended before that was recorded for one that crashed, or knows nothing. Nothing is synced: what a killed process has
# written is there.


class GuestEnds:
    """`directory` "" keeps nothing. Thread-safe; raises nothing: without its file an end is as unknown as libvirt says."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # Of an earlier process.
        self._before = set(self._listed())

    def add(self, domain: uuid.UUID) -> None:
        """Called on libvirt's event thread."""
        if self._directory:
            with contextlib.suppress(OSError):
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                os.close(os.open(self._path(domain), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def forget(self, domain: uuid.UUID) -> None:
        """What is known is of an earlier run."""
        self._before.discard(domain)
        if self._directory:
            with contextlib.suppress(OSError):
                os.unlink(self._path(domain))

    def has(self, domain: uuid.UUID) -> bool:
        """Whether its guest did, as an earlier process saw."""
        return domain in self._before

    def keep(self, there: Collection[uuid.UUID]) -> None:
        """Of VMs that are gone nobody asks."""
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


# Why a VM could not be started, where libvirt's code does not say: it has one code for every exit of QEMU during its
# start, and passes on what QEMU wrote before. So only this module matches message text. Unknown text changes nothing.

# qemuProcessReportLogError and qemuMonitorIO; then QEMU's own words, if it said any.
_ENDED: Final = re.compile(
    r"(?:closed the monitor|exited while connecting to monitor)(?::\s*(?P<said>.*))?\s*$", re.DOTALL
)
_NO_MEMORY: Final = re.compile(r"cannot set up guest memory|Cannot allocate memory|unable to map backing store")
_SIGNALLED: Final = re.compile(r"terminating on signal \d+")


def start_failed(name: str, exc: libvirt.libvirtError, words: str) -> ShimError:
    """The error to raise for `exc`, which `virDomain.create` raised. `words`: what QEMU said that libvirt has not read."""
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


# Exits of VMs' QEMUs as reported by the kernel, until libvirt reports them. Must not claim more than is certain.
#
# libvirt looks after a QEMU that closed its monitor in steps of 200 ms and keeps the VM locked meanwhile: its event
# comes late, and whoever asks it waits. A pidfd tells at once that QEMU has ended. Why it ended is libvirt's own
# rule: destroyed if we asked for that; shut down if QEMU said so before, which libvirt writes into the VM's status
# file before it lets QEMU end (qemuProcessHandleShutdown); else crashed. Under a libvirtd somebody else may have
# destroyed it, so there the last case is left to libvirt's own event.
#
# QEMU also says that it shuts down when it gets a SIGTERM from outside. libvirt tells that apart in an event, and
# forgets it: its state is that of a guest which has shut down. Here it is remembered, and counts as destroyed.

log = structlog.get_logger(__name__)

# The beginning of a status file: `state` is of the words that virsh uses.
_STATE: Final = re.compile(rb"<domstatus state='(\w+)'")
_BEGINNING: Final = 4096
# Seconds: libvirt writes the file and then sends its event, while QEMU is ending.
_EVENT_WAIT: Final = 0.1


@dataclass(slots=True)
class _WatchedQemu:
    """One QEMU. `why` if we are about to end it; `by` once it is known who shut it down; `is_reported` once libvirt has told
    of its end."""

    domain: uuid.UUID
    name: str
    why: OffReason | None = None
    by: OffReason | None = None
    is_reported: bool = False


class QemuExitWatcher:
    """`notify` is called from a thread of its own when `over` has news of a domain. `directory` as `qemu_process` knows it;
    "" follows nothing. `is_embedded`: libvirt is in this process."""

    def __init__(self, directory: str, notify: Callable[[uuid.UUID], None], *, is_embedded: bool) -> None:
        self._directory = directory
        self._notify = notify
        self._is_embedded = is_embedded
        # Where others run libvirt it remembers by itself.
        self._guest_ends = GuestEnds(os.path.join(directory, "guest-ends") if directory and is_embedded else "")
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._ended_from_outside: set[uuid.UUID] = set()
        self._descriptors: dict[int, _WatchedQemu] = {}
        self._over: dict[uuid.UUID, PowerState] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._poll = select.epoll()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._closing, select.EPOLLIN)

    def over(self, domain: uuid.UUID) -> PowerState | None:
        """OFF and why, from QEMU's end until libvirt tells of it; else None: ask libvirt."""
        with self._lock:
            return self._over.get(domain)

    def corrected(self, domain: uuid.UUID, told: PowerState) -> PowerState:
        """What libvirt reports, corrected."""
        with self._lock:
            from_outside = domain in self._ended_from_outside
        if told.power is not Power.OFF:
            return told
        if told.reason is OffReason.SHUTDOWN and from_outside:
            return PowerState(Power.OFF, OffReason.DESTROYED)
        if told.reason in (OffReason.CRASHED, OffReason.UNKNOWN) and self._guest_ends.has(domain):
            return PowerState(Power.OFF, OffReason.SHUTDOWN)
        return told

    def forget(self, domain: uuid.UUID) -> None:
        """It is about to be started, or it is removed: what is known is of an earlier run."""
        with self._lock:
            self._ended_from_outside.discard(domain)
        self._guest_ends.forget(domain)
        self._drop(domain)

    def keep(self, there: Collection[uuid.UUID]) -> None:
        """Nothing is remembered of others, which are gone."""
        self._guest_ends.keep(there)

    def follow(self, domain: uuid.UUID, name: str) -> None:
        """It runs. One that cannot be found (it has just ended) is left to libvirt; a second call does nothing."""
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
            except BaseException:  # the next call is to begin anew
                os.close(descriptor)
                raise
            self._descriptors[descriptor] = _WatchedQemu(domain, name)

    def will_destroy(self, domain: uuid.UUID) -> None:
        """We are about to end it."""
        with self._lock:
            for followed in self._of(domain):
                followed.why = OffReason.DESTROYED

    def shutting_down(self, domain: uuid.UUID, *, by_host: bool) -> None:
        """QEMU has said so: its guest did it, or something on the host. The first word counts: libvirt ends a QEMU whose guest
        has shut down by a signal, too. Called on libvirt's event thread."""
        if not by_host:  # first: from here on libvirt ends QEMU
            self._guest_ends.add(domain)
        with self._news:
            for followed in self._of(domain):
                followed.by = followed.by or (OffReason.DESTROYED if by_host else OffReason.SHUTDOWN)
                by_host = followed.by is OffReason.DESTROYED
            if by_host:
                self._ended_from_outside.add(domain)
            self._news.notify_all()

    def stopped(self, domain: uuid.UUID) -> None:
        """libvirt has told of its end. Called on its event thread."""
        self._drop(domain)

    def forget_exits(self) -> None:
        """Events may have been lost: libvirt is to be asked."""
        with self._lock:
            self._over.clear()

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
        """From here on libvirt is asked."""
        with self._lock:
            self._over.pop(domain, None)
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
        except Exception:  # the edge of a thread: the ends of others must be told
            log.exception("qemu.end.crashed", name=followed.name)
            with self._lock:  # libvirt tells of this one; it must not be reported for ever
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
        """None: libvirt will tell."""
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
    if qemu_process.find(directory, name, domain) != pid:  # the number could have changed hands in between
        os.close(descriptor)
        return None
    return descriptor


def _last_state(directory: str, name: str) -> str:
    """What libvirt last wrote of the VM, "" if it has removed that (then it is through)."""
    try:
        with open(f"{directory}/{name}.xml", "rb") as file:
            found = _STATE.search(file.read(_BEGINNING))
    except OSError:
        return ""
    return found[1].decode() if found else ""


def handed_on_is_there(definition: str, container: ContainerId) -> bool:
    """Whether that VM has a block device, UEFI's variables, a TPM, or a disk that it writes and that outlives its container."""
    domain = etree.fromstring(definition.encode())
    if domain.find("os/nvram") is not None or domain.find("devices/tpm") is not None:
        return True
    return any(_outlives(one, container) for one in domain.iterfind("devices/disk"))


def _outlives(disk: etree._Element, container: ContainerId) -> bool:
    source = disk.find("source")
    if disk.get("type") == "block":
        return True
    if source is None or disk.find("readonly") is not None:
        return False
    return PurePath(source.get("file", "")).parent.name != container.value
