"""Guests whose commands the test scripts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from fakes.journal import WAIT_LIMIT
from fakes.turns import Turns

from virtshim.guest.command import CommandResult, EntrypointProgress, GuestCommand, OutputPosition
from virtshim.guest.ports import GuestFilesystem
from virtshim.model.container import ProcessUser
from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, NotFound, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output, Streams, StreamSession

Run = Callable[[GuestCommand, float, threading.Event], CommandResult]


def _echo(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
    return CommandResult(0, " ".join(command.argv).encode() + b"\n", b"")


class FakeGuests:
    """Implements `virtshim.guest.ports.GuestAgents` and `virtshim.guest.ports.GuestOperations`. `do` runs a command;
    `sessions` are
    handed out by `open`, oldest first. `begun`: the containers' own commands, as often as they were begun. `gone`: the VMs have
    ended. `users`: whom the guests know."""

    def __init__(self) -> None:
        self.do: Run = _echo
        self.commands: list[GuestCommand] = []
        self.sessions: list[StreamSession] = []
        self.told: dict[str, object] = {}
        self.forgotten: list[ContainerId] = []
        self.connected: list[ContainerId] = []
        self.begin_error: ShimError | None = None
        self.begun: dict[ContainerId, list[GuestCommand]] = {}
        self.still_there = True
        self.process_user: ProcessUser | None = None
        self.signals: list[int] = []
        self.waits: list[float] = []
        self.signal_error: ShimError | None = None
        self.gone = False
        self.users = {"root"}
        self.frozen: set[ContainerId] = set()
        self.file_systems = 2  # that can be frozen
        self.rebooted: list[ContainerId] = []
        self.clocks_set: list[ContainerId] = []
        self.ssh_keys: list[tuple[str, str]] = []
        self.scripts: list[tuple[ContainerId, str, tuple[str, ...], bytes]] = []
        self.script_limits: list[float] = []
        self.scripts_hang = False
        self.script_result: Callable[[ContainerId], tuple[int, str]] = lambda _container: (0, "")
        self.console_sizes: list[tuple[int, int]] = []
        self.mounted: tuple[GuestFilesystem, ...] = (GuestFilesystem("/", "ext4", "vda1", 1 << 20, 4 << 20),)
        self.files: dict[str, bytes] = {}
        self._progress: dict[int, EntrypointProgress] = {}
        self._told = threading.Condition()

    def tell(self, at: int, progress: EntrypointProgress) -> None:
        """Sets the answer for callers that have read up to piece `at` of stdout."""
        with self._told:
            self._progress[at] = progress
            self._told.notify_all()

    def start_entrypoint(
        self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event
    ) -> None:
        self._reach()
        if self.begin_error is not None:
            raise self.begin_error
        self.begun.setdefault(container, []).append(command)

    def progress(self, container: ContainerId, read_to: OutputPosition) -> EntrypointProgress:
        """Returns the progress; prevents a caller with a free-running clock from spinning."""
        self._reach()
        with self._told:
            self._told.wait_for(lambda: read_to.out.piece in self._progress, 0.02)
            for told in self._progress.values():
                if (
                    told.ended and read_to.over and told.read_to == read_to
                ):  # everything was read: the end is returned again
                    return dataclasses.replace(told, output=())
            return self._progress.get(read_to.out.piece, EntrypointProgress((), read_to))

    def entrypoint_user(self, container: ContainerId) -> ProcessUser | None:
        self._reach()
        return self.process_user if container in self.begun else None

    def entrypoint_exists(self, container: ContainerId) -> bool:
        self._reach()
        return self.still_there

    def signal_entrypoint(
        self, container: ContainerId, number: int, timeout: float, cancelled: threading.Event
    ) -> bool:
        """Records the signal; the command runs for as long as `still_there` says so."""
        self._reach()
        if cancelled.is_set():
            raise Aborted("the caller gave up")
        if self.signal_error is not None:
            raise self.signal_error
        if self.still_there and number:
            self.signals.append(number)
        return self.still_there

    def run(
        self,
        container: ContainerId,
        command: GuestCommand,
        timeout: float,
        cancelled: threading.Event,
        agent_within: float = 60.0,
    ) -> CommandResult:
        self._reach()
        self.waits.append(agent_within)
        self.commands.append(command)
        if cancelled.is_set():
            raise Aborted("the command was given up")
        return self.do(command, timeout, cancelled)

    async def open(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession:
        self._reach()
        self.commands.append(command)
        if not self.sessions:
            raise Unavailable("no guest agent answers")
        return self.sessions.pop(0)

    def guest_info(self, container: ContainerId, timeout: float) -> Mapping[str, object]:
        return {} if self.gone else self.told

    # --- virtshim.guest.ports.GuestOperations

    def freeze(self, container: ContainerId, timeout: float) -> int:
        self._reach()
        self.frozen.add(container)
        return self.file_systems

    def thaw(self, container: ContainerId, timeout: float) -> None:
        self._reach()
        self.frozen.discard(container)

    def reboot(self, container: ContainerId, timeout: float) -> None:
        self._reach()
        self.rebooted.append(container)

    def set_clock(self, container: ContainerId, timeout: float) -> None:
        self._reach()
        self.clocks_set.append(container)

    def run_script(
        self,
        container: ContainerId,
        script: str,
        arguments: Sequence[str],
        data: bytes,
        timeout: float,
        cancelled: threading.Event,
    ) -> tuple[int, str]:
        self._reach()
        self.scripts.append((container, script, tuple(arguments), data))
        self.script_limits.append(timeout)
        if self.scripts_hang:
            if cancelled.wait(WAIT_LIMIT):
                raise Aborted("the caller gave up")
            raise DeadlineExceeded("timed out waiting for a script in the guest")
        return self.script_result(container)

    def add_ssh_keys(self, container: ContainerId, user: str, keys: Sequence[str], timeout: float) -> None:
        self._reach()
        if user not in self.users:
            raise NotFound(f"there is no user {user!r} in the guest")
        self.ssh_keys += [(user, key) for key in keys if (user, key) not in self.ssh_keys]

    def read_tail(self, container: ContainerId, path: str, most: int, timeout: float) -> bytes:
        self._reach()
        data = self.files.get(path, b"")
        return data[max(0, len(data) - most) :]

    def resize_console(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        self._reach()
        self.console_sizes.append((columns, rows))

    def filesystems(self, container: ContainerId, timeout: float) -> Sequence[GuestFilesystem]:
        self._reach()
        return self.mounted

    def connect(self, container: ContainerId) -> None:
        self.connected.append(container)

    def forget(self, container: ContainerId) -> None:
        self.forgotten.append(container)

    # --- inside

    def _reach(self) -> None:
        if self.gone:
            raise Unavailable("the virtual machine has ended")


class FakeTerminationFiles:
    """Implements `virtshim.guest.ports.TerminationFiles`. All files are there but `missing`."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.written: dict[str, bytes] = {}

    def write(self, path: str, pod_uid: str, message: bytes) -> None:
        if path in self.missing:
            raise InternalError(f"there is no file {path}")
        self.written[path] = message


