"""What is asked of the agent in a guest."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.guest.command import CommandResult, EntrypointProgress, GuestCommand, OutputPosition
from virtshim.model.container import ProcessUser
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output, Streams, StreamSession

# The file systems in a guest, as its agent tells.


@dataclass(frozen=True, slots=True)
class GuestFilesystem:
    """One that is mounted. `device` is the guest's name for what it lies on; sizes are 0 where an agent does not tell them."""

    mount_point: str
    kind: str
    device: str
    used_bytes: int = 0
    total_bytes: int = 0


class GuestAgents(Protocol):
    """Running guests, asked from within by way of the QEMU guest agent. What a guest says may be false; it is limited in size
    and time. Errors: WrongState (no agent has come up; the agent may not run commands), DeadlineExceeded,
    Unavailable (the VM ended, the agent broke off), ResourceExhausted (all ports for commands are in use), InvalidRequest
    (no such directory or user in the guest), InternalError."""

    def run(
        self,
        container: ContainerId,
        command: GuestCommand,
        timeout: float,
        cancelled: threading.Event,
        agent_within: float = 60.0,
    ) -> CommandResult:
        """Waits for the agent to come up, and for the command's end; `timeout` seconds in all. With 0 the command may take as
        long as it likes, and the agent `agent_within` seconds to come up; if those are 0, it must be there (WrongState). Then, or
        when `cancelled` is set (Aborted), the command and its children are killed. At most 16 MiB of each stream are kept."""

    async def open(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession:
        """As `run`, without a time limit; returns when the command is being started."""

    def start_entrypoint(
        self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event
    ) -> None:
        """Starts the container's own command. One that was begun before, in this boot of the guest, is not begun again. Waits
        `timeout` seconds for the agent: DeadlineExceeded. After that, Unavailable, and Aborted (`cancelled` was set), it may be
        tried again; any other error is final."""

    def progress(self, container: ContainerId, read_to: OutputPosition) -> EntrypointProgress:
        """What the container's own command has written behind `read_to`, a piece of each stream, and whether it has ended.
        What is before `read_to` is not needed any more and may be dropped. After any error it may be tried again."""

    def entrypoint_user(self, container: ContainerId) -> ProcessUser | None:
        """Who the container's own command began as. None if it has not begun, or the guest does not tell (yet)."""

    def entrypoint_exists(self, container: ContainerId) -> bool:
        """False if the command was begun, and the guest knows nothing of it (any more)."""

    def signal_entrypoint(
        self, container: ContainerId, number: int, timeout: float, cancelled: threading.Event
    ) -> bool:
        """Sends the container's own command that signal (Linux's number), or none if it is 0. False if it does not run (any
        more). Waits `timeout` seconds for the agent's answer, or until `cancelled` is set (Aborted)."""

    def guest_info(self, container: ContainerId, timeout: float) -> Mapping[str, object]:
        """What the guest reports about itself, as JSON of a few KiB at most; what it does not say within `timeout`
        seconds is left out. Never raises."""

    def forget(self, container: ContainerId) -> None:
        """The VM is gone: closes the connection. No error if there is none."""


class GuestOperations(Protocol):
    """Each call waits for the agent to come up, `timeout` seconds in all. Errors: DeadlineExceeded (no agent, or no answer),
    Unavailable (the VM ended, the agent broke off), WrongState (the agent may not do that), InternalError (it refused)."""

    def freeze(self, container: ContainerId, timeout: float) -> int:
        """Flushes its file systems and freezes them until `thaw`; returns how many. After WrongState nothing is
        frozen (no agent, or one that cannot); after any other error they may be, or may be soon."""

    def thaw(self, container: ContainerId, timeout: float) -> None:
        """No error if nothing is frozen."""

    def reboot(self, container: ContainerId, timeout: float) -> None:
        """The guest begins to restart itself. WrongState: no agent, or one that cannot."""

    def set_clock(self, container: ContainerId, timeout: float) -> None:
        """The guest's clock shows the host's time."""

    def add_ssh_keys(self, container: ContainerId, user: str, keys: Sequence[str], timeout: float) -> None:
        """They may log in as that user of the guest from now on; keys that are there already stay. NotFound: the guest has no
        such user, or another fault with its files that the agent tells."""

    def read_tail(self, container: ContainerId, path: str, most: int, timeout: float) -> bytes:
        """The last bytes of a file in the guest; none if it is not there."""

    def filesystems(self, container: ContainerId, timeout: float) -> Sequence[GuestFilesystem]:
        """Those that are mounted in it, as it says; a few at most."""

    def resize_console(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        """The terminal on the serial console has that size."""


class TerminationFiles(Protocol):
    """kubelet's files for containers' termination messages."""

    def write(self, path: str, pod_uid: str, message: bytes) -> None:
        """Replaces what is in the file. It must be there, and regular; below the pod's own directory no link is followed. Errors:
        InvalidRequest, InternalError."""


class EntrypointInputs(Protocol):
    """The inputs of containers' own commands. Errors: as `GuestOperations`; ResourceExhausted (no port for it is free)."""

    async def open(self, container: ContainerId) -> StreamSession:
        """One writer to the input; when it closes, the command keeps reading from the others."""

    def end(self, container: ContainerId, timeout: float) -> None:
        """The command reads end-of-file once all writers have closed."""

    def resize(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        """The command's terminal has that size. InternalError if it has none."""


class EntrypointListeners(Protocol):
    """Clients attached to containers' entrypoints. Called from any thread; returns at once."""

    def has_clients(self, container: ContainerId) -> bool: ...

    def publish(self, container: ContainerId, output: Sequence[Output]) -> None:
        """Output of the entrypoint, already written to the log."""

    def ended(self, container: ContainerId, code: int) -> None:
        """All of its output has been delivered."""

    def forget(self, container: ContainerId) -> None:
        """Its VM runs no more."""
