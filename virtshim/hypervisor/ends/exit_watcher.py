"""Exits of VMs' QEMUs as reported by the kernel, until libvirt reports them. Must not claim more than is certain.

libvirt looks after a QEMU that closed its monitor in steps of 200 ms and keeps the VM locked meanwhile: its event comes
late, and whoever asks it waits. A pidfd tells at once that QEMU has ended. Why it ended is libvirt's own rule: destroyed
if we asked for that; shut down if QEMU said so before, which libvirt writes into the VM's status file before it lets QEMU
end (qemuProcessHandleShutdown); else crashed. Under a libvirtd somebody else may have destroyed it, so there the last
case is left to libvirt's own event.

QEMU also says that it shuts down when it gets a SIGTERM from outside. libvirt tells that apart in an event, and forgets it: its
state is that of a guest which has shut down. Here it is remembered, and counts as destroyed.
"""

from __future__ import annotations

import os
import re
import select
import threading
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.domain.vm import OffReason, Power, PowerState
from virtshim.hypervisor import qemu_process
from virtshim.hypervisor.ends.guest_ends import GuestEnds
from virtshim.primitives.threads import lasting

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
