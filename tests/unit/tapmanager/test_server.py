"""tapmanager's socket answers every request of those who may ask, one at a time for each lock."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.journal import WAIT_LIMIT

from tapmanager import protocol, server, verbs
from tapmanager.errors import TapmanagerError
from tapmanager.fields import Json
from tapmanager.peer import Peer
from tapmanager.server import Answer

ME = os.geteuid()


class Running:
    """A server on a private socket with `perform` as its verbs."""

    def __init__(self, folder: Path, perform: server.Perform, limits: server.ServerLimits) -> None:
        self.path = str(folder / "s")
        self.server = server.Server(server.listen(self.path, os.getegid()), perform, ME, limits=limits)
        self.server.start()

    def call(self, verb: str, args: Json | None = None, timeout: float = 5.0) -> Json:
        answer, fds = protocol.call(self.path, verb, args or {}, timeout)
        protocol.close_all(fds)
        return answer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[object]:
    started: list[Running] = []

    def start(perform: server.Perform, **limits: float) -> Running:
        started.append(Running(tmp_path, perform, server.ServerLimits(**limits)))
        return started[-1]

    yield start
    for one in started:
        one.server.stop(5.0)


def echo(request: Json, peer: Peer, until: float) -> Answer:
    return Answer({"verb": request["verb"], "args": request["args"]})


def test_a_request_is_answered(run) -> None:
    assert run(echo).call("hello", {"a": [1]}) == {"verb": "hello", "args": {"a": [1]}}


def test_a_connection_serves_many_requests_with_their_numbers(run) -> None:
    running = run(echo)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.settimeout(WAIT_LIMIT)
        conn.connect(running.path)
        for number in (7, 8):
            protocol.send_frame(conn, protocol.request(number, "x", {}, 1.0))
            received = protocol.recv_frame(conn)
            assert received is not None
            assert received[0]["id"] == number


def test_the_servers_own_descriptors_are_closed_after_sending(run) -> None:
    running = run(lambda request, peer, until: Answer({}, [os.dup(0), os.dup(0)]))
    running.call("x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        running.call("x")
    assert len(os.listdir("/proc/self/fd")) <= before + 10, "40 would be there; the last connections may be closing"


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        (TapmanagerError("exhausted", "no room"), "exhausted", "no room"),
        (OSError(13, "denied"), "internal", "denied"),
        (RuntimeError("secret detail"), "internal", "tapmanager's log"),
    ],
)
def test_an_exception_becomes_an_error_answer(run, trouble: Exception, kind: str, words: str) -> None:
    def fail(request: Json, peer: Peer, until: float) -> Answer:
        raise trouble

    with pytest.raises(protocol.RemoteError, match=words) as caught:
        run(fail).call("x")
    assert caught.value.kind == kind
    assert "secret" not in str(caught.value)


def test_an_answer_too_long_for_a_frame_is_an_error_and_not_silence(run) -> None:
    with pytest.raises(protocol.RemoteError, match="longer than the limit"):
        run(lambda request, peer, until: Answer({"x": "a" * protocol.MAX_FRAME})).call("x")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "1", None])
def test_a_request_without_a_usable_time_limit_is_refused(run, timeout: object) -> None:
    running = run(echo)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.settimeout(WAIT_LIMIT)
        conn.connect(running.path)
        protocol.send_frame(conn, {"v": 1, "id": 1, "verb": "x", "timeout": timeout, "args": {}})
        received = protocol.recv_frame(conn)
    assert received is not None
    assert received[0]["error"] == {"kind": "invalid", "message": "timeout: must be a positive number of seconds"}


def test_garbage_gets_an_error_and_ends_the_connection(run) -> None:
    running = run(echo)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.settimeout(WAIT_LIMIT)
        conn.connect(running.path)
        conn.send(b"garbage")
        received = protocol.recv_frame(conn)
        assert received is not None
        assert "error" in received[0]
        assert protocol.recv_frame(conn) is None
    assert running.call("still there")["verb"] == "still there"


def test_a_silent_peer_blocks_nobody_and_is_dropped(run) -> None:
    running = run(echo, peer_seconds=0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.settimeout(WAIT_LIMIT)
        silent.connect(running.path)
        assert running.call("x")["verb"] == "x"
        assert silent.recv(1) == b""


def test_a_slow_request_blocks_no_other(run) -> None:
    go, entered = threading.Event(), threading.Event()

    def perform(request: Json, peer: Peer, until: float) -> Answer:
        if request["verb"] == "slow":
            entered.set()
            go.wait(WAIT_LIMIT)
        return Answer({"verb": request["verb"]})

    running = run(perform)
    slow = threading.Thread(target=running.call, args=("slow",))
    slow.start()
    assert entered.wait(WAIT_LIMIT)
    assert running.call("quick")["verb"] == "quick"
    go.set()
    slow.join()


def test_more_connections_than_the_limit_are_refused_with_a_reason(run) -> None:
    running = run(echo, of_root=3, of_process=3)
    held = []
    try:
        for _ in range(3):
            conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            held.append(conn)
            conn.settimeout(WAIT_LIMIT)
            conn.connect(running.path)
            protocol.send_frame(conn, protocol.request(1, "x", {}, 1.0))
            assert protocol.recv_frame(conn) is not None
        with pytest.raises((protocol.RemoteError, ConnectionError), match=r"open already|reset|Broken"):
            running.call("x")
    finally:
        for conn in held:
            conn.close()


def test_a_stop_waits_for_the_request_in_work(run) -> None:
    go, entered = threading.Event(), threading.Event()

    def perform(request: Json, peer: Peer, until: float) -> Answer:
        entered.set()
        go.wait(WAIT_LIMIT)
        return Answer({})

    running = run(perform)
    caller = threading.Thread(target=running.call, args=("x",))
    caller.start()
    assert entered.wait(WAIT_LIMIT)
    assert running.server.stop(0.05) is False
    go.set()
    caller.join()
    assert running.server.stop(WAIT_LIMIT) is True


def test_the_socket_is_for_root_and_the_qemu_group_only(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with server.listen(path, os.getegid()):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    umask = os.umask(0o22)
    os.umask(umask)
    assert umask != 0o117


def test_a_dead_processs_socket_is_replaced_but_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server.listen(str(path), os.getegid()).close()
    server.listen(str(path), os.getegid()).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(TapmanagerError, match="not a socket"):
        server.listen(str(path), os.getegid())
    assert path.read_text() == "precious"


def test_the_error_for_a_second_lock_holder_names_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    fd = server.lock_file(path)
    with pytest.raises(TapmanagerError, match=f"process {os.getpid()}"):
        server.lock_file(path)
    os.close(fd)
    os.close(server.lock_file(path))


# -- verbs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            {"verb": "run", "args": {}},
            "verb: 'run' is not one of attach, release, fetch, group, disarm, limit, ungroup, list, pod, lost, status, driver, ",
        ),
        ({"verb": ["list"], "args": {}}, "verb:"),
        ({"verb": "list"}, "args: must be an object"),
        ({"verb": "list", "args": {"x": 1}}, "args.x: unknown field"),
        ({"verb": "release", "args": {}}, "args.sandbox"),
        ({"verb": "release", "args": {"sandbox": "../../etc"}}, "args.sandbox: not a sandbox id"),
        ({"verb": "fetch", "args": {"sandbox": "a" * 64}}, "args.key"),
        ({"verb": "attach", "args": {"sandbox": "a" * 64}}, "args.pod"),
        ({"verb": "attach", "args": {"sandbox": "a" * 64, "pod": {"namespace": "n", "name": "p"}}}, "args.pod.uid"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(request_: Json, words: str) -> None:
    with pytest.raises(TapmanagerError) as caught:
        verbs.perform(None, request_, Peer(0, 1), 0.0)  # type: ignore[arg-type]
    assert caught.value.kind == "invalid"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "verb",
    ["attach", "release", "group", "limit", "ungroup", "list", "pod", "status", "counters", "driver", "bind", "reset"],
)
def test_every_verb_except_fetch_is_for_root_only(verb: str) -> None:
    with pytest.raises(TapmanagerError) as caught:
        verbs.perform(None, {"verb": verb, "args": {}}, Peer(ME or 1, 1), 0.0)  # type: ignore[arg-type]
    assert caught.value.kind == "permission"


def test_a_request_abandoned_before_it_began_is_not_carried_out(tmp_path: Path) -> None:
    """Its asker may have asked for the opposite since."""
    asked: list[str] = []

    def note(request: Json, peer: Peer, until: float) -> Answer:
        asked.append(str(request["verb"]))
        return Answer({})

    path = str(tmp_path / "s")
    late = server.Server(server.listen(path, os.getegid()), note, ME)
    with pytest.raises(TimeoutError):
        protocol.call(path, "attach", {}, 0.01)
    late.start()
    protocol.call(path, "release", {}, 5.0)
    assert late.stop(5.0)
    assert asked == ["release"]
