"""A container's entrypoint in its guest: start, output, input and terminal. Implements
`virtshim.guest.ports.EntrypointInputs`."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from virtshim.guest import entrypoint_scripts
from virtshim.guest.agent_channel import AgentChannel, AgentRefused
from virtshim.guest.agent_questions import (
    close_guest_file,
    open_guest_file,
    read_guest_file,
    seek_guest_file,
)
from virtshim.guest.command import PATH, EntrypointProgress, GuestCommand, OutputPosition, StreamPosition
from virtshim.guest.command_output import failure
from virtshim.guest.exec_scripts import limits
from virtshim.guest.guest_exec import GuestVm, environment
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.container import ProcessUser
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output, OutStream, Streams, StreamSession

# Started and polled through the guest agent alone, without serial ports. Its output is read from files (see
# `entrypoint_scripts`), so that a restarted virtshim continues where the previous one stopped.

# Bytes of one read, which fit as base64 in JSON into one line of the agent.
_PIECE: Final = 1 << 17
_RESULT: Final = 4096
# Seconds for one poll of the files, which takes a few requests.
_LOOK_SECONDS: Final = 30.0
_SCRIPT_SECONDS: Final = 10.0
# The size of a terminal until a client sends its own.
_SIZE: Final = "24 80"
# Bytes, enough for more than a thousand groups.
_USER_MOST: Final = 1 << 14
_HIGHEST_ID: Final = (1 << 32) - 1
# The second of the four user and group ids is the effective one.
_USER = re.compile(
    rb"Uid:\s+[0-9]+\s+([0-9]{1,10})[\s0-9]*;Gid:\s+[0-9]+\s+([0-9]{1,10})[\s0-9]*;Groups:((?:\s+[0-9]{1,10})*)\s*\n"
)
_EXIT = re.compile(r"exit ([0-9]{1,3})")


class Entrypoint:
    def __init__(self, container: ContainerId, vm: GuestVm) -> None:
        self._directory = entrypoint_scripts.directory(container)
        self._vm = vm

    def start_entrypoint(self, command: GuestCommand, deadline: CancellableDeadline) -> None:
        """Implements `virtshim.guest.ports.GuestAgents.start_entrypoint`. Does not wait for the script, because the
        agent does not either."""
        channel = self._vm.channel
        user = command.user
        envs, odd = environment(command.envs)
        # An agent that may not read files must be noticed before the command runs.
        with suppress(AgentRefused):
            handle = channel.ask("guest-file-open", {"path": f"{self._directory}/pid", "mode": "r"}, deadline)
            channel.ask("guest-file-close", {"handle": handle}, deadline)
            return  # an earlier call has started it
        words = [self._directory, command.working_dir, user.user, "" if user.group is None else str(user.group)]
        words += [
            ",".join(str(one) for one in user.supplementary),
            "1" if user.own_groups else "",
            command.termination_path,
        ]
        words += ["1" if command.stdin or command.tty else "", _SIZE if command.tty else "", limits(user)]
        words.append("1" if command.readonly_root else "")
        argv = (*(("env", *odd) if odd else ()), *command.argv)
        request = {
            "path": "/bin/sh",
            "arg": ["-c", entrypoint_scripts.START, "virtshim-command", *words, *argv],
            "env": envs,
        }
        channel.ask("guest-exec", request, deadline)

    def user(self) -> ProcessUser | None:
        files = _Files(self._vm.channel, self._directory, CancellableDeadline.after(_LOOK_SECONDS))
        return _process_user(files.read("user", 0, _USER_MOST))

    def entrypoint_exists(self) -> bool:
        """False for a command that is neither running nor ended."""
        deadline = CancellableDeadline.after(_SCRIPT_SECONDS)
        return self._vm.run_script(entrypoint_scripts.IS_KNOWN, (self._directory,), deadline) == 0

    def signal(self, number: int, deadline: CancellableDeadline) -> bool:
        """Sends SIGTERM or another stop signal to the entrypoint; 0 only asks whether it runs."""
        return self._vm.run_script(entrypoint_scripts.SIGNAL, (self._directory, str(number)), deadline) == 0

    def progress(self, read_to: OutputPosition) -> EntrypointProgress:
        files = _Files(self._vm.channel, self._directory, CancellableDeadline.after(_LOOK_SECONDS))
        code, why = _result(files.read("exit", 0, _RESULT))  # read first, so that all output before the exit is seen
        ended = code is not None or bool(why)
        out, out_data = files.stream("stdout", read_to.out, ended=ended)
        err, err_data = files.stream("stderr", read_to.err, ended=ended)
        output = ((OutStream.STDOUT, out_data), (OutStream.STDERR, err_data))
        if why:  # a command that could not start has no streams
            out, err = StreamPosition(over=True), StreamPosition(over=True)
        return EntrypointProgress(
            tuple(Output(stream, data) for stream, data in output if data), OutputPosition(out, err), code, why
        )


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one command."""

    _channel: AgentChannel
    _directory: str
    _deadline: CancellableDeadline

    def stream(self, name: str, place: StreamPosition, *, ended: bool) -> tuple[StreamPosition, bytes]:
        """Reads up to one piece after `place`, and returns it with the next place. The piece before `place` has been
        stored by its reader, so its room in the guest is freed."""
        if place.over:
            return place, b""
        if place.piece and not place.offset:
            self._empty(f"{name}.{place.piece - 1}")
        piece = f"{name}.{place.piece}"
        data = self.read(piece, place.offset, _PIECE)
        next_there = over = False
        if not data:
            next_there = self._is_there(f"{name}.{place.piece + 1}")
            over = ended and not next_there and self._is_there(f"{name}.end")
            if next_there or over:  # otherwise the piece may still grow
                data = self.read(piece, place.offset, _PIECE)
        if data:
            return StreamPosition(place.piece, place.offset + len(data)), data
        if next_there:
            return StreamPosition(place.piece + 1), b""
        return (StreamPosition(place.piece, place.offset, over=True) if over else place), b""

    def read(self, name: str, offset: int, most: int) -> bytes:
        """Nothing if the file does not exist."""
        handle = self._open(name, "r")
        if handle is None:
            return b""
        try:
            if offset:
                seek_guest_file(self._channel, handle, offset, "set", self._deadline)
            return read_guest_file(self._channel, handle, most, self._deadline)
        finally:
            self._close(handle)

    def _empty(self, name: str) -> None:
        handle = self._open(name, "w")
        if handle is not None:
            self._close(handle)

    def _is_there(self, name: str) -> bool:
        handle = self._open(name, "r")
        if handle is not None:
            self._close(handle)
        return handle is not None

    def _open(self, name: str, mode: str) -> int | None:
        return open_guest_file(self._channel, f"{self._directory}/{name}", mode, self._deadline)

    def _close(self, handle: int) -> None:
        close_guest_file(self._channel, handle, self._deadline)