class FakeEntrypointListeners:
    """Implements `virtshim.guest.ports.EntrypointListeners`."""

    def __init__(self) -> None:
        self.said: list[Output] = []
        self.forgotten: list[ContainerId] = []
        self.codes: dict[ContainerId, int] = {}

    def has_clients(self, container: ContainerId) -> bool:
        return False

    def publish(self, container: ContainerId, output: Sequence[Output]) -> None:
        self.said += output

    def ended(self, container: ContainerId, code: int) -> None:
        self.codes[container] = code

    def forget(self, container: ContainerId) -> None:
        self.forgotten.append(container)


class SlowGuests(FakeGuests):
    """A script in a guest takes its time, and is lost if the guest restarts meanwhile. `boots`: how often it has booted, 0 if it
    is off."""

    script_seconds = 5.0

    def __init__(self, turns: Turns, boots: Callable[[ContainerId], int]) -> None:
        super().__init__()
        self.set_up: dict[ContainerId, int] = {}
        self._turns = turns
        self._boots = boots

    def run(
        self,
        container: ContainerId,
        command: GuestCommand,
        timeout: float,
        cancelled: threading.Event,
        agent_within: float = 60.0,
    ) -> CommandResult:
        self._turns.point("guests.run")
        boot = self._boots(container)
        if not boot:
            raise Unavailable("the virtual machine has ended")
        self._turns.point("guests.run, under way")
        if self._boots(container) != boot:
            raise InternalError("the guest agent knows no such process")
        self.set_up[container] = boot
        return CommandResult(0, b"", b"")

    def run_script(
        self,
        container: ContainerId,
        script: str,
        arguments: Sequence[str],
        data: bytes,
        timeout: float,
        cancelled: threading.Event,
    ) -> tuple[int, str]:
        self._turns.point("guests.run_script")
        if not self._boots(container):
            raise Unavailable("the virtual machine has ended")
        if self._turns.clock.wait(cancelled, self.script_seconds):
            raise Aborted("the caller gave up")
        if not self._boots(container):
            raise InternalError("the guest agent knows no such process")
        return super().run_script(container, script, arguments, data, timeout, cancelled)
