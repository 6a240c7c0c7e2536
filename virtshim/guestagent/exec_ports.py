"""The serial ports of one VM that commands talk through: who has which."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from virtshim.domain.errors import ResourceExhausted, Unavailable, WrongState
from virtshim.domain.guest_command import exec_port
from virtshim.guestagent.patience import Patience

# A port is free again a moment after its command has ended.
_FREE_SOON = 5.0
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
    def __init__(self, directory: str) -> None:
        """The ports are those whose sockets are there: a VM keeps what it was started with."""
        numbers: list[int] = []
        with suppress(FileNotFoundError):
            numbers = sorted(int(found[1]) for entry in os.listdir(directory) if (found := _SOCKET.fullmatch(entry)))
        self.count = len(numbers)
        # The one that rested longest is taken first.
        self._free = deque(ExecPort(exec_port(number), f"{directory}/exec-{number}.sock") for number in numbers)
        self._changed = threading.Condition()

    def lease(self, count: int, patience: Patience) -> Sequence[ExecPort]:
        """All or none. Raises ResourceExhausted if they are not free within a few seconds."""
        if self.count < count:
            raise WrongState(
                f"this virtual machine has {self.count} ports for commands and {count} are needed; set the pod's annotation "
                "virtshim.io/exec-ports (12 unless it says otherwise)"
            )
        until = time.monotonic() + _FREE_SOON
        with self._changed:
            while len(self._free) < count:
                if time.monotonic() >= until:
                    raise ResourceExhausted(
                        f"all {self.count} ports for commands are in use in this virtual machine; wait for a command to end, "
                        "or give the pod more by the annotation virtshim.io/exec-ports"
                    )
                self._changed.wait(patience.slice("a free port for the command"))
            return [self._free.popleft() for _ in range(count)]

    def give_back(self, ports: Sequence[ExecPort]) -> None:
        with self._changed:
            self._free.extend(ports)
            self._changed.notify_all()
