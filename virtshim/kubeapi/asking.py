"""One request to the API server, within limits of time and size."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from typing import Any, Final

from virtshim.kubeapi.kubeconfig import Access

# Seconds for the whole of an answer, and its largest size.
LIMIT: Final = 5.0
_MOST: Final = 8 << 20
_PART: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Answer:
    """`document`: {} for what is no JSON object."""

    status: int
    reason: str
    document: dict[str, Any]


def get(access: Access, path: str) -> Answer:
    """Redirects are not followed. Raises OSError, HTTPException, ValueError."""
    until = time.monotonic() + LIMIT
    connection = HTTPSConnection(access.host, access.port, timeout=LIMIT, context=access.tls)
    with contextlib.closing(connection):
        headers = {"Accept": "application/json", "User-Agent": "virtshim"}
        if access.token:
            headers["Authorization"] = f"Bearer {access.token}"
        connection.request("GET", access.prefix + path, headers=headers)
        # A connection that ends with its answer is not the connection object's any more.
        with contextlib.closing(connection.getresponse()) as answer:
            body = _body(answer, until)
    try:
        document = json.loads(body)
    except ValueError:
        if answer.status == 200:
            raise
        document = {}
    return Answer(answer.status, answer.reason, document if isinstance(document, dict) else {})


def _body(answer: HTTPResponse, until: float) -> bytes:
    """A part at a time: the socket's own limit is one for each part."""
    parts, size = [], 0
    while part := answer.read1(_PART):
        parts.append(part)
        size += len(part)
        if size > _MOST:
            raise ValueError(f"its answer is larger than {_MOST} bytes")
        if time.monotonic() > until:
            raise TimeoutError(f"its answer takes longer than {LIMIT:g} s")
    return b"".join(parts)
