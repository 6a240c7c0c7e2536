"""The connection to one VM's guest agent. It carries one command at a time, limits every wait, and trusts no answer."""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from virtshim.guest.agent_replies import (
    AnswerMeter,
    BadReply,
    ErrorReply,
    JunkBudget,
    ReplyReader,
    Returned,
    command_line,
    room_for_answer,
    sync_line,
)
from virtshim.guest.wait import CancellableDeadline, Turns
from virtshim.model.errors import DeadlineExceeded, InternalError, ShimError, Unavailable, WrongState

log = structlog.get_logger(__name__)

# A working agent answers these commands at once.
_ANSWER_SECONDS = 10.0
_ID_RANGE = 1 << 30
_RECEIVE = 65536
# The agent's answer to commands that it does not run between freeze and thaw.
_FROZEN = "the agent is in frozen state"

ABSENT = (
    "the guest agent: the guest is still booting, or has no agent. Commands in a virtual machine need the QEMU guest agent: "
    "install the package qemu-guest-agent in the image and enable its service"
)
_FLOODED = (
    "the guest agent: the guest floods the agent's channel with data that nobody asked for, so virtshim ignores it for a "
    "while. Find what writes to the port org.qemu.guest_agent.0 in the guest, and restart its agent"
)


class AgentRefused(ShimError):
    """The agent answered with an error."""


class VmEnded(Unavailable):
    """No QEMU is at the other end."""


class CommandDisabled(WrongState):
    """The agent is configured to refuse the command."""


