"""The life of a connection: handshake, token, session, close. Runs on the streaming loop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from virtshim.model.errors import ResourceExhausted
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.streaming.channel import PIECE, SEND_BUFFER, ByteChannel, Gone, TcpChannel, run_until
from virtshim.streaming.portforward import dial, in_guest, with_vnc
from virtshim.streaming.portforward_clients import SpdyForward, WebSocketForward
from virtshim.streaming.ports import (
    Attaches,
    AttachStreams,
    ExecRequest,
    Execs,
    ForwardRequest,
    Screens,
    StreamRequest,
    owner,
    pod_of,
)
from virtshim.streaming.remotecommand import DELIVERY_TIMEOUT, RemoteClient, serve
from virtshim.streaming.remotecommand_clients import SpdyRemote, WebSocketRemote
from virtshim.streaming.room import SessionRoom, StreamRoom
from virtshim.streaming.upgrade import Exchange, HttpRefused, Negotiated, Transport, negotiate
from virtshim.streaming.websocket import TunnelChannel, WebSocket
from virtshim.system.pod_places import Places, PodPlaces

# Single-use tokens: each is for one allowed request. Any thread.
#
# Local processes can reach the streaming port, and only the token keeps them out. So it has 128 random bits, is valid for
# one attempt within a minute, and only for its request.

LIFETIME: Final = 60.0
MAX_PENDING: Final = 1000
# For one pod.
MAX_OF_POD: Final = 100
_RANDOM_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Pending:
    request: StreamRequest
    until: float


class Tokens:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        again = f"let their clients connect, or try again within {LIFETIME:.0f} s"
        self.places = PodPlaces(Places("streaming URLs that wait", MAX_PENDING, MAX_OF_POD, again, again))
        self._now = monotonic
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}  # in order of their end

    def issue(self, request: StreamRequest) -> str:
        """Raises ResourceExhausted if too many tokens are unused, of this pod or of all."""
        with self._lock:
            self._drop_expired()
            self.places.take(pod_of(request))
            token = secrets.token_urlsafe(_RANDOM_BYTES)
            self._pending[token] = _Pending(request, self._now() + LIFETIME)
            return token

    def redeem(self, token: str) -> StreamRequest | None:
        """The token's request. None if the token is unknown, used, expired or revoked."""
        with self._lock:
            found = self._pending.pop(token, None)
            if found is None:
                return None
            self.places.give_back(pod_of(found.request))
            return found.request if found.until > self._now() else None

    def revoke(self, concerns: Callable[[StreamRequest], bool]) -> None:
        with self._lock:
            for token, pending in list(self._pending.items()):
                if concerns(pending.request):
                    self._drop(token)

    def _drop_expired(self) -> None:
        now = self._now()
        for token, pending in list(self._pending.items()):
            if pending.until > now:
                break
            self._drop(token)

    def _drop(self, token: str) -> None:
        self.places.give_back(pod_of(self._pending.pop(token).request))


log = structlog.get_logger(__name__)

# The first part of the URL's path.
KINDS: Final[dict[type[StreamRequest], str]] = {
    ExecRequest: "exec",
    AttachStreams: "attach",
    ForwardRequest: "portforward",
}

# Connections without a token yet; another one closes the oldest.
MAX_UNAUTHENTICATED: Final = 128

# Seconds for a session to end by itself when the daemon stops.
_SHUTDOWN_TIMEOUT: Final = 4.0


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """In seconds. `handshake`: for the handshake. `streams`: for the client to open all its streams. `idle`: a session
    without any bytes ends after this time. `leaving`: for the client to leave after it has got its output. `linger`:
    for the last bytes of a connection that is being closed."""

    handshake: float = 10.0
    streams: float = 30.0
    idle: float = 4 * 3600.0
    leaving: float = 5.0
    linger: float = 2.0


