"""Streams between clients and guests."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

from virtshim.domain.guest.streaming import AttachStreams, Ended, ExecRequest, Output, StreamRequest
from virtshim.domain.ids import ContainerId, SandboxId


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
