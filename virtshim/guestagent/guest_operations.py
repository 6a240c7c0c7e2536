"""What a guest's agent is asked beside commands: freezing file systems, its clock, SSH keys, files, the console size.
Implements `virtshim.ports.guests.GuestOperations`.

Questions and answers: docs.qemu.org, "QEMU Guest Agent Protocol Reference".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from virtshim.domain.errors import DeadlineExceeded, InternalError, NotFound, Unavailable, WrongState
from virtshim.domain.guest.filesystems import GuestFilesystem
from virtshim.domain.ids import ContainerId
from virtshim.guestagent import exec_scripts
from virtshim.guestagent.agent_files import read_tail
from virtshim.guestagent.channel import AgentRefused, CommandDisabled, whole_number
from virtshim.guestagent.guest_exec import GuestVm
from virtshim.guestagent.guest_info import ASK_FILESYSTEMS, filesystems_in
from virtshim.guestagent.wait import CancellableDeadline

# An agent that is there answers a ping at once; a checkpoint does not wait for one that is not.
_PING: Final = 2.0
# Seconds that a guest's clock may be off without being set: one that is disciplined must not be pushed about.
_OFF: Final = 0.5
# Seconds in which an agent that cannot restart its guest says so.
_GOES_DOWN: Final = 3.0
_MAX_NS: Final = 1 << 63
_CONSOLE: Final = "/dev/ttyS0"


class AgentOperations:
    def __init__(self, vm: Callable[[ContainerId], GuestVm]) -> None:
        self._vm = vm

    def freeze(self, container: ContainerId, timeout: float) -> int:
        channel = self._vm(container).channel
        deadline = CancellableDeadline.of(timeout)
        try:
            channel.ask("guest-ping", None, deadline.at_most(_PING))
        except DeadlineExceeded as exc:
            raise WrongState(f"no guest agent answers: {exc}") from exc
        return whole_number(channel.ask("guest-fsfreeze-freeze", None, deadline), "number of frozen file systems")

    def thaw(self, container: ContainerId, timeout: float) -> None:
        self._vm(container).channel.ask("guest-fsfreeze-thaw", None, CancellableDeadline.of(timeout))

    def reboot(self, container: ContainerId, timeout: float) -> None:
        """An agent that does it says nothing more, or breaks off; one that says anything has not done it. What it runs,
        `/sbin/shutdown`, some guests do not have."""
        deadline = CancellableDeadline.of(timeout)
        channel = self._vm(container).channel
        try:
            channel.ask("guest-ping", None, deadline.at_most(_PING))
        except DeadlineExceeded as exc:
            raise WrongState(f"no guest agent answers: {exc}; `virtshim reset` needs none") from exc
        try:
            channel.ask("guest-shutdown", {"mode": "reboot"}, deadline.at_most(_GOES_DOWN))
        except (DeadlineExceeded, Unavailable):
            return
        except (AgentRefused, CommandDisabled):
            code = self._rebooted_by_script(container, deadline)
            if code:
                raise InternalError(
                    f"the guest cannot restart itself (exit code {code}); `virtshim reset` does it"
                ) from None

    def _rebooted_by_script(self, container: ContainerId, deadline: CancellableDeadline) -> int:
        try:
            return self._vm(container).run_script(exec_scripts.REBOOT, (), deadline)
        except Unavailable:  # it goes down already
            return 0

    def set_clock(self, container: ContainerId, timeout: float) -> None:
        """An agent that may not be told the time may still take it from the clock chip."""
        channel = self._vm(container).channel
        deadline = CancellableDeadline.of(timeout)
        shown = whole_number(channel.ask("guest-get-time", None, deadline), "time", most=_MAX_NS)
        if abs(shown - time.time_ns()) < _OFF * 1e9:
            return
        try:
            channel.ask("guest-set-time", {"time": time.time_ns()}, deadline)
        except AgentRefused:
            channel.ask("guest-set-time", None, deadline)

    def add_ssh_keys(self, container: ContainerId, user: str, keys: Sequence[str], timeout: float) -> None:
        request = {"username": user, "keys": list(keys), "reset": False}
        channel = self._vm(container).channel
        try:
            channel.ask("guest-ssh-add-authorized-keys", request, CancellableDeadline.of(timeout))
        except AgentRefused as exc:
            raise NotFound(f"{exc}; is there a user {user!r} with a home directory in the guest?") from exc
        except CommandDisabled as exc:
            raise WrongState(f"{exc} (it needs QEMU guest agent 5.2 or later)") from exc

    def read_tail(self, container: ContainerId, path: str, most: int, timeout: float) -> bytes:
        return read_tail(self._vm(container).channel, path, most, CancellableDeadline.of(timeout))

    def filesystems(self, container: ContainerId, timeout: float) -> Sequence[GuestFilesystem]:
        return filesystems_in(self._vm(container).channel.ask(ASK_FILESYSTEMS, None, CancellableDeadline.of(timeout)))

    def resize_console(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        words = (_CONSOLE, str(rows), str(columns))
        code = self._vm(container).run_script(exec_scripts.RESIZE_CONSOLE, words, CancellableDeadline.of(timeout))
        if code:
            raise InternalError(f"the guest cannot set the size of {_CONSOLE} (exit code {code})")
