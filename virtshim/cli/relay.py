"""Joins this program's own input and output to a stream of the node, until that ends or the user detaches."""

from __future__ import annotations

import json
import os
import select
from contextlib import nullcontext
from typing import Final

from virtshim.cli import terminal
from virtshim.domain.errors import InternalError, Unavailable
from virtshim.streaming.client import ERROR, RESIZE, STDERR, STDIN, STDOUT, StreamClient
from virtshim.streaming.remotecommand.status import Exited, Failed, Outcome, from_status

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_READ: Final = 32 << 10
_OUT: Final = {STDOUT: _OUTPUT, STDERR: _ERRORS}

DETACH: Final = b"\x1d"  # ctrl-]


class Detached(Exception):
    """The user typed ctrl-]."""


def relay(client: StreamClient, *, stdin: bool, is_terminal: bool, detachable: bool = False) -> int:
    """The exit code. Raises ShimError for a session that failed, Detached, BrokenPipeError if nobody reads our output.
    `is_terminal`: the other side is one, and learns the size of ours."""
    with terminal.resizes() as resized, terminal.raw(_INPUT) if is_terminal and stdin else nullcontext():
        if is_terminal:
            _send_size(client)
        wanted, status = stdin, bytearray(_received(client))  # some may have come with the handshake's answer
        while not client.is_closed:
            # Input waits until what came before has left: output is read meanwhile, so that neither side stops the other.
            reading = [client.fileno(), resized, *([_INPUT] if wanted and not client.pending else [])]
            readable, writable, _ = select.select(reading, [client.fileno()] if client.pending else [], [])
            if writable:
                client.flush()
            if resized in readable:
                os.read(resized, _READ)
                if is_terminal:
                    _send_size(client)
            if _INPUT in readable:
                wanted = _send_input(client, os.read(_INPUT, _READ), detachable=detachable)
            if client.fileno() in readable:
                status += _received(client)
    if not status:
        raise Unavailable("the node closed the stream before its end; was virtshim stopped?")
    return _code(from_status(bytes(status)))


def _send_input(client: StreamClient, data: bytes, *, detachable: bool) -> bool:
    """False at the end of input."""
    if not data:
        if not detachable:  # who has keys to leave has not left
            client.close_channel(STDIN)
        return False
    before, detach, _ = data.partition(DETACH) if detachable else (data, b"", b"")
    if before:
        client.send(STDIN, before)
    if detach:
        raise Detached
    return True


def _received(client: StreamClient) -> bytes:
    """Output goes where it belongs; what came of the session's end is returned."""
    status = b""
    for piece in client.receive():
        if piece.channel == ERROR:
            status += piece.data
        elif piece.channel in _OUT:
            _write(_OUT[piece.channel], piece.data)
    return status


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # it does not block for somebody who has it, too
            select.select([], [fd], [])


def _send_size(client: StreamClient) -> None:
    if size := terminal.size(_INPUT):
        client.send(RESIZE, json.dumps({"Width": size[0], "Height": size[1]}).encode())


def _code(outcome: Outcome) -> int:
    match outcome:
        case Exited(code):
            return code
        case Failed(message):
            raise InternalError(message)
