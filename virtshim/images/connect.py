"""Looking a host up and connecting to it, so that a pull can be given up at any moment."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time
from typing import Any

from virtshim.domain.errors import InvalidRequest, ShimError
from virtshim.images.forbidden_networks import ForbiddenNetworks
from virtshim.images.pull_watch import PullWatch

_POLL = 0.2


def dial(
    host: str, port: int, timeout: float, watch: PullWatch, forbidden: ForbiddenNetworks | None = None
) -> socket.socket:
    """A connected socket, not guarded yet; the waits for it all look at the watch. Raises OSError, or what the watch raises;
    InvalidRequest for a host that is in forbidden networks alone."""
    deadline = time.monotonic() + timeout
    failure: OSError = OSError(f"no address for {host}")
    found = _addresses(host, port, deadline, watch)
    allowed = [one for one in found if forbidden is None or not forbidden.has(str(one[4][0]), host, port)]
    if found and not allowed:
        raise _refusal(host)
    for family, kind, protocol, _, address in allowed:
        connecting = socket.socket(family, kind, protocol)
        try:
            _connect(connecting, address, deadline, watch)
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connecting
        except OSError as exc:
            connecting.close()
            failure = exc
        except ShimError:
            connecting.close()
            raise
    raise failure


def refuse_forbidden(host: str, port: int, timeout: float, watch: PullWatch, forbidden: ForbiddenNetworks) -> None:
    """For a host that somebody else connects to (a proxy): raises InvalidRequest if any address of it is in forbidden networks. A
    name that is not known here is that one's to judge."""
    if "%" in host.partition("%25")[0]:
        raise InvalidRequest(f"{host[:300]!r} is not a host's name")
    try:
        found = _addresses(host.rstrip("."), 0, time.monotonic() + timeout, watch)
    except OSError:
        return
    if any(forbidden.has(str(one[4][0]), host, port) for one in found):
        raise _refusal(host)


def _refusal(host: str) -> InvalidRequest:
    return InvalidRequest(
        f"{host} is at a loopback, link-local, metadata or other address from which images are not fetched on this node "
        "(images.forbidden_networks; loopback: images.insecure_registries); publish the image elsewhere"
    )


def _connect(connecting: socket.socket, address: Any, deadline: float, watch: PullWatch) -> None:
    connecting.setblocking(False)
    try:
        connecting.connect(address)
    except BlockingIOError:
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        while not poll.poll(_POLL * 1000):
            watch.check()
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out while connecting") from None
        if error := connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error)) from None


def _addresses(host: str, port: int, deadline: float, watch: PullWatch) -> list[Any]:
    """getaddrinfo cannot be interrupted, so a thread does it; an abandoned one ends with the resolver's timeout."""
    answer: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answer.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as exc:
            answer.put(exc if isinstance(exc, OSError) else OSError(f"{host} is not a host name"))

    threading.Thread(target=resolve, name="image-pull-resolve", daemon=True).start()
    while True:
        watch.check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"timed out looking up {host}")
        try:
            found = answer.get(timeout=_POLL)
        except queue.Empty:
            continue
        if isinstance(found, OSError):
            raise found
        return found
