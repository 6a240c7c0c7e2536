"""What a caller may stream to and from a container or a pod: requests, and the items of a session. No I/O.

A request's `pod` is its `namespace/name`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.ids import ContainerId, SandboxId


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
