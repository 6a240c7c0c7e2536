"""The serial ports of one VM that commands use, and which are leased."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from virtshim.annotations.options import MAX_EXEC_PORTS
from virtshim.guest.command import exec_port
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable, WrongState
from virtshim.system.threads import started

log = structlog.get_logger(__name__)

# Ports of one command, its output and its errors; a VM with fewer ports than two sessions take keeps none.
_KEPT = 2
_KEPT_FROM = 6
# While more are being plugged in: seconds since the last, which take milliseconds on an idle machine.
_PLUG_WAIT = 30.0
# Seconds without another try after a port could not be plugged in.
_RETRY_PAUSE = 2.0
# QEMU tells the guest of a new port by two messages, and forgets what does not fit into a queue of 32.
_MAX_BATCH = 8
_SOCKET = re.compile(r"exec-([0-9]{1,3})\.sock")


@dataclass(frozen=True, slots=True)
class ExecPort:
    """`name` in the guest, `path` of the socket here."""

    name: str
    path: str

    def connect(self) -> socket.socket:
        """QEMU serves one client at a time; data for the guest waits in the socket until the guest opens the port."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connected.connect(self.path)
        except OSError as exc:
            connected.close()
            raise Unavailable(f"the virtual machine has ended: {self.name} cannot be reached ({exc.strerror})") from exc
        return connected


class ExecPorts:
    def __init__(
        self,
        directory: str,
        plug: Callable[[int], None],
        await_ports: Callable[[Sequence[int]], Collection[int]],
        lease_seconds: float,
    ) -> None:
        """The ports are those whose sockets are there. When they do not suffice, `plug` brings more into the VM, by number, and
        they stay; a VM without any was made so on purpose, and gets none. `await_ports` waits for some to show up in the guest,
        and tells which did. Both raise ShimError."""
        self._lease_seconds = lease_seconds
        self._directory = directory
        self._plug = plug
        self._await_ports = await_ports
        numbers: list[int] = []
        with suppress(FileNotFoundError):
            numbers = sorted(int(found[1]) for entry in os.listdir(directory) if (found := _SOCKET.fullmatch(entry)))
        self.count = len(numbers)
        self._next = max(numbers, default=0) + 1
        # The one that rested longest is taken first.
        self._free = deque(self._port(number) for number in numbers)
        self._wanted = 0  # by those who wait in `lease`
        self._plugging = False
        self._plugging_until = 0.0
        self._refused_at = -_RETRY_PAUSE
        self._refusal = ""
        self._changed = threading.Condition()

    def lease(self, count: int, deadline: CancellableDeadline) -> Sequence[ExecPort]:
        """All or none. Raises ResourceExhausted if they are not free within a few seconds, and no more can be had. The patient
        leave enough for a command of somebody else: probes and hooks must not wait for the sessions of users."""
        if not self.count:
            raise WrongState(
                "this virtual machine has no ports for commands; set the pod's annotation virtshim.io/exec-ports "
                "(default 12)"
            )
        begun = time.monotonic()
        with self._changed:
            wanted = count + (_KEPT if deadline.patient and self.count >= _KEPT_FROM else 0)
            self._wanted += wanted
            try:
                while len(self._free) < wanted:
                    self._plug_more()
                    if time.monotonic() >= max(begun + self._lease_seconds, self._plugging_until):
                        raise ResourceExhausted(
                            f"all {self.count - wanted + count} ports for {'sessions' if wanted > count else 'commands'} are in "
                            f"use in this virtual machine{self._refusal and f' and no more fit ({self._refusal})'}; wait for a "
                            "command to end"
                        )
                    self._changed.wait(deadline.slice("a free port for the command"))
                return [self._free.popleft() for _ in range(count)]
            finally:
                self._wanted -= wanted

    def release(self, ports: Sequence[ExecPort]) -> None:
        with self._changed:
            self._free.extend(ports)
            self._changed.notify_all()

    def _port(self, number: int) -> ExecPort:
        return ExecPort(exec_port(number), f"{self._directory}/exec-{number}.sock")

    def _plug_more(self) -> None:
        """On a thread of its own: callers may leave when their time is over, however long libvirt takes."""
        if not self._plugging and self._numbers():
            started(threading.Thread(target=self._plug_wanted, name="exec-ports", daemon=True))
            self._plugging = True  # it takes the lock first, which is held here

    def _numbers(self) -> range:
        """Of the next ports to plug in: those that are wanted and to be had."""
        if time.monotonic() < self._refused_at + _RETRY_PAUSE:
            return range(0)
        last = min(self._next + self._wanted - len(self._free), self._next + _MAX_BATCH, MAX_EXEC_PORTS)
        return range(self._next, last)

    def _plug_wanted(self) -> None:
        while True:
            with self._changed:
                numbers = self._numbers()
                if not numbers:
                    self._plugging, self._plugging_until = False, 0.0
                    return
                self._plugging_until = time.monotonic() + _PLUG_WAIT
            try:
                plugged, refusal = self._plugged(numbers)
                usable = self._usable(plugged) if plugged else ()
            except BaseException:
                with self._changed:
                    self._plugging, self._plugging_until = False, 0.0
                raise
            if not refusal and len(usable) < len(plugged):
                refusal = "the ports did not appear in the guest; it may lack memory (each takes half a MiB)"
            with self._changed:
                self._next += len(plugged)
                self._refusal = refusal
                if refusal:
                    self._refused_at = time.monotonic()
                self.count += len(usable)
                self._free.extend(self._port(number) for number in usable)
                self._changed.notify_all()

    def _plugged(self, numbers: Sequence[int]) -> tuple[Sequence[int], str]:
        """Those that are in the VM now, the first of `numbers`, and why not all."""
        for index, number in enumerate(numbers):
            try:
                self._plug(number)
            except ShimError as exc:
                path = self._port(number).path
                log.warning("exec.plug.failed", port=path, error=str(exc))
                with suppress(FileNotFoundError):
                    os.unlink(path)  # what has a socket counts as plugged in
                return numbers[:index], str(exc)
        return numbers, ""

    def _usable(self, numbers: Sequence[int]) -> Collection[int]:
        try:
            return self._await_ports(numbers)
        except ShimError:
            return numbers  # a guest too busy to say
