"""One forwarded connection: connects to the pod from the node, or inside the guest by a command, and copies both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol

import structlog

from virtshim.guest.command import PATH, GuestCommand
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.text import printable_text
from virtshim.streaming.channel import PIECE, SEND_BUFFER, Gone
from virtshim.streaming.ports import VNC_PORT, Ended, Execs, Output, OutStream, Screens, StreamSession

# Connects standard input and output to a port (the argument), and passes the end of input on. Uses the first tool that the guest
# has, quick and exact ones first; only bash cannot pass the end of input on.
DIAL_SCRIPT: Final = r"""
port=$1
for nc in nc "busybox nc"; do
  case $($nc --help 2>&1) in *BusyBox*"Usage: nc"*) exec $nc 127.0.0.1 "$port" ;; esac
done
if command -v python3 >/dev/null; then
  exec python3 -c '
import os, socket, sys, threading
try:
    pod = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
except OSError as exc:
    sys.exit(exc.strerror)
def send():
    try:
        for piece in iter(lambda: os.read(0, 65536), b""):
            pod.sendall(piece)
        pod.shutdown(socket.SHUT_WR)
    except OSError:
        pass
threading.Thread(target=send, daemon=True).start()
for piece in iter(lambda: pod.recv(65536), b""):
    while piece:
        piece = piece[os.write(1, piece):]
os._exit(0)' "$port"
fi
if command -v bash >/dev/null; then
  exec bash -c 'exec 4<&0 3<>"/dev/tcp/127.0.0.1/$0" || exit 1
cat <&4 >&3 &
cat <&3
kill $! 2>/dev/null
exit 0' "$port"
fi
echo "the guest has none of busybox with nc, python3 and bash; install one in the image, or remove virtshim.io/forward" >&2
exit 127
"""


def dial_command(port: int) -> GuestCommand:
    """Exits with 0 after the connection; with another code and a reason on stderr if there was no connection."""
    return GuestCommand(("/bin/sh", "-c", DIAL_SCRIPT, "virtshim-dial", str(port)), PATH)


# Seconds for a pod to answer; after that it counts as unreachable.
_DIAL: Final = 10.0


class PodEnd(Protocol):
    """The pod's end of one forwarded connection. Raises OSError, ForwardFailed, ShimError."""

    async def read(self) -> bytes:
        """b"" after the pod's end of input."""

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None:
        """Passes the client's end of input on."""

    def is_over(self) -> bool:
        """Whether nobody reads any more."""

    async def close(self) -> None:
        """Called exactly once, at the end."""


Dial = Callable[[str, int], Awaitable[PodEnd]]


class ForwardFailed(Exception):
    """The message tells the user what could not be reached, and why."""


class ClientEnd(Protocol):
    """The client's end of one forwarded connection."""

    async def read(self) -> bytes:
        """b"" after the client's end of input."""

    async def write(self, data: bytes) -> None:
        """Raises Gone."""

    async def finish(self) -> None:
        """Passes the pod's end of input on. Raises Gone."""


class TcpPodEnd:
    """Implements `PodEnd`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=PIECE)

    async def read(self) -> bytes:
        return await self._reader.read(PIECE)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def finish(self) -> None:
        self._writer.transport.set_write_buffer_limits(high=0)
        await self._writer.drain()
        self._writer.write_eof()

    def is_over(self) -> bool:
        """Never, because a pod that has ended its input may still read."""
        return False

    async def close(self) -> None:
        self._writer.transport.abort()


async def dial(address: str, port: int) -> TcpPodEnd:
    """Connects from the host's namespace, because the pod's only bridges the network's link and the guest's tap, and has no
    address. Every Kubernetes network lets a node reach its pods."""
    reader, writer = await asyncio.open_connection(address, port, limit=PIECE)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return TcpPodEnd(reader, writer)


def with_vnc(dial_pod: Dial, screens: Screens, container: ContainerId | None) -> Dial:
    """Returns `dial_pod` with the VNC port going to that container's screen."""
    if container is None:
        return dial_pod

    async def dial_either(address: str, port: int) -> PodEnd:
        if port == VNC_PORT:
            connected = await asyncio.to_thread(screens.connect, container)
            return TcpPodEnd(*await asyncio.open_unix_connection(sock=connected, limit=PIECE))
        return await dial_pod(address, port)

    return dial_either


