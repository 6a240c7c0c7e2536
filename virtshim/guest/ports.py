"""Ports to guests: their agent, the entrypoint's input and output, and kubelet's files for termination messages."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.guest.command import CommandResult, EntrypointProgress, GuestCommand, OutputPosition
from virtshim.model.container import ProcessUser
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output, Streams, StreamSession

# File systems in a guest, as its agent reports them.


@dataclass(frozen=True, slots=True)
class GuestFilesystem:
    """A mounted file system. `device`: the guest's name of its device. Sizes are 0 if the agent does not report
    them."""

    mount_point: str
    kind: str
    device: str
    used_bytes: int = 0
    total_bytes: int = 0


class GuestAgents(Protocol):
    """Requests to running guests through the QEMU guest agent. A guest's answers may be false; their size and time are
    limited. Errors: WrongState (no agent has come up, or it may not run commands), DeadlineExceeded, Unavailable (the
    VM ended, the agent closed the connection), ResourceExhausted (all ports for commands are in use), InvalidRequest
    (the guest has no such directory or user), InternalError."""

    def run(
        self,
        container: ContainerId,
        command: GuestCommand,
        timeout: float,
        cancelled: threading.Event,
        agent_within: float = 60.0,
    ) -> CommandResult:
        """Waits for the agent to come up and for the command's end, `timeout` seconds in all. With 0 the command has no
        limit, and the agent has `agent_within` seconds to come up; if those are 0 too, it must be there (WrongState).
        At the end of the time, or when `cancelled` is set (Aborted), the command and its children are killed. Keeps at
        most 16 MiB of each stream."""

    async def open(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession:
        """Like `run`, without a time limit; returns when the command is being started."""

    def start_entrypoint(
        self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event
    ) -> None:
        """Starts the container's command, unless an earlier call has started it in this boot of the guest. Waits
        `timeout` seconds for the agent (DeadlineExceeded). After that, after Unavailable, and after Aborted
        (`cancelled` was set) the call may be repeated; any other error is final."""

    def progress(self, container: ContainerId, read_to: OutputPosition) -> EntrypointProgress:
        """What the container's command has written after `read_to`, one piece of each stream, and whether it has ended.
        Output before `read_to` may be dropped. The call may be repeated after any error."""

    def entrypoint_user(self, container: ContainerId) -> ProcessUser | None:
        """The user that the container's command started as. None if it has not started, or the guest does not report
        it."""

    def entrypoint_exists(self, container: ContainerId) -> bool:
        """False if the command was started but the guest no longer knows it."""

    def signal_entrypoint(
        self, container: ContainerId, number: int, timeout: float, cancelled: threading.Event
    ) -> bool:
        """Sends the container's command that signal (Linux's number), or none if it is 0, by `guest/entrypoint.py`. False
        if the command does not run. Waits `timeout` seconds for the agent's answer, or until `cancelled` is set (Aborted)."""

    def guest_info(self, container: ContainerId, timeout: float) -> Mapping[str, object]:
        """What the guest reports about itself, as JSON of a few KiB at most. Leaves out what it does not report within
        `timeout` seconds. Never raises."""

    def connect(self, container: ContainerId) -> None:
        """Connects to the port of an agent whose guest does not run yet, and waits for nothing. An agent that listened when its
        guest was copied then answers as soon as the guest runs: QEMU's agent sleeps for a moment each time when it finds nobody
        connected. Never raises: later calls connect themselves."""

    def forget(self, container: ContainerId) -> None:
        """Closes the connection, because the VM is gone. No error if there is none."""


class GuestOperations(Protocol):
    """Each call waits for the agent to come up, `timeout` seconds in all. Errors: DeadlineExceeded (no agent, or no
    answer), Unavailable (the VM ended, the agent closed the connection), WrongState (the agent may not do that),
    InternalError (it refused)."""

    def freeze(self, container: ContainerId, timeout: float) -> int:
        """Flushes the guest's file systems and freezes them until `thaw`; returns how many. After WrongState nothing is
        frozen (no agent, or one that cannot). After any other error they may be frozen, or become so soon."""

    def thaw(self, container: ContainerId, timeout: float) -> None:
        """No error if nothing is frozen."""

    def reboot(self, container: ContainerId, timeout: float) -> None:
        """Makes the guest restart itself. WrongState: no agent, or one that cannot."""

    def set_clock(self, container: ContainerId, timeout: float) -> None:
        """Sets the guest's clock to the host's time."""

    def run_script(
        self,
        container: ContainerId,
        script: str,
        arguments: Sequence[str],
        data: bytes,
        timeout: float,
        cancelled: threading.Event,
    ) -> tuple[int, str]:
        """Runs a short shell script as the agent's user, which reads `data` and writes nothing but errors. Returns its exit code
        (-1 if a signal ended it) and the errors. Uses no port for commands. `cancelled`: Aborted soon after it was set."""

    def add_ssh_keys(self, container: ContainerId, user: str, keys: Sequence[str], timeout: float) -> None:
        """Lets these keys log in as that user of the guest; existing keys stay. NotFound: the guest has no such user,
        or the agent reports another fault with the user's files."""

    def read_tail(self, container: ContainerId, path: str, most: int, timeout: float) -> bytes:
        """The last bytes of a file in the guest; none if the file does not exist."""

    def filesystems(self, container: ContainerId, timeout: float) -> Sequence[GuestFilesystem]:
        """The mounted file systems that the guest reports, a few at most."""

    def resize_console(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        """Sets the size of the terminal on the serial console."""


class TerminationFiles(Protocol):
    """kubelet's files for containers' termination messages."""

    def write(self, path: str, pod_uid: str, message: bytes) -> None:
        """Replaces the content of the file, which must exist and be regular. Follows no link below the pod's directory.
        Errors: InvalidRequest, InternalError."""


class EntrypointInputs(Protocol):
    """The inputs of containers' commands. Errors: as `GuestOperations`; ResourceExhausted (no port for it is free)."""

    async def open(self, container: ContainerId) -> StreamSession:
        """Opens one writer to the input. When it closes, the command keeps reading from the others."""

    def end(self, container: ContainerId, timeout: float) -> None:
        """Makes the command read end of file once all writers have closed."""

    def resize(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        """Sets the size of the command's terminal. InternalError if it has none."""


class EntrypointListeners(Protocol):
    """Clients attached to containers' entrypoints. Called from any thread; returns at once."""

    def has_clients(self, container: ContainerId) -> bool: ...

    def publish(self, container: ContainerId, output: Sequence[Output]) -> None:
        """Passes on output of the entrypoint that is already in the log."""

    def ended(self, container: ContainerId, code: int) -> None:
        """Called when all output has been delivered."""

    def forget(self, container: ContainerId) -> None:
        """Called when its VM no longer runs."""
