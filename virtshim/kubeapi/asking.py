"""Sends one request to the API server, within limits of time and size."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

from urllib3.connection import HTTPSConnection
from urllib3.exceptions import HTTPError

from virtshim.kubeapi.kubeconfig import Access


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Seconds for the whole request, and bytes for the answer."""

    seconds: float = 5.0
    answer: int = 8 << 20


USUAL: Final = RequestLimits()
_PART: Final = 64 << 10
# Content types of patches. In a merge patch, None removes a field. A strategic merge patch is for Kubernetes' own kinds only. It
# merges lists with a key, such as conditions, by that key.
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class Answer:
    """`document`: {} if the body is no JSON object."""

    status: int
    reason: str
    document: dict[str, Any]


def get(access: Access, path: str, limits: RequestLimits = USUAL) -> Answer:
    """Like `ask`."""
    return ask(access, "GET", path, limits=limits)


def connection_to(access: Access, seconds: float) -> HTTPSConnection:
    """urllib3's connection pool is not used, because it warns if the kubeconfig turns certificate checks off."""
    return HTTPSConnection(
        access.host,
        access.port,
        timeout=seconds,
        ssl_context=access.tls,
        server_hostname=access.server_name,
    )


def headers_of(access: Access) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": "virtshim"}
    if access.token:
        headers["Authorization"] = f"Bearer {access.token}"
    return headers


def ask(
    access: Access,
    method: str,
    path: str,
    document: Mapping[str, Any] | None = None,
    content_type: str = "application/json",
    limits: RequestLimits = USUAL,
) -> Answer:
    """Follows no redirect and uses no proxy. Raises OSError (TimeoutError after `limits.seconds`) and ValueError."""
    headers = headers_of(access)
    if document is not None:
        headers["Content-Type"] = content_type
    sent = None if document is None else json.dumps(document).encode()
    connection = connection_to(access, limits.seconds)

    def exchange() -> Answer:
        connection.request(
            method, access.prefix + path, body=sent, headers=headers, preload_content=False, decode_content=False
        )
        # If the connection ends with the answer, the answer owns it and must close it.
        with contextlib.closing(connection.getresponse()) as answer:
            body = bytearray()
            for part in answer.stream(_PART):
                body += part
                if len(body) > limits.answer:
                    raise ValueError(f"its answer is larger than {limits.answer} bytes")
        return Answer(answer.status, answer.reason or "", _object(body, good=answer.status in (200, 201, 202)))

    try:
        return _in_time(connection, exchange, limits.seconds)
    except (OSError, HTTPError, HTTPException) as exc:
        # urllib3's text repeats the address; its cause, the system's error, says what is wrong.
        found = exc.__cause__ if isinstance(exc, HTTPError) and exc.__cause__ else exc
        if isinstance(found, TimeoutError):
            raise TimeoutError(f"its answer takes longer than {limits.seconds:g} s") from None
        if isinstance(found, OSError):
            raise found from None
        raise OSError(str(found) or type(found).__name__) from None


def _in_time(connection: HTTPSConnection, exchange: Callable[[], Answer], seconds: float) -> Answer:
    """Runs the exchange in a thread. Raises OSError, which is a TimeoutError after `seconds`. A socket's timeout is not enough,
    because it holds for each read, which may return a single byte. getaddrinfo has no timeout at all. On a timeout the socket is
    shut down, which ends the thread. A thread that is still resolving the name ends with the resolver's own timeout."""
    done: Future[Answer] = Future()
    connected: list[socket.socket] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            with contextlib.closing(connection):
                connection.connect()
                connected.append(connection.sock)
                # If the caller gave up before the connect, nobody shuts this socket down, so the exchange must not begin.
                if not given_up.is_set():
                    done.set_result(exchange())
        except BaseException as exc:  # noqa: BLE001 - the waiting caller raises it
            done.set_exception(exc)

    try:
        threading.Thread(target=run, name="api-server", daemon=True).start()
    except RuntimeError as exc:
        raise OSError(f"this process gets no thread for the request: {exc}") from exc
    try:
        return done.result(seconds)
    finally:
        given_up.set()
        for one in connected:
            with contextlib.suppress(OSError):
                # Not SSLSocket.shutdown: after that, the socket would send without TLS.
                socket.socket.shutdown(one, socket.SHUT_RDWR)


def _object(body: bytearray, *, good: bool) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as exc:
        if good:
            raise ValueError(f"its answer is no JSON: {exc}") from exc
        return {}
    return found if isinstance(found, dict) else {}
