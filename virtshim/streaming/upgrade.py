"""Which transport and which version of the protocol a client and this server speak with each other. Pure."""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from wsproto.utilities import generate_accept_token

from virtshim.domain.guest.streaming import ForwardRequest, StreamRequest
from virtshim.streaming.http_head import Head, HttpRefused
from virtshim.streaming.portforward import spdy as forward_spdy
from virtshim.streaming.portforward import websocket as forward_websocket
from virtshim.streaming.remotecommand import spdy as remote_spdy
from virtshim.streaming.remotecommand import websocket as remote_websocket

_SPDY = "SPDY/3.1"


class Transport(enum.Enum):
    SPDY = "spdy"
    WEBSOCKET = "websocket"
    TUNNEL = "tunnel"


@dataclass(frozen=True, slots=True)
class Negotiated:
    """`protocol` is the name both sides use; `headers` those of the 101 answer."""

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
    served = forward_spdy.PROTOCOLS if isinstance(request, ForwardRequest) else remote_spdy.PROTOCOLS
    offered = head.values("x-stream-protocol-version")
    headers = [("Connection", "Upgrade"), ("Upgrade", _SPDY)]
    if not offered:  # clients from before there were versions
        return Negotiated(Transport.SPDY, served[-1], headers)
    chosen = _first_common(offered, served)
    if chosen is None:
        accepted = tuple(("X-Accepted-Stream-Protocol-Versions", name) for name in served if name)
        raise HttpRefused(403, f"no common protocol: this server supports {_names(served)}", accepted)
    return Negotiated(Transport.SPDY, chosen, [*headers, ("X-Stream-Protocol-Version", chosen)])


def _websocket(head: Head, request: StreamRequest) -> Negotiated:
    accept = _accept_token(head)
    served: tuple[str, ...] = remote_websocket.PROTOCOLS
    if isinstance(request, ForwardRequest):
        served = (*forward_websocket.PROTOCOLS, forward_websocket.TUNNEL)
    offered = head.values("sec-websocket-protocol")
    chosen = _first_common(offered or [""], served)
    if chosen is None:
        raise HttpRefused(403, f"no common subprotocol: this server supports {_names(served)}")
    if isinstance(request, ForwardRequest) and chosen != forward_websocket.TUNNEL:
        _check_ports(request, chosen)
    headers = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Accept", accept)]
    if offered:
        headers.append(("Sec-WebSocket-Protocol", chosen))
    transport = Transport.TUNNEL if chosen == forward_websocket.TUNNEL else Transport.WEBSOCKET
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
    most = forward_websocket.max_ports(protocol)
    if not 1 <= len(request.ports) <= most:
        raise HttpRefused(400, f"{protocol} forwards the ports named in the request: 1 to {most} of them")


def _first_common(offered: Sequence[str], served: Sequence[str]) -> str | None:
    """The client's order of preference counts."""
    return next((name for name in offered if name in served), None)


def _names(served: Sequence[str]) -> str:
    return ", ".join(name for name in served if name)