def _process_user(text: bytes) -> ProcessUser | None:
    """The user in the lines of /proc/PID/status; None if lines are missing."""
    found = _USER.fullmatch(text)
    if found is None:
        return None
    uid, gid, groups = int(found[1]), int(found[2]), [int(one) for one in found[3].split()]
    if max(uid, gid, *groups) > _HIGHEST_ID:
        return None
    return ProcessUser(uid, gid, tuple(dict.fromkeys((gid, *groups))))


def _result(text: bytes) -> tuple[int | None, str]:
    """Exit code, or why there was no command; (None, "") while it runs."""
    words = text.decode(errors="replace").rstrip("\n")
    if not words:
        return None, ""
    found = _EXIT.fullmatch(words)
    if found is not None and int(found[1]) <= 255:
        return int(found[1]), ""
    kind, _, rest = words.partition(" ")
    return None, str(failure(rest if kind == "fail" else ""))


class _Opener(Protocol):
    async def __call__(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession: ...


@dataclass(frozen=True, slots=True)
class EntrypointInput:
    """Input goes over serial ports, as a command's input does, to a program in the guest that writes it into the pipe
    that the container's command reads."""

    _opened: _Opener
    _vm: Callable[[ContainerId], GuestVm]
    _known_as: Callable[[ContainerId], ContainerId]

    async def open(self, container: ContainerId) -> StreamSession:
        directory = entrypoint_scripts.directory(self._known_as(container))
        argv = ("/bin/sh", "-c", entrypoint_scripts.RELAY, "virtshim-input", directory)
        return await self._opened(container, GuestCommand(argv, PATH), Streams(stdin=True, stdout=True))

    def end(self, container: ContainerId, timeout: float) -> None:
        self._script(container, entrypoint_scripts.END_INPUT, (), timeout)

    def resize(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        self._script(container, entrypoint_scripts.RESIZE, (str(rows), str(columns)), timeout)

    def _script(self, container: ContainerId, script: str, words: tuple[str, ...], timeout: float) -> None:
        arguments = (entrypoint_scripts.directory(self._known_as(container)), *words)
        code = self._vm(container).run_script(script, arguments, CancellableDeadline.after(timeout))
        if code:
            raise InternalError(f"the guest could not change the command's input or terminal (exit code {code})")