class AgentChannel:
    def __init__(
        self,
        path: str,
        monotonic: Callable[[], float] = time.monotonic,
        answers: Callable[[], None] = lambda: None,
        sync_again: float = 5.0,
    ) -> None:
        """`monotonic`: the clock for the guest's allowance of unrequested data. `answers`: called whenever an agent has
        answered on a new connection; it must not wait. `sync_again`: seconds after which a sync request is repeated,
        because an agent that restarts may lose one."""
        self._answers = answers
        self._sync_again = sync_again
        self._path = path
        self._turns = Turns()
        self._junk = JunkBudget(path, monotonic)
        self._socket: socket.socket | None = None
        # A connection on which no agent has answered yet.
        self._unheard: socket.socket | None = None
        self._reader = ReplyReader()

    def ask(self, command: str, arguments: Mapping[str, Any] | None, deadline: CancellableDeadline) -> Any:
        """Returns the agent's answer, any JSON value. Waits for the agent to come up, and while the guest's file
        systems are frozen, because the agent then does nothing that could write. Errors: DeadlineExceeded (no agent
        within the caller's time), Unavailable (the VM is gone, or the agent closes the connection), CommandDisabled,
        AgentRefused. A guest that floods the channel is ignored until its allowance has grown again."""
        while True:
            answer = self._answer(command, arguments, deadline)
            if isinstance(answer, Returned):
                return answer.value
            if _FROZEN not in answer.message:
                raise _refusal(command, answer)
            deadline.cancelled.wait(deadline.slice("the guest's file systems to be thawed"))

    def _answer(
        self, command: str, arguments: Mapping[str, Any] | None, deadline: CancellableDeadline
    ) -> Returned | ErrorReply:
        with self._turns.mine(deadline, ABSENT):
            connected = self._socket or self._connected(deadline)
            try:
                return self._exchange(connected, command, arguments, deadline)
            except BaseException as exc:
                self._drop()  # the answer may still arrive
                if isinstance(exc, ConnectionError):
                    raise VmEnded(f"the virtual machine ended during {command}") from exc
                if isinstance(exc, OSError | BadReply | DeadlineExceeded):
                    deadline.slice(f"the guest agent's answer to {command}")  # raises if the caller's time is over
                    raise Unavailable(f"the connection to the guest agent broke during {command}: {exc}") from exc
                raise

    def connect(self) -> None:
        """Connects to QEMU, and leaves the rest to the next `ask`. Never raises."""
        with suppress(DeadlineExceeded), self._turns.mine(CancellableDeadline.after(1.0), "the connection"):
            if self._socket is None and self._unheard is None:
                with suppress(OSError):
                    self._unheard = _to(self._path)

    def close(self) -> None:
        """Closes the connection. Any thread may call it at any time; a later `ask` connects again."""
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        with suppress(DeadlineExceeded), self._turns.mine(CancellableDeadline.after(1.0), "the connection"):
            self._drop()

    def _connected(self, deadline: CancellableDeadline) -> socket.socket:
        """A connection on which the agent has just answered."""
        while wait := self._junk.wait():
            deadline.cancelled.wait(min(wait, deadline.slice(_FLOODED)))
        connected, self._unheard = self._unheard, None
        try:
            connected = connected or _to(self._path)
            self._reader = ReplyReader()
            self._sync(connected, deadline)
        except BaseException as exc:
            if connected is not None:
                connected.close()
            if isinstance(exc, ConnectionError | FileNotFoundError):
                raise VmEnded("the virtual machine has ended: its guest agent's socket is closed") from exc
            if isinstance(exc, OSError | BadReply):
                raise Unavailable(f"the guest agent cannot be reached: {exc}") from exc
            raise
        self._socket = connected
        self._answers()
        return connected

    def _sync(self, connected: socket.socket, deadline: CancellableDeadline) -> None:
        """Returns when the agent has answered the newest sync request. Answers to older ones are thrown away."""
        number, again = 0, 0.0
        while True:
            now = time.monotonic()
            if now >= again:
                again = now + self._sync_again
                # QEMU reads nothing before the guest opens the port, so the socket is full after some minutes of
                # requests.
                if _has_room(connected):
                    number = secrets.randbelow(_ID_RANGE)
                    connected.settimeout(1.0)
                    connected.sendall(sync_line(number))
            data = self._received(connected, deadline, ABSENT)
            if not data:
                continue
            self._junk.spend(len(data))
            if Returned(number) in self._reader.feed(data):
                return

    def _exchange(
        self, connected: socket.socket, command: str, arguments: Mapping[str, Any] | None, deadline: CancellableDeadline
    ) -> Returned | ErrorReply:
        connected.settimeout(_ANSWER_SECONDS)
        connected.sendall(command_line(command, arguments))
        limited = deadline.at_most(_ANSWER_SECONDS)
        self._reader.room = room_for_answer(command)
        meter = AnswerMeter(self._junk, self._reader.room)
        replies: list[Returned | ErrorReply] = []
        while not replies:
            if data := self._received(connected, limited, f"its answer to {command}"):
                replies = self._reader.feed(data)
                meter.read(len(data))
        if len(replies) > 1:
            raise BadReply("it sent an answer that was not asked for")
        return replies[0]

    def _received(self, connected: socket.socket, deadline: CancellableDeadline, what: str) -> bytes:
        """What has arrived; nothing if it is time to check the deadline again."""
        connected.settimeout(deadline.slice(what))
        try:
            data = connected.recv(_RECEIVE)
        except TimeoutError:
            return b""
        if not data:
            raise ConnectionResetError("the virtual machine has ended")
        return data

    def _drop(self) -> None:
        for one in (self._socket, self._unheard):
            if one is not None:
                one.close()
        self._socket = self._unheard = None


def _to(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected


def _has_room(connected: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(connected, select.POLLOUT)
    return bool(waiting.poll(0))


def _refusal(command: str, refusal: ErrorReply) -> ShimError:
    """`CommandNotFound` is also the answer for a disabled command."""
    if refusal.kind == "CommandNotFound" or "has been disabled" in refusal.message:
        return CommandDisabled(
            f"the guest agent does not allow {command}; allow it in the guest (on Red Hat's distributions in "
            "/etc/sysconfig/qemu-ga) and restart the agent"
        )
    return AgentRefused(f"the guest agent refused {command}: {refusal.message or refusal.kind}")


def whole_number(value: object, what: str, most: int = 1 << 31) -> int:
    """`value`, if it is a number up to `most`. Raises InternalError, because the guest may send anything."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InternalError(f"the guest agent returned no usable {what}")
    return value


def mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InternalError(f"the guest agent returned no usable {what}")
    return value
