"""One forwarded connection: dials the pod and copies both ways, half-closes included."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol

from virtshim.domain.streaming import SCREEN_PORT
from virtshim.streaming.channel import PIECE, Gone

# Seconds until a pod that does not answer counts as unreachable.
_DIAL: Final = 10.0

Dial = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class ForwardFailed(Exception):
    """For the client's user: what could not be reached, and why."""


class Near(Protocol):
    """The client's end of one forwarded connection."""

    async def read(self) -> bytes:
        """b"" when the client sends no more."""

    async def write(self, data: bytes) -> None:
        """Raises Gone."""

    async def finish(self) -> None:
        """The pod sends no more. Raises Gone."""


async def dial(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """From the host's own namespace: the pod's is a mere bridge between the network's link and the guest's tap, and has
    no address of its own to dial from. That a node reaches its pods is what every Kubernetes network promises."""
    return await asyncio.open_connection(address, port, limit=PIECE)


def with_screen(dial_pod: Dial, screen: str) -> Dial:
    """As `dial_pod`, but the VNC port is the VM's own screen: the server on that Unix socket."""

    async def dial_either(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if port == SCREEN_PORT:
            return await asyncio.open_unix_connection(screen, limit=PIECE)
        return await dial_pod(address, port)

    return dial_either if screen else dial_pod


async def splice(near: Near, dial_pod: Dial, address: str, port: int) -> None:
    """Returns when both ways have ended. Raises ForwardFailed, Gone."""
    try:
        async with asyncio.timeout(_DIAL):
            reader, writer = await dial_pod(address, port)
    except TimeoutError as exc:
        raise ForwardFailed(f"the pod did not answer on {address} port {port} within {_DIAL:.0f} s") from exc
    except OSError as exc:
        raise ForwardFailed(f"connecting to the pod at {address} port {port} failed: {_reason(exc)}") from exc
    writer.transport.set_write_buffer_limits(high=PIECE)
    try:
        await _both(_to_pod(near, writer), _to_client(reader, near))
    except OSError as exc:
        raise ForwardFailed(f"the connection to port {port} of the pod broke: {_reason(exc)}") from exc
    finally:
        writer.transport.abort()


async def _both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Until both are done; the first exception ends the other."""
    tasks = [asyncio.create_task(one), asyncio.create_task(other)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _to_pod(near: Near, writer: asyncio.StreamWriter) -> None:
    """A pod that reads no more may still send: what is wrong with it shows when it is read from."""
    with contextlib.suppress(OSError):
        while data := await near.read():
            writer.write(data)
            await writer.drain()
        writer.transport.set_write_buffer_limits(high=0)
        await writer.drain()
        writer.write_eof()


async def _to_client(reader: asyncio.StreamReader, near: Near) -> None:
    while data := await reader.read(PIECE):
        await near.write(data)
    with contextlib.suppress(Gone):
        await near.finish()


def _reason(error: OSError) -> str:
    """asyncio puts words of its own in place of the system's."""
    return os.strerror(error.errno).lower() if error.errno else str(error)
