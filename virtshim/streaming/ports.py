"""What clients may stream to and from containers and pods, and what the streaming server needs of guests."""

from __future__ import annotations

import enum
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId, SandboxId

# In all requests, `pod` is the pod's `namespace/name`.


class OutStream(enum.Enum):
    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams that a caller wants. With `tty` the only output is stdout."""

    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False

    def __post_init__(self) -> None:
        if self.tty and self.stderr:
            raise InvalidRequest("tty and stderr together: a terminal has one output; request stdout alone")
        if not (self.stdin or self.stdout or self.stderr):
            raise InvalidRequest("no stream requested: request at least one of stdin, stdout and stderr")


@dataclass(frozen=True, slots=True)
class ExecRequest:
    container: ContainerId
    command: tuple[str, ...]
    streams: Streams
    pod: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidRequest("the command is empty: name a program in cmd")

    def __repr__(self) -> str:  # commands may hold passwords
        return f"ExecRequest(container={self.container.short!r}, streams={self.streams!r})"


@dataclass(frozen=True, slots=True)
class AttachStreams:
    """`stdin_once`: the container's input ends for good when the first client with input closes it or leaves. `to_entrypoint`:
    attaches to the container's own command, not to the console."""

    container: ContainerId
    streams: Streams
    stdin_once: bool = False
    to_entrypoint: bool = False
    pod: str = field(default="", compare=False)

    @property
    def leaves_with_input(self) -> bool:
        """True for a client at a terminal. When its user types the keys to detach, the client (crictl) closes its input and
        waits for the session to end. Other runtimes end it too."""
        return self.streams.stdin and self.streams.tty


# The port of VNC's first display (RFC 6143, 8.2).
VNC_PORT: Final = 5900


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """`address`: the pod's. `ports`: empty if the streams name them. `screen`: the VM whose screen port 5900 leads to; None
    for the guest's own port. `inside`: the container to whose guest's loopback the ports are connected, not from the
    node."""

    sandbox: SandboxId
    address: str
    ports: tuple[int, ...] = ()
    screen: ContainerId | None = None
    inside: ContainerId | None = None
    pod: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for port in self.ports:
            if not 1 <= port <= 65535:
                raise InvalidRequest(f"port {port}: 1 to 65535 expected")


StreamRequest = ExecRequest | AttachStreams | ForwardRequest


def owner(request: StreamRequest) -> ContainerId | SandboxId:
    return request.sandbox if isinstance(request, ForwardRequest) else request.container


def pod_of(request: StreamRequest) -> str:
    """The pod whose limits apply: `namespace/name`, if known."""
    return request.pod or owner(request).short


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of output, never empty."""

    stream: OutStream
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The command has ended and all its output was read. `code` is 0 to 255, and 0 for a console."""

    code: int


class StreamSession(Protocol):
    """A running command, or a client's share of a console. Runs on the streaming loop: one task calls `read`, a second
    `write_stdin` and `close_stdin`, a third `resize`, all at the same time. Both directions are bounded: a slow reader
    slows the command down (a console loses output instead)."""

    async def read(self) -> Output | Ended:
        """The next piece of output (at most 64 KiB), in its order; finally `Ended`, once. ShimError if the session broke."""

    async def write_stdin(self, data: bytes) -> None:
        """Returns when there is room for more. Silently drops input that nobody reads any more."""

    async def close_stdin(self) -> None:
        """Ends the input. May be called twice."""

    async def resize(self, width: int, height: int) -> None:
        """Sets the columns and rows of the client's terminal. No error without a terminal."""

    async def close(self) -> None:
        """Ends the command if it still runs, because the client is gone. Called exactly once, also after `Ended` or an
        error. Must neither raise nor take longer than a few seconds."""


class Execs(Protocol):
    """Commands in guests. Errors: Unavailable (no guest agent answers), NotFound (no such program), WrongState."""

    async def start(self, request: ExecRequest) -> StreamSession: ...
    async def dial(self, container: ContainerId, port: int) -> StreamSession:
        """Starts a command whose input and output are a TCP connection to the guest's loopback. If there is no connection,
        stderr and an exit code say why."""


class Attaches(Protocol):
    """Consoles. Errors: Unavailable (the console cannot be reached), WrongState, ResourceExhausted."""

    async def attach(self, request: AttachStreams) -> StreamSession: ...


class Screens(Protocol):
    """VMs' screens, by VNC."""

    def connect(self, container: ContainerId) -> socket.socket:
        """A connection to this VM's QEMU, never to another process. Raises Unavailable."""


class Streaming(Protocol):
    """The server to which kubelet forwards its users' connections. Called from any thread; answers at once."""

    def offer(self, request: StreamRequest) -> str:
        """A URL that serves this request once, within a minute. ResourceExhausted if too many are unused."""

    def refused(self, pod: str) -> Mapping[str, int]:
        """How often the pod's requests met each limit."""

    def end_container(self, container: ContainerId) -> None:
        """Ends the sessions of an ended container, and revokes its unused URLs."""

    def end_sandbox(self, sandbox: SandboxId) -> None:
        """Ends the port forwards of a stopped pod, and revokes their unused URLs."""
