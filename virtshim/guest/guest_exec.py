"""Commands in one VM: starts, checks and ends them through its agent."""

from __future__ import annotations

import base64
import re
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from virtshim.guest import entrypoint_scripts, exec_scripts
from virtshim.guest.agent_channel import AgentChannel, AgentRefused, CommandDisabled, VmEnded, mapping, whole_number
from virtshim.guest.command import GuestCommand
from virtshim.guest.command_output import CommandOutput
from virtshim.guest.exec_ports import ExecPort, ExecPorts
from virtshim.guest.wait import USUAL, CancellableDeadline, ExecLimits, Turns
from virtshim.model.errors import InternalError, InvalidRequest, ShimError
from virtshim.model.text import printable_text
from virtshim.streaming.ports import OutStream

log = structlog.get_logger(__name__)

_SHELL = "/bin/sh"
# Seconds for a short script, such as one that kills, under load.
_SCRIPT_SECONDS = 10.0
_POLL = 0.02
# A run script closes its ports between its last output and its end. Asking before that would waste the guest's time.
_LAST_STEPS = 0.05
# How long a command may exist after its last output.
_GONE_SECONDS = 3.0
# Pauses before a guest that does not answer is asked again, and finally left alone.
_SETTLE_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_NO_PORT = 81
# Characters of a script's errors.
_MOST_SAID = 500
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCRIPTS_WORDS: Final = frozenset(re.findall(r"\b[a-z_]+\b", exec_scripts.RUN + entrypoint_scripts.START))


@dataclass(frozen=True, slots=True)
class CommandStreams:
    """The streams of a command. `size`: rows and columns of its terminal."""

    stdin: bool = False
    tty: bool = False
    size: tuple[int, int] = (24, 80)


@dataclass(slots=True)
class RunningCommand:
    """A command in the guest. `pid`: the process id that the agent reported; None before the start and after the end.
    The sockets are the node's ends of the ports. `patient`: the command belongs to a session, see
    `CancellableDeadline`."""

    token: str
    ports: Sequence[ExecPort]
    output: CommandOutput
    outputs: Mapping[OutStream, socket.socket] = field(default_factory=dict)
    stdin: socket.socket | None = None
    pid: int | None = None
    no_port: bool = False
    patient: bool = False

    def end_input(self) -> None:
        """Sends end of file to the command. QEMU passes on what it has before it closes its side, and the guest then
        reads the end."""
        if self.stdin is not None:
            with suppress(OSError):
                self.stdin.shutdown(socket.SHUT_WR)

    def feed(self, data: bytes) -> None:
        """Sends all input on a thread of its own, because the guest reads it when it likes, and not after the command's
        end."""

        def send() -> None:
            with suppress(OSError):
                if self.stdin is not None:
                    self.stdin.sendall(data)
            self.end_input()

        if self.stdin is not None:
            threading.Thread(target=send, name="exec-input", daemon=True).start()

    def lost(self) -> InternalError:
        """Why the command is gone without an exit code."""
        if self.no_port:
            port = self.ports[0].name
            return InternalError(f"the guest has no serial port {port}; its kernel needs the module virtio_console")
        if not self.output.started:
            return InternalError("the guest cannot open its serial ports; another process there may hold them open")
        return InternalError(
            "the command was lost in the guest: the guest or its agent was restarted, or something there killed it"
        )

    def close(self) -> None:
        if self.stdin is not None:
            with suppress(OSError):
                self.stdin.shutdown(socket.SHUT_RDWR)  # a writer may wait for a guest that never reads
        for end in (*self.outputs.values(), *([self.stdin] if self.stdin else [])):
            end.close()