@dataclass(frozen=True)
class ConnectionHandler:
    _tokens: Tokens
    _attaches: Attaches
    _execs: Execs
    _screens: Screens
    _timeouts: StreamTimeouts
    _room: StreamRoom
    _unauthenticated: dict[asyncio.Task[Any], None] = field(default_factory=dict)  # in order of arrival
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _sessions: dict[asyncio.Event, ContainerId | SandboxId] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    # --- from outside

    def end(self, whose: ContainerId | SandboxId) -> None:
        for ended, session in self._sessions.items():
            if session == whose:
                ended.set()

    async def end_sessions(self) -> None:
        """Asks all sessions to end, and cancels those that do not. No more connections may be accepted."""
        for task in self._unauthenticated:
            task.cancel()
        for ended in self._sessions:
            ended.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SHUTDOWN_TIMEOUT)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def connected(self, sock: socket.socket) -> None:
        """Takes over the socket of a new client."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        task = asyncio.create_task(self._connection(sock))
        self._tasks.add(task)
        self._unauthenticated[task] = None
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            next(iter(self._unauthenticated)).cancel()

        def closed(_: asyncio.Task[None]) -> None:
            sock.close()  # if the task was cancelled before it started
            self._unauthenticated.pop(task, None)
            self._tasks.discard(task)

        task.add_done_callback(closed)

    # --- one connection

    async def _connection(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=PIECE)
        channel = TcpChannel(reader, writer)
        try:
            await self._received(channel)
            await channel.close(self._timeouts.linger)
        except Gone:
            pass
        except Exception:
            log.exception("streaming.connection.crashed")
        finally:
            writer.transport.abort()

    async def _received(self, channel: TcpChannel) -> None:
        with contextlib.ExitStack() as place:
            try:
                async with asyncio.timeout(self._timeouts.handshake):
                    agreed = await self._handshake(channel, place)
            except TimeoutError:
                return
            if agreed is not None:
                self._unauthenticated.pop(_this_task())
                await self._session(channel, *agreed)

    async def _handshake(
        self, channel: TcpChannel, place: contextlib.ExitStack
    ) -> tuple[StreamRequest, Negotiated, SessionRoom] | None:
        """None if the request was refused. Closing `place` gives the session's room back. Raises Gone."""
        exchange = Exchange(channel)
        try:
            head = await exchange.head()
            request = self._request_for(head.path)
            negotiated = negotiate(head, request)
            room = self._room_for(request, place)
        except HttpRefused as refused:
            log.info("streaming.refused", status=refused.status, why=str(refused))
            await exchange.refuse(refused)
            return None
        channel.unread(await exchange.switch(negotiated.headers))
        return request, negotiated, room

    def _room_for(self, request: StreamRequest, place: contextlib.ExitStack) -> SessionRoom:
        """Raises HttpRefused."""
        try:
            return place.enter_context(self._room.session(pod_of(request)))
        except ResourceExhausted as exc:
            raise HttpRefused(429, str(exc)) from exc

    def _request_for(self, path: str) -> StreamRequest:
        """Answers the same for unknown, used and expired tokens, and those of another kind. Raises HttpRefused."""
        _, _, kind_and_token = path.partition("/")
        kind, _, token = kind_and_token.partition("/")
        request = self._tokens.redeem(token)
        if request is None or KINDS[type(request)] != kind:
            raise HttpRefused(404, "not found")
        return request

    async def _session(
        self, channel: TcpChannel, request: StreamRequest, negotiated: Negotiated, room: SessionRoom
    ) -> None:
        ended = asyncio.Event()
        if self.closing.is_set():
            ended.set()
        self._sessions[ended] = owner(request)
        facts = {"kind": KINDS[type(request)], "of": owner(request).short}
        log.info("streaming.session.begun", **facts, by=negotiated.transport.value, protocol=negotiated.protocol)
        try:
            conversation = self._conversation(channel, request, negotiated, room, ended)
            await run_until(conversation, channel.idle(self._timeouts.idle))
            await channel.delivered(DELIVERY_TIMEOUT)
        finally:
            del self._sessions[ended]
            log.info("streaming.session.ended", **facts)

    def _conversation(
        self,
        channel: TcpChannel,
        request: StreamRequest,
        negotiated: Negotiated,
        room: SessionRoom,
        ended: asyncio.Event,
    ) -> Coroutine[Any, Any, None]:
        match request:
            case ForwardRequest():
                return self._forward(channel, request, negotiated, room, ended)
            case ExecRequest():
                return serve(
                    _remote(channel, request, negotiated, room),
                    lambda: self._execs.start(request),
                    ended,
                    self._timeouts.streams,
                    self._timeouts.leaving,
                )
            case AttachStreams():
                return serve(
                    _remote(channel, request, negotiated, room),
                    lambda: self._attaches.attach(request),
                    ended,
                    self._timeouts.streams,
                    self._timeouts.leaving,
                )

    async def _forward(
        self,
        channel: TcpChannel,
        request: ForwardRequest,
        negotiated: Negotiated,
        room: SessionRoom,
        ended: asyncio.Event,
    ) -> None:
        dial_pod = with_vnc(
            dial if request.inside is None else in_guest(self._execs, request.inside), self._screens, request.screen
        )
        if negotiated.transport is Transport.WEBSOCKET:
            ws = WebSocket(channel)
            forward = WebSocketForward(ws, request.address, request.ports, negotiated.protocol, dial_pod, room)
            await forward.serve(ended)
            return
        raw: ByteChannel = channel
        if negotiated.transport is Transport.TUNNEL:
            raw = TunnelChannel(WebSocket(channel))
        await SpdyForward(raw, request.address, dial_pod, self._timeouts.streams, room).serve(ended)
        if isinstance(raw, TunnelChannel):
            with contextlib.suppress(Gone):
                await raw.close()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _remote(
    channel: TcpChannel, request: ExecRequest | AttachStreams, negotiated: Negotiated, room: SessionRoom
) -> RemoteClient:
    if negotiated.transport is Transport.SPDY:
        return SpdyRemote(channel, request.streams, negotiated.protocol, room)
    return WebSocketRemote(WebSocket(channel), request.streams, negotiated.protocol, room)
