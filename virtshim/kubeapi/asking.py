"""One request to the API server, within limits of time and size."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from typing import Any, Final, TypeAlias

from virtshim.kubeapi.kubeconfig import Access

# A TLS connection to the API server of which every wait, its name's look-up included, ends at one moment.

# As socket.getaddrinfo.
Resolve: TypeAlias = Callable[..., list[Any]]


class BoundedSocket(ssl.SSLSocket):
    """A socket's own limit is one for each part, and a part may be one byte of a header. `until`: of `time.monotonic`."""

    until: float = math.inf

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        self.settimeout(_left(self.until))
        return super().recv_into(buffer, nbytes, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self.settimeout(_left(self.until))
        return super().send(data, flags)


def connected(access: Access, until: float, resolve: Resolve) -> ssl.SSLSocket:
    """Whose server has shown who it is, if it must. Raises OSError, of which TimeoutError after `until`; ValueError."""
    failure = OSError(f"no address for {access.host}")
    for family, kind, protocol, _, address in _addresses(access.host, access.port, until, resolve):
        plain = socket.socket(family, kind, protocol)
        try:
            plain.settimeout(_left(until))
            plain.connect(address)
            # OpenSSL's handshake takes the limit for the whole of it.
            plain.settimeout(_left(until))
            access.tls.sslsocket_class = BoundedSocket
            secured = access.tls.wrap_socket(plain, server_hostname=access.server_name)
        except (TimeoutError, ssl.SSLError):
            plain.close()
            raise
        except OSError as exc:
            plain.close()
            failure = exc
        except BaseException:
            plain.close()
            raise
        else:
            assert isinstance(secured, BoundedSocket)
            secured.until = until
            return secured
    raise failure


def _addresses(host: str, port: int, until: float, resolve: Resolve) -> list[Any]:
    """getaddrinfo cannot be interrupted, so a thread does it; an abandoned one ends with the resolver's own limit."""
    answer: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answer.put(resolve(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as exc:
            answer.put(exc)

    threading.Thread(target=look_up, name="api-server-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=_left(until))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise found
    return found


def _left(until: float) -> float:
    """Seconds. Raises TimeoutError when there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


_PART: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Seconds for the whole of a request, and an answer's largest size in bytes. `resolve`: getaddrinfo(3)."""

    seconds: float = 5.0
    answer: int = 8 << 20
    resolve: Resolve = socket.getaddrinfo


USUAL: Final = RequestLimits()


@dataclass(frozen=True, slots=True)
class Answer:
    """`document`: {} for what is no JSON object."""

    status: int
    reason: str
    document: dict[str, Any]


def get(access: Access, path: str, limits: RequestLimits = USUAL) -> Answer:
    """Redirects are not followed. Raises OSError, HTTPException, ValueError."""
    return _ask(access, "GET", path, None, limits)


def post(access: Access, path: str, document: Mapping[str, Any]) -> Answer:
    """As `get`."""
    return _ask(access, "POST", path, document, USUAL)


def _ask(access: Access, method: str, path: str, document: Mapping[str, Any] | None, limits: RequestLimits) -> Answer:
    headers = {"Accept": "application/json", "User-Agent": "virtshim"}
    if document is not None:
        headers["Content-Type"] = "application/json"
    if access.token:
        headers["Authorization"] = f"Bearer {access.token}"
    sent = None if document is None else json.dumps(document).encode()
    connection = HTTPSConnection(access.host, access.port, context=access.tls)
    try:
        with contextlib.closing(connection):
            connection.sock = connected(access, time.monotonic() + limits.seconds, limits.resolve)
            connection.request(method, access.prefix + path, body=sent, headers=headers)
            # A connection that ends with its answer is not the connection object's any more.
            with contextlib.closing(connection.getresponse()) as answer:
                body = _body(answer, limits.answer)
    except TimeoutError:
        raise TimeoutError(f"its answer takes longer than {limits.seconds:g} s") from None
    return Answer(answer.status, answer.reason, _object(body, good=answer.status in (200, 201)))


def _body(answer: HTTPResponse, most: int) -> bytes:
    parts, size = [], 0
    while part := answer.read1(_PART):
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"its answer is larger than {most} bytes")
    return b"".join(parts)


def _object(body: bytes, *, good: bool) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        if good:
            raise
        return {}
    return found if isinstance(found, dict) else {}
