"""The connection to an agent survives agents that are late, silent, confused or hostile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.guest import Listener
from fakes.waiting import eventually

from virtshim.guest.agent_channel import AgentChannel, AgentRefused, VmEnded, whole_number
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, ShimError, Unavailable, WrongState

Script = Callable[[socket.socket, list[dict]], None]


class ScriptedAgent(Listener):
    """Each connection is handed to `script`, with the list of the requests so far."""

    def __init__(self, path: Path, script: Script) -> None:
        self.requests: list[dict] = []
        self.connections = 0
        self._script = script
        super().__init__(path)

    def client(self, connected: socket.socket) -> None:
        self.connections += 1
        self._script(connected, self.requests)


def requests_of(connected: socket.socket, seen: list[dict]) -> Iterator[dict]:
    for line in connected.makefile("rb"):
        request = json.loads(line.lstrip(b"\xff"))
        seen.append(request)
        yield request


def sync(request: dict) -> bytes:
    return b"\xff" + json.dumps({"return": request["arguments"]["id"]}).encode() + b"\n"


def is_sync(request: dict) -> bool:
    return request["execute"] == "guest-sync-delimited"


@pytest.fixture
def agent(tmp_path) -> Iterator[Callable[[Script], tuple[ScriptedAgent, AgentChannel]]]:
    made: list[ScriptedAgent | AgentChannel] = []

    def make(script: Script, **limits: float) -> tuple[ScriptedAgent, AgentChannel]:
        path = tmp_path / f"a{len(made)}"
        agent, channel = ScriptedAgent(path, script), AgentChannel(str(path), **limits)
        made.extend((channel, agent))
        return agent, channel

    yield make
    for part in made:
        part.close()


def answering(with_bytes: bytes) -> Script:
    def script(connected: socket.socket, seen: list[dict]) -> None:
        for request in requests_of(connected, seen):
            connected.sendall(sync(request) if is_sync(request) else with_bytes)

    return script


def ask(channel: AgentChannel, seconds: float = 5.0, cancelled: threading.Event | None = None) -> object:
    return channel.ask("guest-ping", None, CancellableDeadline.after(seconds, cancelled))


def test_a_connection_that_was_made_before_the_guest_ran_is_the_one_that_is_used(agent):
    there, channel = agent(answering(b'{"return": {}}\n'))
    channel.connect()
    eventually(lambda: there.connections == 1)
    assert there.requests == []  # nobody hears them yet
    channel.connect()
    assert ask(channel) == {}
    assert there.connections == 1


def test_a_connection_that_cannot_be_made_before_the_guest_runs_is_made_later(tmp_path):
    channel = AgentChannel(str(tmp_path / "agent"))
    channel.connect()
    there = ScriptedAgent(tmp_path / "agent", answering(b'{"return": {}}\n'))
    assert ask(channel) == {}
    channel.close()
    there.close()


def test_a_connection_that_nobody_used_is_closed(agent):
    closed = threading.Event()

    def until_closed(connected: socket.socket, _seen: list[dict]) -> None:
        assert connected.recv(1) == b""
        closed.set()

    _there, channel = agent(until_closed)
    channel.connect()
    channel.close()
    assert closed.wait(5)


def test_one_sync_serves_many_commands(agent):
    there, channel = agent(answering(b'{"return": {}}\n'))
    assert [ask(channel) for _ in range(3)] == [{}, {}, {}]
    assert [request["execute"] for request in there.requests] == ["guest-sync-delimited", *["guest-ping"] * 3]


def test_leftovers_of_an_earlier_exchange_are_not_taken_for_the_answer(agent):
    def script(connected, seen):
        connected.sendall(b'{"return": "to somebody else"}\n\xff{"return": 5}\n')
        answering(b'{"return": "ours"}\n')(connected, seen)

    assert ask(agent(script)[1]) == "ours"


def test_an_agent_that_does_not_come_up_is_waited_for_no_longer_than_the_caller_likes(agent):
    def silent(connected, seen):
        for _ in requests_of(connected, seen):
            pass

    _, channel = agent(silent)
    with pytest.raises(DeadlineExceeded, match="install the package qemu-guest-agent"):
        ask(channel, 0.2)


def test_a_guest_that_is_slow_to_read_is_waited_for(agent):
    """What it is asked meanwhile fills the socket: QEMU reads nothing before the guest has opened the port."""
    over = threading.Event()
    _, channel = agent(lambda _connected, _seen: over.wait(60), sync_again=0.0)
    patience = CancellableDeadline(time.monotonic() + 4.0, tick=0.001)
    try:
        with pytest.raises(DeadlineExceeded, match="install the package qemu-guest-agent"):
            channel.ask("guest-ping", None, patience)
    finally:
        over.set()


def test_a_caller_that_gives_up_returns_at_once(agent):
    def silent(connected, seen):
        for _ in requests_of(connected, seen):
            cancelled.set()

    cancelled = threading.Event()
    with pytest.raises(Aborted):
        ask(agent(silent)[1], 30, cancelled)


def test_waiting_for_a_turn_ends_at_the_callers_deadline(agent):
    def silent(connected, seen):
        for _ in requests_of(connected, seen):
            waiting.set()

    waiting, leave = threading.Event(), threading.Event()
    _, channel = agent(silent)
    first = Background(lambda: ask(channel, 30, leave))
    assert waiting.wait(10)
    with pytest.raises(DeadlineExceeded):
        ask(channel, 0.1)
    leave.set()
    with pytest.raises(Aborted):
        first.done()


def test_a_command_on_a_synchronised_connection_is_not_sent_twice(agent):
    """Whether it was carried out is not known."""

    def ports_not_taken_up(connected, seen):
        for request in requests_of(connected, seen):
            if is_sync(request):
                connected.sendall(sync(request))

    there, channel = agent(ports_not_taken_up)
    with pytest.raises(DeadlineExceeded, match="guest-ping"):
        ask(channel, 0.3)
    assert [request["execute"] for request in there.requests].count("guest-ping") == 1


@pytest.mark.parametrize(
    "answer",
    [b"garbage\n", b'{"return": 1}\n{"return": 2}\n', b'{"neither": 1}\n', b"[" * 70_000 + b"\n", b"\x00\x01\x02\n"],
)
def test_an_agent_that_answers_nonsense_is_disconnected_and_asked_again(agent, answer):
    there, channel = agent(answering(answer))
    for _ in range(2):
        with pytest.raises(Unavailable, match="connection to the guest agent broke"):
            ask(channel)
    assert there.connections == 2


def test_endless_output_is_cut_off(agent):
    def flood(connected, seen):
        for request in requests_of(connected, seen):
            if is_sync(request):
                connected.sendall(sync(request))
            else:
                while True:
                    connected.sendall(b"x" * 65536)

    with pytest.raises(Unavailable, match="bytes"):
        ask(agent(flood)[1])


def test_an_error_of_the_agent_keeps_the_connection(agent):
    there, channel = agent(answering(b'{"error": {"class": "GenericError", "desc": "no such file"}}\n'))
    for _ in range(2):
        with pytest.raises(AgentRefused, match="no such file"):
            ask(channel)
    assert there.connections == 1


def test_a_forbidden_command_is_reported_with_the_remedy(agent):
    words = b"The command guest-ping has been disabled for this instance"
    _, channel = agent(answering(b'{"error": {"class": "CommandNotFound", "desc": "' + words + b'"}}\n'))
    with pytest.raises(WrongState, match="allow it in the guest"):
        ask(channel)


def test_the_end_of_the_vm_is_reported_at_once(agent):
    def ends(connected, seen):
        for request in requests_of(connected, seen):
            if is_sync(request):
                connected.sendall(sync(request))
            else:
                return

    with pytest.raises(VmEnded):
        ask(agent(ends)[1], 3000)


def test_a_missing_vm_is_reported_at_once(tmp_path):
    with pytest.raises(VmEnded):
        ask(AgentChannel(str(tmp_path / "none")), 3000)


def test_closing_wakes_waiting_callers(agent):
    def silent(connected, seen):
        for request in requests_of(connected, seen):
            if is_sync(request):
                connected.sendall(sync(request))
            else:
                asked.set()

    asked = threading.Event()
    _, channel = agent(silent)
    waiting = Background(lambda: ask(channel, 30))
    assert asked.wait(10)
    channel.close()
    with pytest.raises(ShimError):
        waiting.done()


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "7", 1 << 40, {}])
def test_an_invalid_number_is_refused(value):
    with pytest.raises(InternalError):
        whole_number(value, "process id")
