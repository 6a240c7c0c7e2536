"""The life of a connection: handshake, token, session, close. Lives on the streaming loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import structlog

from virtshim.domain.guest.streaming import AttachStreams, ExecRequest, ForwardRequest, StreamRequest
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.ports.streaming import Attaches, Execs
from virtshim.streaming.channel import PIECE, ByteChannel, Gone, TcpChannel
from virtshim.streaming.forward_spdy import SpdyForward
from virtshim.streaming.forward_websocket import WebSocketForward
from virtshim.streaming.guest_far import in_guest
from virtshim.streaming.http_head import Exchange, Refused
from virtshim.streaming.racing import unless
from virtshim.streaming.remote_spdy import SpdyRemote
from virtshim.streaming.remote_websocket import WebSocketRemote
from virtshim.streaming.remotecommand import DELIVERY, RemoteClient, serve
from virtshim.streaming.splice import Dial, dial, with_screen
from virtshim.streaming.tokens import Tokens
from virtshim.streaming.upgrade import Agreement, Transport, agree
from virtshim.streaming.websocket import TunnelChannel, WebSocket

log = structlog.get_logger(__name__)

# The first part of a URL's path.
KINDS: Final[dict[type[StreamRequest], str]] = {
    ExecRequest: "exec",
    AttachStreams: "attach",
    ForwardRequest: "portforward",
}

# Connections that have not presented a token yet; one more closes the oldest.
MOST_STRANGERS: Final = 128

# Seconds that a session gets to end by itself when the daemon stops, and a closing connection for its last bytes.
_FAREWELL: Final = 4.0
_LINGER: Final = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: for the whole handshake, for the client to open the streams that belong together, and without any byte in a
    session."""

    handshake: float = 10.0
    streams: float = 30.0
    idle: float = 4 * 3600.0


def owner(request: StreamRequest) -> ContainerId | SandboxId:
    return request.sandbox if isinstance(request, ForwardRequest) else request.container


class Reception:
    def __init__(
        self, tokens: Tokens, attaches: Attaches, execs: Execs | None, limits: Limits, dial_pod: Dial = dial
    ) -> None:
        self._tokens = tokens
        self._attaches = attaches
        self._execs = execs
        self._limits = limits
        self._dial = dial_pod
        self._strangers: dict[asyncio.Task[Any], None] = {}  # in order of arrival
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sessions: dict[asyncio.Event, ContainerId | SandboxId] = {}
        self.closing = asyncio.Event()

    # --- from outside

    def end(self, whose: ContainerId | SandboxId) -> None:
        for ended, session in self._sessions.items():
            if session == whose:
                ended.set()

    async def farewell(self) -> None:
        """Once no more connections are accepted: all sessions are asked to end; those that do not are cancelled."""
        for task in self._strangers:
            task.cancel()
        for ended in self._sessions:
            ended.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def connected(self, sock: socket.socket) -> None:
        """A client has connected; the socket is ours now."""
        task = asyncio.create_task(self._connection(sock))
        self._tasks.add(task)
        self._strangers[task] = None
        if len(self._strangers) > MOST_STRANGERS:
            next(iter(self._strangers)).cancel()

        def closed(_: asyncio.Task[None]) -> None:
            sock.close()  # if the task was cancelled before it began
            self._strangers.pop(task, None)
            self._tasks.discard(task)

        task.add_done_callback(closed)

    # --- one connection

    async def _connection(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=PIECE)
        channel = TcpChannel(reader, writer)
        try:
            await self._received(channel)
            await channel.close(_LINGER)
        except Gone:
            pass
        except Exception:
            log.exception("streaming.connection.crashed")
        finally:
            writer.transport.abort()

    async def _received(self, channel: TcpChannel) -> None:
        try:
            async with asyncio.timeout(self._limits.handshake):
                agreed = await self._handshake(channel)
        except TimeoutError:
            return
        if agreed is not None:
            self._strangers.pop(_this_task())
            await self._session(channel, *agreed)

    async def _handshake(self, channel: TcpChannel) -> tuple[StreamRequest, Agreement] | None:
        """None if the request was refused. Raises Gone."""
        exchange = Exchange(channel)
        try:
            head = await exchange.head()
            request = self._redeemed(head.path)
            agreement = agree(head, request)
        except Refused as refused:
            log.info("streaming.refused", status=refused.status, why=str(refused))
            await exchange.refuse(refused)
            return None
        channel.unread(await exchange.switch(agreement.headers))
        return request, agreement

    def _redeemed(self, path: str) -> StreamRequest:
        """Unknown, used, expired and of another kind look the same from outside. Raises Refused."""
        _, _, kind_and_token = path.partition("/")
        kind, _, token = kind_and_token.partition("/")
        request = self._tokens.redeem(token)
        if request is None or KINDS[type(request)] != kind:
            raise Refused(404, "not found")
        return request

    async def _session(self, channel: TcpChannel, request: StreamRequest, agreement: Agreement) -> None:
        ended = asyncio.Event()
        if self.closing.is_set():
            ended.set()
        self._sessions[ended] = owner(request)
        facts = {"kind": KINDS[type(request)], "of": owner(request).short}
        log.info("streaming.session.begun", **facts, by=agreement.transport.value, protocol=agreement.protocol)
        try:
            await unless(self._conversation(channel, request, agreement, ended), channel.idle(self._limits.idle))
            await channel.delivered(DELIVERY)
        finally:
            del self._sessions[ended]
            log.info("streaming.session.ended", **facts)

    def _conversation(
        self, channel: TcpChannel, request: StreamRequest, agreement: Agreement, ended: asyncio.Event
    ) -> Coroutine[Any, Any, None]:
        match request:
            case ForwardRequest():
                return self._forward(channel, request, agreement, ended)
            case ExecRequest():
                assert self._execs is not None  # `offer` refuses otherwise
                execs = self._execs
                return serve(
                    _remote(channel, request, agreement), lambda: execs.start(request), ended, self._limits.streams
                )
            case AttachStreams():
                return serve(
                    _remote(channel, request, agreement),
                    lambda: self._attaches.attach(request),
                    ended,
                    self._limits.streams,
                )

    async def _forward(
        self, channel: TcpChannel, request: ForwardRequest, agreement: Agreement, ended: asyncio.Event
    ) -> None:
        dial_pod = self._dial
        if request.inside is not None:
            assert self._execs is not None  # `offer` refuses otherwise
            dial_pod = in_guest(self._execs, request.inside)
        dial_pod = with_screen(dial_pod, request.screen)
        if agreement.transport is Transport.WEBSOCKET:
            ws = WebSocket(channel)
            await WebSocketForward(ws, request.address, request.ports, agreement.protocol, dial_pod).serve(ended)
            return
        raw: ByteChannel = channel
        if agreement.transport is Transport.TUNNEL:
            raw = TunnelChannel(WebSocket(channel))
        await SpdyForward(raw, request.address, dial_pod, self._limits.streams).serve(ended)
        if isinstance(raw, TunnelChannel):
            with contextlib.suppress(Gone):
                await raw.close()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _remote(channel: TcpChannel, request: ExecRequest | AttachStreams, agreement: Agreement) -> RemoteClient:
    if agreement.transport is Transport.SPDY:
        return SpdyRemote(channel, request.streams, agreement.protocol)
    return WebSocketRemote(WebSocket(channel), request.streams, agreement.protocol)
