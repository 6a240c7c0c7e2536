"""A TLS connection to the API server of which every wait, its name's look-up included, ends at one moment."""

from __future__ import annotations

import math
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from virtshim.kubeapi.kubeconfig import Access

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
