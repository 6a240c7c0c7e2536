"""virtshim reads little of a guest's unrequested output on its agent's channel, the caller gets a clear error, and the
next VM is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.clock import FakeClock
from fakes.hostile import IN_A_SOCKET, HostileAgent, Script, answers, answers_byte_by_byte, in_step, polite, says

from virtshim.guest.agent_channel import AgentChannel
from virtshim.guest.agent_replies import BURST, MAX_LINE, room_for_answer
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.errors import DeadlineExceeded, ShimError, Unavailable

pytestmark = pytest.mark.hostile

_READ = 65536
_MUCH = 4 * BURST

Make = Callable[..., tuple[HostileAgent, AgentChannel]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def guest(tmp_path: Path, clock: FakeClock) -> Iterator[Make]:
    made: list[HostileAgent | AgentChannel] = []

    def make(*scripts: Script) -> tuple[HostileAgent, AgentChannel]:
        path = tmp_path / f"a{len(made)}"
        agent, channel = HostileAgent(path, *scripts), AgentChannel(str(path), clock.monotonic)
        made.extend((channel, agent))
        return agent, channel

    yield make
    for part in made:
        part.close()


def ask(channel: AgentChannel, command: str = "guest-ping", seconds: float = 60.0) -> object:
    return channel.ask(command, None, CancellableDeadline.after(seconds))


def endless(line: bytes) -> bytes:
    return line * (_MUCH // len(line))


FLOODS = {
    "a byte that is no reply, without end": endless(b"x"),
    "marks that begin an answer, without end": endless(b"\xff"),
    "answers to somebody else's requests, without end": endless(b'\xff{"return": 1}\n'),
    "empty lines after one mark, without end": b"\xff" + endless(b"\n"),
    "blanks after one mark, without end": b"\xff" + endless(b" \r\n"),
    "half an answer again and again": endless(b'\xff{"return'),
    "a line that never ends": b"\xff" + endless(b"a"),
    "random bytes": endless(bytes(range(256))),
    "JSON that is no answer": endless(b'\xff{"event": "hello"}\n'),
    "errors that nobody asked for": endless(b'\xff{"error": {"class": "GenericError", "desc": "no"}}\n'),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_is_read_only_briefly_while_virtshim_waits_for_the_agent(guest: Make, flood: bytes) -> None:
    agent, channel = guest(says(flood))
    with pytest.raises(Unavailable):
        ask(channel)
    assert agent.sent <= BURST + _READ + IN_A_SOCKET
    assert agent.connections == 1
    assert ask(guest(polite)[1]) == {}, "another VM is served"


def test_a_flooding_guest_is_not_read_until_its_allowance_returns(guest: Make, clock: FakeClock) -> None:
    agent, channel = guest(says(FLOODS["answers to somebody else's requests, without end"]), polite)
    with pytest.raises(Unavailable, match="keeps sending data"):
        ask(channel)
    for _ in range(20):
        with pytest.raises(DeadlineExceeded, match=r"floods the agent's channel .* restart its agent"):
            ask(channel, seconds=0.01)
    assert agent.connections == 1, "nobody looked"
    clock.advance(2.0)
    assert ask(channel) == {}


def test_ten_flooding_guests_take_at_most_ten_allowances(guest: Make, clock: FakeClock) -> None:
    made = [guest(says(FLOODS["JSON that is no answer"])) for _ in range(10)]
    for _, channel in made * 3:
        with pytest.raises(ShimError):
            ask(channel, seconds=0.2)
    assert sum(agent.sent for agent, _ in made) <= 10 * (BURST + _READ + IN_A_SOCKET)
    assert ask(guest(polite)[1]) == {}


NONSENSE = {
    "junk": b"\x00\x01\x02garbage\n",
    "half an object": b'{"return": {"pid"\n',
    "JSON that is not an object": b"[1, 2]\n",
    "an object that is neither answer nor error": b'{"neither": 1}\n',
    "an error that is a number": b'{"error": 5}\n',
    "two answers to one question": b'{"return": 1}\n{"return": 2}\n',
    "twenty answers to one question": b'{"return": {}}\n' * 20,
    "lists in lists in lists": b"[" * 15_000 + b"\n",
    "a number of 5000 digits": b'{"return": ' + b"9" * 5000 + b"}\n",
    "bytes that are not UTF-8": b'{"return": "\xc3\x28"}\n',
    "a ping's answer of 64 KiB": b'{"return": "' + b"a" * _READ + b'"}\n',
    "a ping's answer of a mebibyte": b'{"return": [' + b"[]," * (MAX_LINE // 3) + b"[]]}\n",
    "a line that never ends": endless(b"a"),
    "marks without end": endless(b"\xff"),
    "empty lines without end": endless(b"\n"),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_an_invalid_answer_fails_the_call_and_little_of_it_is_read(guest: Make, nonsense: bytes) -> None:
    agent, channel = guest(answers(nonsense), polite)
    with pytest.raises(Unavailable, match="connection to the guest agent broke"):
        ask(channel)
    assert agent.sent <= room_for_answer("guest-ping") + 2 * _READ + IN_A_SOCKET
    assert ask(channel) == {}, "the next question is asked on a new connection"
    assert agent.connections == 2
    assert ask(guest(polite)[1]) == {}, "another VM is served"


STRANGE = {
    "a negative number": (b'{"return": -1}\n', -1),
    "a number beyond 64 bits": (b'{"return": 99999999999999999999}\n', 99999999999999999999),
    "half a surrogate pair": (b'{"return": "\\ud800"}\n', "\ud800"),
    "text that runs right to left": ('{"return": "\u202eevil"}\n'.encode(), "\u202eevil"),
    "an escape sequence": (b'{"return": "\\u001b[2J"}\n', "\x1b[2J"),
    "a key that comes twice": (b'{"return": 1, "return": 2}\n', 2),
}


@pytest.mark.parametrize(("line", "value"), STRANGE.values(), ids=STRANGE)
def test_a_well_formed_answer_is_returned_unchanged(guest: Make, line: bytes, value: object) -> None:
    """The caller checks the meaning."""
    assert ask(guest(answers(line))[1]) == value


def test_an_error_with_escape_sequences_is_reported_as_plain_text(guest: Make) -> None:
    words = (
        b'{"error": {"class": "Generic\\u001b[2J", "desc": "\\u001b]0;owned\\u0007\\u202e' + b"a" * 10_000 + b'"}}\n'
    )
    with pytest.raises(ShimError) as told:
        ask(guest(answers(words))[1])
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 400


def test_an_answer_sent_byte_by_byte_is_cut_off_at_the_allowance(guest: Make) -> None:
    """Each read is work even if it returns a single byte."""
    agent, channel = guest(answers_byte_by_byte(b'{"return": "' + b"a" * 15_000 + b'"}\n'))
    with pytest.raises(Unavailable):
        ask(channel)
    assert agent.sent < 1000
    assert ask(guest(polite)[1]) == {}


def test_a_large_requested_answer_does_not_count_against_the_allowance(guest: Make) -> None:
    """A command's output, as the follower reads it in pieces."""
    piece = b'{"return": {"count": 131072, "buf-b64": "' + b"QUFB" * 43691 + b'", "eof": false}}\n'
    agent, channel = guest(answers(piece))
    for _ in range(50):
        ask(channel, "guest-file-read")
    assert agent.sent > 4 * BURST
    assert agent.connections == 1


def test_a_guest_that_hangs_up_during_its_answer_counts_as_gone(guest: Make) -> None:
    def half(agent: HostileAgent, connected: object) -> None:
        for request in agent.asked(connected):
            connected.sendall(in_step(request) or b'{"return')
            if not in_step(request):
                return

    with pytest.raises(Unavailable, match="ended"):
        ask(guest(half)[1])
