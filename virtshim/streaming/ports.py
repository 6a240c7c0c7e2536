"""Streams between clients and guests."""

from __future__ import annotations

import enum
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId, SandboxId

# What a caller may stream to and from a container or a pod: requests, and the items of a session. No I/O.
#
# A request's `pod` is its `namespace/name`.


class OutStream(enum.Enum):
    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Streams:
    """Which streams a caller wants. With `tty` there is one output, stdout."""

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
    """`stdin_once`: the container's input ends for good when the first client that has it closes or leaves. `to_entrypoint`: to
    the streams of the container's own command, not to the console."""

    container: ContainerId
    streams: Streams
    stdin_once: bool = False
    to_entrypoint: bool = False
    pod: str = field(default="", compare=False)

    @property
    def leaves_with_input(self) -> bool:
        """True for a client at a terminal: it closes its input when somebody types the keys to detach (crictl), and
        then waits for the session to end. Other runtimes end it, too."""
        return self.streams.stdin and self.streams.tty


# Where VNC's first display is by its own rules (RFC 6143, 8.2).
VNC_PORT: Final = 5900


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """`address` is the pod's, the only one that is dialed. `ports` is empty if they come with the streams. `screen`: the VM whose
    screen port 5900 then means; None if it means the guest's own port. `inside`: the container in whose guest the ports are
    dialed, on its loopback, instead of from the node."""

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
    """Whose limits hold for it: `namespace/name`, where that is known."""
    return request.pod or owner(request).short


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of output, never empty."""

    stream: OutStream
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The command has ended and all its output was read. `code` is 0 to 255; a console that ends gives 0."""

    code: int


class StreamSession(Protocol):
    """A running command, or a client's share of a console. Lives on the streaming loop: all its coroutines are called there,
    `read` by one task, `write_stdin` and `close_stdin` by a second, `resize` by a third, all at the same time. Both sides are
    bounded: a slow reader slows the command down (a console loses output instead)."""

    async def read(self) -> Output | Ended:
        """The next piece of output (at most 64 KiB), in the order it came; `Ended` once, last. ShimError if the session broke."""

    async def write_stdin(self, data: bytes) -> None:
        """Returns when there is room for more. What nobody reads any more is thrown away without an error."""

    async def close_stdin(self) -> None:
        """End of input. May be called twice."""

    async def resize(self, width: int, height: int) -> None:
        """The client's terminal has so many columns and rows. No error without a terminal."""

    async def close(self) -> None:
        """The client is gone: ends the command if it still runs. Called exactly once, also after `Ended` or an error; must
        neither raise nor take longer than a few seconds."""


class Execs(Protocol):
    """Commands in guests. Errors: Unavailable (no guest agent answers), NotFound (no such program), WrongState."""

    async def start(self, request: ExecRequest) -> StreamSession: ...
    async def dial(self, container: ContainerId, port: int) -> StreamSession:
        """Its input and output are a TCP connection to its guest's loopback; stderr and an exit code tell why there is none."""


class Attaches(Protocol):
    """Consoles. Errors: Unavailable (the console cannot be reached), WrongState, ResourceExhausted."""

    async def attach(self, request: AttachStreams) -> StreamSession: ...


class Screens(Protocol):
    """VMs' screens, as VNC serves them."""

    def connect(self, container: ContainerId) -> socket.socket:
        """A connection to this VM's QEMU and to nobody else. Raises Unavailable."""


class Streaming(Protocol):
    """The server that kubelet takes its users' connections to. Called from any thread; answers at once."""

    def offer(self, request: StreamRequest) -> str:
        """A URL that serves this request once, within a minute. ResourceExhausted if too many wait."""

    def refused(self, pod: str) -> Mapping[str, int]:
        """How often a request for that pod met a limit, by what was limited."""

    def end_container(self, container: ContainerId) -> None:
        """The container has ended: its sessions end, and URLs that wait for it are void."""

    def end_sandbox(self, sandbox: SandboxId) -> None:
        """The same for the pod's port forwards."""
