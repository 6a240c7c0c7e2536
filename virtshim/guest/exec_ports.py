"""The serial ports of one VM for commands, and which of them are in use."""

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

# Ports that sessions leave free: output and errors of one command. A VM with too few ports for two sessions keeps none
# free.
_KEPT = 2
_KEPT_FROM = 6
# Seconds since the last port was plugged in, which takes milliseconds on an idle machine.
_PLUG_WAIT = 30.0
# Seconds before the next try if a port could not be plugged in.
_RETRY_PAUSE = 2.0
# QEMU sends the guest two messages for each new port, and drops messages that do not fit into a queue of 32.
_MAX_BATCH = 8
_SOCKET = re.compile(r"exec-([0-9]{1,3})\.sock")


@dataclass(frozen=True, slots=True)
class ExecPort:
    """`name`: in the guest. `path`: of the socket on the node."""

    name: str
    path: str

    def connect(self) -> socket.socket:
        """Connects. QEMU serves one client at a time; data for the guest waits in the socket until the guest opens the
        port."""
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
        """The VM has the ports whose sockets exist. If they do not suffice, `plug` adds more, by number, and they stay.
        A VM without any port was made so on purpose and gets none. `await_ports` waits for ports to appear in the
        guest, and returns those that did. Both raise ShimError."""
        self._lease_seconds = lease_seconds
        self._directory = directory
        self._plug = plug
        self._await_ports = await_ports
        numbers: list[int] = []
        with suppress(FileNotFoundError):
            numbers = sorted(int(found[1]) for entry in os.listdir(directory) if (found := _SOCKET.fullmatch(entry)))
        self.count = len(numbers)
        self._next = max(numbers, default=0) + 1
        # The port that was free for longest is taken first.
        self._free = deque(self._port(number) for number in numbers)
        self._wanted = 0  # by callers that wait in `lease`
        self._plugging = False
        self._plugging_until = 0.0
        self._refused_at = -_RETRY_PAUSE
        self._refusal = ""
        self._changed = threading.Condition()

    def lease(self, count: int, deadline: CancellableDeadline) -> Sequence[ExecPort]:
        """Leases all ports or none. Raises ResourceExhausted if they do not become free within a few seconds and no
        more can be added. Patient callers leave enough for another command, so that users' sessions do not block probes
        and hooks."""
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
        """Plugs in ports on a thread of its own, because callers may leave while libvirt still works."""
        if not self._plugging and self._numbers():
            started(threading.Thread(target=self._plug_wanted, name="exec-ports", daemon=True))
            self._plugging = True  # the new thread first takes the lock, which is held here

    def _numbers(self) -> range:
        """The numbers of the next ports to plug in."""
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
                refusal = (
                    "the ports did not appear in the guest; it may lack memory (each takes 0.5 MiB, with QEMU 10 4 MiB)"
                )
            with self._changed:
                self._next += len(plugged)
                self._refusal = refusal
                if refusal:
                    self._refused_at = time.monotonic()
                self.count += len(usable)
                self._free.extend(self._port(number) for number in usable)
                self._changed.notify_all()

    def _plugged(self, numbers: Sequence[int]) -> tuple[Sequence[int], str]:
        """Returns the ports that are in the VM now, the first of `numbers`, and why some are not."""
        for index, number in enumerate(numbers):
            try:
                self._plug(number)
            except ShimError as exc:
                path = self._port(number).path
                log.warning("exec.plug.failed", port=path, error=str(exc))
                with suppress(FileNotFoundError):
                    os.unlink(path)  # a port with a socket counts as plugged in
                return numbers[:index], str(exc)
        return numbers, ""

    def _usable(self, numbers: Sequence[int]) -> Collection[int]:
        try:
            return self._await_ports(numbers)
        except ShimError:
            return numbers  # the guest is too busy to answer