async def splice(client: ClientEnd, dial_pod: Dial, address: str, port: int) -> None:
    """Returns when both ways have ended. Raises ForwardFailed, Gone."""
    try:
        async with asyncio.timeout(_DIAL):
            pod = await dial_pod(address, port)
    except TimeoutError as exc:
        raise ForwardFailed(f"the pod did not answer on {address} port {port} within {_DIAL:.0f} s") from exc
    except OSError as exc:
        raise ForwardFailed(f"connecting to the pod at {address} port {port} failed: {_reason(exc)}") from exc
    except ShimError as exc:
        raise ForwardFailed(f"port {port} cannot be reached in the guest: {exc}") from exc
    try:
        await _both(_to_pod(client, pod), _to_client(pod, client))
    except _Over:
        pass
    except OSError as exc:
        raise ForwardFailed(f"the connection to port {port} of the pod broke: {_reason(exc)}") from exc
    except ShimError as exc:
        raise ForwardFailed(f"the connection to port {port} of the guest broke: {exc}") from exc
    finally:
        await pod.close()


class _Over(Exception):
    """The pod's end is gone in both directions."""


async def _both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Runs both to their end; an exception in one ends the other."""
    tasks = [asyncio.create_task(one), asyncio.create_task(other)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _to_pod(client: ClientEnd, pod: PodEnd) -> None:
    """Ignores errors of writing: a pod that does not read may still send, and reading reports its errors."""
    with contextlib.suppress(OSError, ShimError):
        while data := await client.read():
            await pod.write(data)
        await pod.finish()


async def _to_client(pod: PodEnd, client: ClientEnd) -> None:
    while data := await pod.read():
        await client.write(data)
    with contextlib.suppress(Gone):
        await client.finish()
    if pod.is_over():
        raise _Over


def _reason(error: OSError) -> str:
    """The system's text instead of asyncio's."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


log = structlog.get_logger(__name__)

# The most bytes of the guest's error message.
_WORDS: Final = 300
# Seconds to end a command.
_CLEAN_UP: Final = 10.0


class GuestPodEnd:
    """Implements `PodEnd` by a command in the guest."""

    def __init__(self, session: StreamSession, port: int) -> None:
        self._session = session
        self._port = port
        self._words = b""
        self._over = False

    async def read(self) -> bytes:
        while True:
            match await self._session.read():
                case Output(OutStream.STDOUT, data):
                    return data
                case Output(_, data):
                    self._words = (self._words + data)[:_WORDS]
                case Ended(code):
                    self._over = True
                    if code:
                        raise ForwardFailed(
                            f"connecting to port {self._port} inside the guest failed: {self._reason(code)}"
                        )
                    return b""

    async def write(self, data: bytes) -> None:
        await self._session.write_stdin(data)

    async def finish(self) -> None:
        await self._session.close_stdin()

    def is_over(self) -> bool:
        return self._over

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLEAN_UP):
                await self._session.close()
        except TimeoutError:
            log.warning("streaming.session.stuck", seconds=_CLEAN_UP)

    def _reason(self, code: int) -> str:
        words = " ".join(self._words.decode(errors="replace").split())
        return printable_text(words) or f"exit code {code}"


def in_guest(execs: Execs, container: ContainerId) -> Dial:
    """Connects to the loopback of that container's guest, whatever the address."""

    async def dial_inside(address: str, port: int) -> PodEnd:
        del address
        return GuestPodEnd(await execs.dial(container, port), port)

    return dial_inside