class GuestVm:
    def __init__(
        self,
        agent_socket: str,
        socket_directory: str,
        plug: Callable[[int], None],
        settling: Executor,
        answers: Callable[[], None] = lambda: None,
        limits: ExecLimits = USUAL,
    ) -> None:
        """`plug` adds a serial port, by number, to the VM, and raises ShimError. `answers`: as for the channel."""
        self.limits = limits
        self._settling = settling
        self.channel = AgentChannel(agent_socket, answers=answers)
        self._ports = ExecPorts(socket_directory, plug, self._await_ports, limits.lease)
        self._starting = Turns()
        self._swept = False
        self._ended = threading.Event()

    def close(self) -> None:
        """Called when the VM has ended."""
        self._ended.set()
        self.channel.close()

    def start(self, command: GuestCommand, wanted: CommandStreams, deadline: CancellableDeadline) -> RunningCommand:
        """Starts the command; its output shows whether that worked. The result must be passed to `reap`. Errors: those
        of `AgentChannel.ask`, ResourceExhausted."""
        self._end_earlier_sessions(deadline)
        token = secrets.token_hex(16)
        ports = self._ports.lease(1 + (not wanted.tty) + wanted.stdin, deadline)
        output = CommandOutput(token, stderr=not wanted.tty)
        running = RunningCommand(token, ports, output, patient=deadline.patient)
        try:
            # QEMU sends the guest a message for each connection to a port, and drops messages when more than thirty
            # wait, which would leave a port closed for ever. Each start asks the agent something, by which time the
            # guest has read them.
            with self._starting.mine(deadline, "earlier commands to be started"):
                self._connect(running, wanted)
                self._spawn(running, command, wanted, deadline)
        except (AgentRefused, CommandDisabled):
            self._free(running)  # nothing can run
            raise
        except BaseException:
            self.reap(running, kill="all")
            raise
        return running

    def reap(
        self, running: RunningCommand, kill: str = "", settled: Callable[[], object] = lambda: None
    ) -> Future[None]:
        """Makes sure that no process of the command runs any more (`kill`: "all", "relays" or nothing, see exec_scripts), then
        frees the command's ports. Returns at once, and calls `settled` at the end."""

        def run() -> None:
            self._settle(running, kill)
            with suppress(RuntimeError):  # the event loop of the waiting caller is closed
                settled()

        return self._settling.submit(run)

    def is_gone(self, running: RunningCommand, deadline: CancellableDeadline) -> bool:
        """Whether its run script has ended. Errors: those of `AgentChannel.ask`."""
        if running.pid is None:
            return True
        try:
            status = mapping(self.channel.ask("guest-exec-status", {"pid": running.pid}, deadline), "exec status")
        except AgentRefused:
            return True  # the guest, or its agent, was restarted
        if status.get("exited") is not True:
            return False
        running.pid = None  # the agent forgets it after this answer
        running.no_port = status.get("exitcode") == _NO_PORT
        return True

    def run_script(self, script: str, arguments: Sequence[str], deadline: CancellableDeadline) -> int:
        """Exit code of a short script without output; -1 if a signal ended it."""
        return self._script(script, arguments, {}, deadline)[0]

    def run_script_with(
        self, script: str, arguments: Sequence[str], data: bytes, deadline: CancellableDeadline
    ) -> tuple[int, str]:
        """Like `run_script`, for a script that reads `data`. Also returns the start of its standard error, a few hundred
        characters at most. Needs no ports, so the VM's hardware stays as it is."""
        more = {"capture-output": True, "input-data": base64.b64encode(data).decode()}
        code, status = self._script(script, arguments, more, deadline)
        return code, printable_text(_decoded(status.get("err-data"))[:_MOST_SAID])

    def _script(
        self, script: str, arguments: Sequence[str], more: Mapping[str, object], deadline: CancellableDeadline
    ) -> tuple[int, Mapping[str, Any]]:
        request = {"path": _SHELL, "arg": ["-c", script, "virtshim", *arguments], **more}
        pid = whole_number(
            mapping(self.channel.ask("guest-exec", request, deadline), "process").get("pid"), "process id"
        )
        while True:
            status = mapping(self.channel.ask("guest-exec-status", {"pid": pid}, deadline), "exec status")
            if status.get("exited") is True:
                code = status.get("exitcode")
                return (code if isinstance(code, int) else -1), status
            deadline.cancelled.wait(min(_POLL, deadline.slice("a script in the guest")))

    def run_noop(self) -> None:
        """Returns when another process has run in the guest, or when waiting is useless. Never raises."""
        with suppress(ShimError):
            self.run_script(":", (), CancellableDeadline.after(_SCRIPT_SECONDS, self._ended))

    def _end_earlier_sessions(self, deadline: CancellableDeadline) -> None:
        """Runs once: commands that an earlier virtshim left running hold ports, and nobody reads their output."""
        if not self._swept:
            self.run_script(exec_scripts.KILL, ("all", exec_scripts.tag()), deadline)
            self._swept = True

    def _await_ports(self, numbers: Sequence[int]) -> Collection[int]:
        """The new ports that have appeared in the guest. Errors: those of `AgentChannel.ask`."""
        deadline = CancellableDeadline.after(_SCRIPT_SECONDS, self._ended)
        missing = self.run_script(exec_scripts.WAIT_FOR_PORTS, [str(number) for number in numbers], deadline)
        return [number for index, number in enumerate(numbers) if not missing & (1 << index)]

    def _connect(self, running: RunningCommand, wanted: CommandStreams) -> None:
        outputs: dict[OutStream, socket.socket] = {}
        running.outputs = outputs
        ports = iter(running.ports)
        outputs[OutStream.STDOUT] = next(ports).connect()
        if not wanted.tty:
            outputs[OutStream.STDERR] = next(ports).connect()
        if wanted.stdin:
            running.stdin = next(ports).connect()

    def _spawn(
        self, running: RunningCommand, command: GuestCommand, wanted: CommandStreams, deadline: CancellableDeadline
    ) -> None:
        names = [port.name for port in running.ports]
        out = names.pop(0)
        err = "" if wanted.tty else names.pop(0)
        size = f"{wanted.size[0]} {wanted.size[1]}" if wanted.tty else ""
        user = command.user
        group = "" if user.group is None else str(user.group)
        groups = ",".join(str(one) for one in user.supplementary)
        limits = exec_scripts.limits(user)
        settings = (running.token, out, err, names[0] if names else "", command.working_dir)
        become = (user.user, group, groups, "1" if user.own_groups else "", size, limits)
        envs, odd = environment(command.envs)
        argv = (*(("env", *odd) if odd else ()), *command.argv)
        script = exec_scripts.run_script(running.token, as_user=bool(user.user or groups or limits), tty=wanted.tty)
        request: dict[str, Any] = {
            "path": _SHELL,
            "arg": ["-c", script, "virtshim-exec", *settings, *become, *argv],
            "env": envs,
        }
        answer = mapping(self.channel.ask("guest-exec", request, deadline), "process")
        running.pid = whole_number(answer.get("pid"), "process id")

    def _settle(self, running: RunningCommand, kill: str) -> None:
        try:
            if not kill:
                self._ended.wait(_LAST_STEPS)
            for pause in _SETTLE_PAUSES:
                try:
                    if self._kill_and_wait(running, kill):
                        break
                except VmEnded:
                    break
                except ShimError as exc:
                    if self._ended.is_set():
                        break
                    log.warning("exec.cleanup.failed", ports=[port.path for port in running.ports], error=str(exc))
                kill = "all"
                if self._ended.wait(pause):
                    break
            else:
                log.error("exec.abandoned", ports=[port.path for port in running.ports])
                return  # its ports stay unusable until the VM ends
            self._free(running)
        finally:
            running.close()

    def _kill_and_wait(self, running: RunningCommand, kill: str) -> bool:
        deadline = CancellableDeadline.after(_SCRIPT_SECONDS, self._ended, patient=running.patient)
        if kill:
            self.run_script(exec_scripts.KILL, (kill, exec_scripts.tag(running.token)), deadline)
        deadline = deadline.at_most(_GONE_SECONDS)
        while not self.is_gone(running, deadline):
            deadline.cancelled.wait(deadline.slice("the command's end"))
        return True

    def _free(self, running: RunningCommand) -> None:
        running.close()
        self._ports.release(running.ports)


def _decoded(text: object) -> str:
    """Decodes base64; "" for anything else."""
    try:
        return base64.b64decode(text if isinstance(text, str) else "").decode(errors="replace").strip()
    except ValueError:
        return ""


def environment(envs: Sequence[tuple[str, bytes]]) -> tuple[list[str], list[str]]:
    """The variables that the agent sets, and those that only `env` can set. A shell drops variables whose names it does
    not allow, and the scripts would change variables that have the names of their own. Raises InvalidRequest for bytes
    that JSON cannot carry."""
    plain: list[str] = []
    odd: list[str] = []
    for name, value in envs:
        try:
            setting = f"{name}={value.decode()}"
        except UnicodeDecodeError as exc:
            raise InvalidRequest(
                f"environment variable {name} is not UTF-8; the guest agent cannot pass it on"
            ) from exc
        (plain if _NAME.fullmatch(name) and name not in _SCRIPTS_WORDS else odd).append(setting)
    return plain, odd
