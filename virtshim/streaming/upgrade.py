"""The HTTP part of a streaming connection, and the choice of transport and protocol version."""

from __future__ import annotations

import base64
import binascii
import enum
import http
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import h11
from wsproto.utilities import generate_accept_token

from virtshim.streaming.channel import Gone, TcpChannel
from virtshim.streaming.portforward_clients import (
    FORWARD_SPDY_PROTOCOLS,
    FORWARD_WEBSOCKET_PROTOCOLS,
    WEBSOCKET_TUNNEL,
    websocket_max_ports,
)
from virtshim.streaming.ports import ForwardRequest, StreamRequest
from virtshim.streaming.remotecommand_clients import REMOTE_SPDY_PROTOCOLS, REMOTE_WEBSOCKET_PROTOCOLS

# The order of checks reveals nothing to strangers: method and size, then the token. Only the token's owner learns what is
# wrong with the upgrade. `Origin` is not refused: Kubernetes' Python client sends it, and so do web consoles through the
# API server. A web page cannot guess the token, and no answer lets it read the token.

# The most bytes of request line and headers.
MAX_HEAD: Final = 16 << 10

_METHODS: Final = ("GET", "POST")


class HttpRefused(Exception):
    """Becomes an answer with this status and text."""

    def __init__(self, status: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Head:
    """`headers`: in order, with lower-case names. `target` and `headers` may contain secrets."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)

    def values(self, name: str) -> list[str]:
        """All values of a header, which may be repeated or separated by commas."""
        return [part.strip() for key, value in self.headers if key == name for part in value.split(",") if part.strip()]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def upgrades_to(self, protocol: str) -> bool:
        connection = {value.lower() for value in self.values("connection")}
        return "upgrade" in connection and protocol in {value.lower() for value in self.values("upgrade")}


class Exchange:
    """One request and its answer."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._head_only = False

    async def head(self) -> Head:
        """Raises HttpRefused, Gone."""
        try:
            request = await self._next()
            if not isinstance(request, h11.Request):
                raise Gone("no request came")
            head = Head(
                request.method.decode("latin-1"),
                request.target.decode("latin-1"),
                tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers),
            )
            self._head_only = head.method == "HEAD"
            _check(head)
            await self._next()  # the end of the message, which has no body
        except h11.RemoteProtocolError as exc:
            raise HttpRefused(exc.error_status_hint, "the request is not valid HTTP/1.1") from exc
        return head

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]  # NEED_DATA and PAUSED have the same type
            data = await self._channel.receive()
            if not data:
                raise Gone("the client left before its request was complete")
            self._http.receive_data(data)

    async def switch(self, headers: list[tuple[str, str]]) -> bytes:
        """Answers 101, which ends HTTP. Returns bytes that the client has already sent in the new protocol. Raises Gone."""
        answer = h11.InformationalResponse(status_code=101, headers=headers, reason=b"Switching Protocols")
        await self._channel.send(self._http.send(answer) or b"")
        return bytes(self._http.trailing_data[0])

    async def refuse(self, refused: HttpRefused) -> None:
        """Raises Gone."""
        body = (refused.text + "\n").encode()
        headers = (
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *refused.headers,
        )
        head = f"HTTP/1.1 {refused.status} {http.HTTPStatus(refused.status).phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers)
        await self._channel.send(head.encode("ascii") + b"\r\n" + (b"" if self._head_only else body))


def _check(head: Head) -> None:
    if head.method not in _METHODS:
        raise HttpRefused(405, "only GET and POST are allowed", (("Allow", ", ".join(_METHODS)),))
    if head.values("transfer-encoding") or any(length != "0" for length in head.values("content-length")):
        raise HttpRefused(400, "a request body is not allowed")


_SPDY = "SPDY/3.1"


class Transport(enum.Enum):
    SPDY = "spdy"
    WEBSOCKET = "websocket"
    TUNNEL = "tunnel"


@dataclass(frozen=True, slots=True)
class Negotiated:
    """`protocol`: the name that both sides use; `headers`: those of the 101 answer."""

    transport: Transport
    protocol: str
    headers: list[tuple[str, str]]


def negotiate(head: Head, request: StreamRequest) -> Negotiated:
    """Raises HttpRefused."""
    if head.upgrades_to("websocket"):
        return _websocket(head, request)
    if head.upgrades_to(_SPDY.lower()):
        return _spdy(head, request)
    raise HttpRefused(400, f"the connection must be upgraded to {_SPDY} or websocket")


def _spdy(head: Head, request: StreamRequest) -> Negotiated:
    served = FORWARD_SPDY_PROTOCOLS if isinstance(request, ForwardRequest) else REMOTE_SPDY_PROTOCOLS
    offered = head.values("x-stream-protocol-version")
    headers = [("Connection", "Upgrade"), ("Upgrade", _SPDY)]
    if not offered:  # clients older than versions
        return Negotiated(Transport.SPDY, served[-1], headers)
    chosen = _first_common(offered, served)
    if chosen is None:
        accepted = tuple(("X-Accepted-Stream-Protocol-Versions", name) for name in served if name)
        raise HttpRefused(403, f"no common protocol: this server supports {_names(served)}", accepted)
    return Negotiated(Transport.SPDY, chosen, [*headers, ("X-Stream-Protocol-Version", chosen)])


def _websocket(head: Head, request: StreamRequest) -> Negotiated:
    accept = _accept_token(head)
    served: tuple[str, ...] = REMOTE_WEBSOCKET_PROTOCOLS
    if isinstance(request, ForwardRequest):
        served = (*FORWARD_WEBSOCKET_PROTOCOLS, WEBSOCKET_TUNNEL)
    offered = head.values("sec-websocket-protocol")
    chosen = _first_common(offered or [""], served)
    if chosen is None:
        raise HttpRefused(403, f"no common subprotocol: this server supports {_names(served)}")
    if isinstance(request, ForwardRequest) and chosen != WEBSOCKET_TUNNEL:
        _check_ports(request, chosen)
    headers = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Accept", accept)]
    if offered:
        headers.append(("Sec-WebSocket-Protocol", chosen))
    transport = Transport.TUNNEL if chosen == WEBSOCKET_TUNNEL else Transport.WEBSOCKET
    return Negotiated(transport, chosen, headers)


def _accept_token(head: Head) -> str:
    """The answer to the client's key (RFC 6455, 4.2)."""
    if head.method != "GET":
        raise HttpRefused(400, "a WebSocket upgrade must use GET")
    if head.values("sec-websocket-version") != ["13"]:
        raise HttpRefused(400, "only Sec-WebSocket-Version 13 is supported", (("Sec-WebSocket-Version", "13"),))
    keys = head.values("sec-websocket-key")
    try:
        fit = len(keys) == 1 and len(base64.b64decode(keys[0], validate=True)) == 16
    except (binascii.Error, ValueError):
        fit = False
    if not fit:
        raise HttpRefused(400, "Sec-WebSocket-Key must hold 16 bytes in base64")
    return generate_accept_token(keys[0].encode("ascii")).decode("ascii")


def _check_ports(request: ForwardRequest, protocol: str) -> None:
    most = websocket_max_ports(protocol)
    if not 1 <= len(request.ports) <= most:
        raise HttpRefused(400, f"{protocol} forwards the ports named in the request: 1 to {most} of them")


def _first_common(offered: Sequence[str], served: Sequence[str]) -> str | None:
    """Chooses by the client's order of preference."""
    return next((name for name in offered if name in served), None)


def _names(served: Sequence[str]) -> str:
    return ", ".join(name for name in served if name)
