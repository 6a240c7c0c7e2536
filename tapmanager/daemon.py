"""What tapmanager does as a daemon: it talks to systemd, reloads its settings on SIGHUP, and gives up capabilities.

tapmanager itself needs fewer capabilities than its children, the CNI plugins. A program that root starts gets every capability
of the bounding set, or, under NoNewPrivileges, only those that are also permitted to its parent. So the bounding and permitted
sets hold the plugins' capabilities, and the effective set holds tapmanager's. systemd's unit sets the same bounding set;
`virtshim up` and containers do not.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from tapmanager.errors import TapmanagerError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

# systemd: reports READY, WATCHDOG and STOPPING, and takes over an activated socket, without libsystemd. The protocols are in
# sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3).

_FIRST_FD = 3
# systemd reads at once; a full queue must never delay a life-cycle step.
_TIMEOUT = 0.5


def notify_systemd(*lines: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Sends `lines`, each `KEY=value`, as one message to systemd, and returns whether it was delivered. Raises nothing, because
    the daemon works without systemd too. Line breaks inside a line become spaces."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    message = "\n".join(" ".join(line.splitlines()) for line in lines).encode(errors="replace")
    name = b"\0" + os.fsencode(address[1:]) if address[0] == "@" else os.fsencode(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_TIMEOUT)
        try:
            sock.sendto(message, name)
        except OSError:
            return False
    return True


def watchdog_seconds(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds between two WATCHDOG=1 messages: half of systemd's limit. None if systemd does not watch this process."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2_000_000 if usec.isdecimal() and int(usec) > 0 else None


def activated_socket(environ: Mapping[str, str], pid: int) -> socket.socket | None:
    """The listening socket that systemd opened for this process; None if there is none."""
    if environ.get("LISTEN_PID") != str(pid) or environ.get("LISTEN_FDS") != "1":
        return None
    os.set_inheritable(_FIRST_FD, False)
    return socket.socket(fileno=_FIRST_FD)


# SIGTERM (by systemd) and SIGINT (in a terminal) stop our programs.


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on. Call this in the main thread."""
    stopping, asked = threading.Event(), _signals(signal.SIGTERM, signal.SIGINT)

    def set_when_asked() -> None:
        asked.get()
        stopping.set()

    threading.Thread(target=set_when_asked, name="stop", daemon=True).start()
    return stopping


def reload_requests() -> queue.SimpleQueue[None]:
    """One entry for each SIGHUP from now on. Call this in the main thread."""
    return _signals(signal.SIGHUP)


def _signals(*numbers: int) -> queue.SimpleQueue[None]:
    """One entry for each signal. An Event would not do: a handler runs in the main thread. If the handler interrupted that thread
    inside the Event's own wait() or set(), it would wait for ever for the lock that the thread holds."""
    arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
    for number in numbers:
        signal.signal(number, lambda *_: arrived.put(None))
    return arrived


# SIGHUP reads the settings again. If they have no fault, all changeable ones are applied; otherwise none.

S = TypeVar("S", bound="DataclassInstance")


@dataclass(slots=True)
class Reload(Generic[S]):
    """`load` reads the settings. `changeable`: those that `use` applies; changes of others wait for a restart."""

    in_force: S
    load: Callable[[], S]
    changeable: Sequence[str]
    use: Callable[[S], None]

    def start(self) -> None:
        """Call this in the main thread."""
        threading.Thread(target=self._run, args=(reload_requests(),), name="reload", daemon=True).start()

    def _run(self, asked: queue.SimpleQueue[None]) -> None:
        while True:
            asked.get()
            notify_systemd("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                self.again()
            except Exception:
                log.exception("settings.broken")  # the thread must survive to serve the next signal
            notify_systemd("READY=1")

    def again(self) -> bool:
        """Reloads; returns whether the new settings are in force."""
        try:
            new = self.load()
        except TapmanagerError as exc:
            log.error("settings.refused the former settings stay in force: %s", exc)  # noqa: TRY400
            return False
        self._take(new)
        return True

    def _take(self, new: S) -> None:
        changed = [
            one.name for one in dataclasses.fields(new) if getattr(new, one.name) != getattr(self.in_force, one.name)
        ]
        now = [name for name in changed if name in self.changeable]
        held = dataclasses.replace(self.in_force, **{name: getattr(new, name) for name in now})
        self.use(held)
        self.in_force = held
        log.info("settings.reloaded changed=%s", ",".join(now) or "nothing")
        if later := [name for name in changed if name not in now]:
            log.warning("settings.need_restart settings=%s", ",".join(later))


# The numbers in linux/capability.h.
_NUMBERS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6,
    "SETUID": 7, "SETPCAP": 8, "NET_BIND_SERVICE": 10, "NET_ADMIN": 12, "NET_RAW": 13, "IPC_LOCK": 14,
    "SYS_MODULE": 16, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_NICE": 23, "SYS_RESOURCE": 24, "PERFMON": 38, "BPF": 39,
}  # fmt: skip

# The capabilities of CNI plugins. systemd's unit gives the reason for each.
PLUGIN_CAPABILITIES = frozenset(_NUMBERS)
# tapmanager's own, for: links, filters, taps; packet sockets; setns(2), mount(2); files and sockets of VMs; reading the namespace
# of a process; its oom_score_adj and cpuset; killing a hanging plugin that has changed its user.
OWN_CAPABILITIES = frozenset(
    {
        "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "CHOWN", "FOWNER", "DAC_OVERRIDE", "DAC_READ_SEARCH", "SYS_PTRACE", "SYS_RESOURCE",
        "SYS_NICE", "KILL",
    }
)  # fmt: skip

_VERSION_3 = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_MOST = 64


def capability_mask(names: Collection[str]) -> int:
    """The capabilities as a bit set, in the kernel's form."""
    return sum(1 << _NUMBERS[name] for name in names)


def give_up_capabilities() -> None:
    """Call this once, before other threads start, because each thread has its own capabilities. Missing capabilities are fine.
    Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, plugins = capability_mask(OWN_CAPABILITIES), capability_mask(PLUGIN_CAPABILITIES)
    for number in range(_MOST):
        has_it = not plugins >> number & 1 and libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1
        if has_it and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            log.info("capabilities.kept number=%d error=%s", number, os.strerror(ctypes.get_errno()))
    header = ctypes.create_string_buffer(struct.pack("=Ii", _VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _check(libc.capget(header, data), "capget")
    low_effective, low, _, high_effective, high, _ = struct.unpack("=6I", data.raw[:24])
    effective, permitted = (low_effective | high_effective << 32) & own, (low | high << 32) & plugins
    wanted = (effective & 0xFFFFFFFF, permitted & 0xFFFFFFFF, 0, effective >> 32, permitted >> 32, 0)
    _check(libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *wanted))), "capset")


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")
