"""One request to the API server, within limits of time and size."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from typing import Any, Final

from virtshim.kubeapi.connecting import Resolve, connected
from virtshim.kubeapi.kubeconfig import Access

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
