"""After any conversation, cut, oversized or with a flood of descriptors, the server answers as before and has no
descriptor more."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapmanager import protocol, server
from tapmanager.fields import Json
from tapmanager.peer import Peer
from tapmanager.server import Answer

_LIMIT = 60.0


def echo(request: Json, _peer: Peer, _until: float) -> Answer:
    return Answer({"args": request["args"]}, [os.dup(0)])


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="vsf-") as folder:
        socket_path = str(Path(folder) / "s")
        running = server.Server(server.listen(socket_path, os.getegid()), echo, os.geteuid())
        running.start()
        yield socket_path
        assert running.is_alive()
        assert running.stop(_LIMIT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
FRAMES = st.one_of(
    st.binary(max_size=300),
    JSON.map(lambda body: json.dumps(body).encode()),
    st.fixed_dictionaries(
        {"v": st.just(1)}, optional={"id": JSON, "verb": JSON, "timeout": JSON, "args": JSON, "more": JSON}
    ).map(lambda body: json.dumps(body).encode()),
    st.just(b"[" * 100_000),
    st.just(b'{"v": 1, "args": "' + b"x" * protocol.MAX_FRAME + b'"}'),
    st.builds(lambda n: json.dumps(protocol.request(n, "x", {}, 1.0)).encode(), st.integers(0, 9)),
)
# What is sent, with how many descriptors, and whether the answer is read.
STEPS = st.lists(st.tuples(FRAMES, st.sampled_from([0, 0, 0, 1, 64, 65, 253]), st.booleans()), max_size=5)


def talk(path: str, steps: list[tuple[bytes, int, bool]]) -> None:
    """Whatever the server makes of it; it may hang up at any time, and so does this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn, contextlib.suppress(OSError):
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        conn.settimeout(_LIMIT)
        conn.connect(path)
        for data, descriptors, reads in steps:
            rights: list[Any] = []
            if descriptors:
                packed = struct.pack(f"{descriptors}i", *[0] * descriptors)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
            conn.sendmsg([data], rights)
            if reads:
                with contextlib.suppress(protocol.FrameError):
                    received = protocol.recv_frame(conn)
                    if received is None:
                        return
                    body, fds = received
                    protocol.close_all(fds)
                    assert ("ok" in body) != ("error" in body)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(conversations=st.lists(STEPS, min_size=1, max_size=3))
def test_no_conversation_affects_the_next_one(path: str, conversations: list[list[tuple[bytes, int, bool]]]) -> None:
    for steps in conversations:
        talk(path, steps)
    answer, fds = protocol.call(path, "x", {"a": 1}, _LIMIT)
    protocol.close_all(fds)
    assert answer == {"args": {"a": 1}}


def test_floods_of_descriptors_leave_none_open(path: str) -> None:
    _, fds = protocol.call(path, "x", {}, _LIMIT)
    protocol.close_all(fds)
    before = open_descriptors()
    valid = json.dumps(protocol.request(1, "x", {}, 1.0)).encode()
    for count in (1, 64, 65, 253):
        for _ in range(10):
            talk(path, [(valid, count, True), (b"junk", count, False)])
    for _ in range(600):  # the server's ends are closed by its threads
        if open_descriptors() <= before:
            break
        _, fds = protocol.call(path, "x", {}, _LIMIT)
        protocol.close_all(fds)
    assert open_descriptors() <= before
