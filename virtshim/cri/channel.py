"""The connection to a socket of virtshim, and its errors. The agent of a cluster loads nothing of CRI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final, TypeVar

import grpc

from virtshim.cri.error_codes import kind_of
from virtshim.model.errors import BY_KIND, PermissionRefused, ShimError, Unavailable

# How long a call may take whose caller names no time.
SECONDS: Final = 30.0
# Metadata of virtshim's own tools: a list or status then shows adopted sandboxes, too. The proxy does not pass it on with lists,
# because its lists have these sandboxes from the runtime that made them.
SHOW_ADOPTED: Final = (("virtshim-adopted", "show"),)

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),  # an answer on the admin socket may be a screenshot
    # A restarted virtshim is back soon, but by default gRPC waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


def ask(
    call: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
    request: _Request,
    seconds: float = SECONDS,
    *,
    adopted: bool = False,
) -> _Answer:
    """The node's answer. `adopted`: see SHOW_ADOPTED. Raises ShimError with the kind and message that the node sent."""
    with as_shim_errors():
        return call(request, timeout=seconds, metadata=SHOW_ADOPTED if adopted else None)


def open_channel(socket: str) -> grpc.Channel:
    """A channel to a Unix socket. An unreachable socket makes the first call fail."""
    return grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)


def refuse_others_socket(path: str) -> None:
    """Raises PermissionRefused if this user may not connect, which needs write permission (unix(7)). gRPC would only say that the
    socket is unreachable."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionRefused(f"this user has no access to {path}; run the command as root, with sudo")


def no_answer(socket: str, reason: str) -> Unavailable:
    return Unavailable(
        f"no answer on the socket {socket} ({reason}): is virtshim running? --socket or CONTAINER_RUNTIME_ENDPOINT names "
        "another socket"
    )


@contextlib.contextmanager
def as_shim_errors() -> Iterator[None]:
    """Turns a call's gRPC error into a ShimError with the kind and message that the node sent."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or "no reason given"
        if code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
            raise _not_connected(details) from error
        raise BY_KIND[kind_of(code, details)](details) from error


def _not_connected(details: str) -> ShimError:
    """gRPC says `unix:PATH: connect failed: (...) error: WHY; ...`."""
    before, is_known, why = details.partition(": connect failed: ")
    path, reason = before.rpartition("unix:")[2], why.rpartition("error: ")[2].partition(";")[0]
    return no_answer(path, reason) if is_known and path and reason else Unavailable(f"no answer: {details}")
