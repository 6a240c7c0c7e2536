"""The wire protocol between tapmanager and its callers (virtshim, vmwrapper): frames, without the meaning of requests.

A frame is one SOCK_SEQPACKET message: a UTF-8 JSON object, with file descriptors beside it (SCM_RIGHTS). The kernel keeps
message boundaries, so a frame arrives whole or not at all.

    request   {"v": 1, "id": 7, "verb": "fetch", "timeout": 10.0, "args": {...}}
    answer    {"v": 1, "id": 7, "ok": {...}}                              descriptors only here
    error     {"v": 1, "id": 7, "error": {"kind": "not-found", "message": "..."}}

`timeout`: seconds that the other side may work on the request. An error's kind is one of `KINDS`, and its message is for people.

vmwrapper must start within about ten milliseconds. Therefore this module imports only five modules, uses only those parts of
`json` and `socket` that vmwrapper/json_core.py and vmwrapper/socket_core.py provide, and needs no dataclasses or typing at
run time.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

VERSION = 1

# The kernel's default for a send buffer is 208 KiB (net.core.wmem_default); a longer SEQPACKET message fails with EMSGSIZE.
MAX_FRAME = 192 * 1024
# The kernel's limit is 253 descriptors per message (SCM_MAX_FD). A VM has at most ten NICs, each with at most eight queues of two
# descriptors.
MAX_FDS = 160
_FD_BYTES = struct.calcsize("i")

# The values of virtshim.model.errors.Kind that tapmanager uses; a test compares the two.
KINDS = frozenset(
    {
        "invalid", "not-found", "already-exists", "failed-precondition", "deadline", "unavailable", "exhausted", "permission",
        "unimplemented", "aborted", "internal",
    }
)  # fmt: skip


class FrameError(Exception):
    """A received message is not a frame of this protocol, or a message to send does not fit into a frame."""


class RemoteError(Exception):
    """The other side's error answer. `kind` is one of KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def request(number: int, verb: str, args: Mapping[str, object], timeout: float) -> dict[str, object]:
    """The body of a request. `timeout`: seconds that the other side may take."""
    return {"v": VERSION, "id": number, "verb": verb, "timeout": timeout, "args": args}


def answer(number: int, ok: Mapping[str, object]) -> dict[str, object]:
    return {"v": VERSION, "id": number, "ok": ok}


def error(number: int, kind: str, message: str) -> dict[str, object]:
    return {"v": VERSION, "id": number, "error": {"kind": kind, "message": message}}


def encode(body: Mapping[str, object]) -> bytes:
    """Raises FrameError for a body longer than MAX_FRAME."""
    data = json.dumps(body, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME:
        raise FrameError(f"a frame of {len(data)} bytes is longer than the limit of {MAX_FRAME}")
    return data


def decode(data: bytes) -> dict[str, object]:
    """Raises FrameError for anything but a JSON object of this protocol version."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise FrameError(f"a frame is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise FrameError("a frame is not a JSON object")
    if body.get("v") != VERSION:
        raise FrameError(
            f"a frame of protocol version {body.get('v')!r}, this side speaks {VERSION}; restart the older program"
        )
    return body


def send_frame(sock: socket.socket, body: Mapping[str, object], fds: Sequence[int] = ()) -> None:
    """The receiver gets duplicates of the descriptors, so the caller still owns its own. Raises FrameError, and OSError including
    TimeoutError."""
    if len(fds) > MAX_FDS:
        raise FrameError(f"{len(fds)} descriptors in one frame exceed the limit of {MAX_FDS}")
    data = encode(body)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    sock.sendmsg([data], rights)


def recv_frame(sock: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """The next frame and its descriptors (close-on-exec, owned by the caller); None at end of file.

    If a frame is truncated or is not of this protocol, its descriptors are closed and FrameError is raised.
    """
    # Not socket.recv_fds: it ignores its flags argument, so descriptors would be inheritable (CPython gh-107898).
    room = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(MAX_FRAME, room, socket.MSG_CMSG_CLOEXEC)
    fds = _rights(ancillary)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise FrameError("a frame or its descriptors were truncated")  # noqa: TRY301  one place closes the descriptors
        if not data:
            close_all(fds)
            return None
        return decode(data), fds
    except FrameError:
        close_all(fds)
        raise


def _rights(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack_from(f"{len(data) // _FD_BYTES}i", data)
    return fds


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _work_time(timeout: float) -> float:
    """The part of the caller's `timeout` (seconds) that the other side may use. The rest is for its clean-up and answer, so that
    the caller learns the cause and not only that time ran out."""
    return timeout - min(2.0, timeout / 5)


def call(
    path: str,
    verb: str,
    args: Mapping[str, object],
    timeout: float,
    patience: float = 0.0,
    when_over: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[dict[str, object], list[int]]:
    """Sends one request on its own connection. Returns the answer's `ok` object and the descriptors, which the caller owns.

    `timeout`: seconds for the whole exchange. If there is no answer after `patience` seconds, `when_over` is called once; an
    exception that it raises ends the call. `meanwhile` is called once the request is sent. Raises RemoteError (the other side's
    error), FrameError, TimeoutError, ConnectionError or another OSError."""
    until = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(max(timeout, 0.001))
        sock.connect(path)
        send_frame(sock, request(1, verb, args, _work_time(timeout)))
        if meanwhile is not None:
            meanwhile()
        if when_over is not None and not _is_answered(sock, patience):
            when_over()
        sock.settimeout(max(until - time.monotonic(), 0.001))
        received = recv_frame(sock)
    if received is None:
        raise ConnectionResetError("the other side closed the connection without an answer")
    return _opened(*received)


def _is_answered(sock: socket.socket, within: float) -> bool:
    sock.settimeout(within)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    return True


def _opened(body: dict[str, object], fds: list[int]) -> tuple[dict[str, object], list[int]]:
    ok = body.get("ok")
    if isinstance(ok, dict):
        return ok, fds
    close_all(fds)
    trouble = body.get("error")
    if not isinstance(trouble, dict):
        raise FrameError("an answer with neither ok nor error")
    kind = trouble.get("kind")
    raise RemoteError(kind if kind in KINDS else "internal", str(trouble.get("message")))
