"""A guest's output on the ports of a command does no harm if it is too much, too little, malformed, or after the
end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from fakes.hostile import IN_A_SOCKET, HostileVm, record, silent

from virtshim.guest.agents import OUTPUT_LIMIT, AgentClients
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.guest.command_output import MAX_AFTER_END
from virtshim.model.errors import DeadlineExceeded, InternalError, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Ended, Output, Streams, StreamSession
from virtshim.system.rate_limits import ReadPace

pytestmark = pytest.mark.hostile

HOSTILE, OTHER = ContainerId("a" * 64), ContainerId("b" * 64)
TRUE = GuestCommand(("true",))

Talk = Callable[[bytes], Iterable[bytes | None]]


@pytest.fixture
def layout(short_path: Path) -> Layout:
    return Layout(state_dir=f"{short_path}/state", run_dir=str(short_path))


@pytest.fixture
def vm(layout: Layout) -> Iterator[Callable[[ContainerId], HostileVm]]:
    made: list[HostileVm] = []

    def make(container: ContainerId) -> HostileVm:
        directory = Path(layout.socket_dir(container))
        directory.mkdir(parents=True)
        made.append(HostileVm(directory))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def clients(layout: Layout) -> Iterator[AgentClients]:
    def no_more(container: ContainerId, number: int) -> None:
        raise InternalError("no free slot")

    clients = AgentClients(layout, no_more)
    yield clients
    clients.close()


def taken_of(vm: HostileVm) -> int:
    """The bytes read from all ports; some of them may still be in a socket."""
    return sum(port.sent for port in vm.ports.values())


def run(clients: AgentClients, container: ContainerId = HOSTILE, seconds: float = 30.0) -> CommandResult:
    return clients.run(container, TRUE, seconds, threading.Event())


def honest(token: bytes) -> list[bytes]:
    return [record(token, b"start") + b"fine" + record(token, b"exit 0") + record(token, b"end")]


def becomes_honest(vm: HostileVm) -> None:
    vm.out, vm.err, vm.ends = honest, silent, True


def begun(*words: bytes) -> Talk:
    return lambda token: [record(token, b"start"), *words]


def records(*words: bytes) -> Talk:
    return lambda token: [record(token, b"start"), *(record(token, word) for word in words)]


BROKEN: dict[str, Talk] = {
    "data without end before the start": lambda token: [b"x" * 65536] * 1000,
    "records without end": lambda token: [record(token, b"start")] + [record(token, b"hello")] * 100_000,
    "starts without end": lambda token: [record(token, b"start") * 1000] * 1000,
    "a record that never ends": lambda token: [record(token, b"start"), b"\1" + token + b" ", b"x" * 100_000],
    "a record without a word": records(b""),
    "a record in capitals": records(b"EXIT 0"),
    "an exit code of 256": records(b"exit 256"),
    "an exit code of 99999999999999999999": records(b"exit 99999999999999999999"),
    "a negative exit code": records(b"exit -1"),
    "an exit code in Arabic digits": records("exit ٣".encode()),
    "an exit code that is a word": records(b"exit zero"),
    "no exit code at all": records(b"exit"),
    "data without end after the end": lambda token: [
        record(token, b"start") + record(token, b"end"),
        *[b"x" * 65536] * 1000,
    ],
}  # fmt: skip


@pytest.mark.parametrize("talk", BROKEN.values(), ids=BROKEN)
def test_a_malformed_command_stream_ends_with_an_error_and_little_of_it_is_read(
    vm: Callable[[ContainerId], HostileVm], clients: AgentClients, talk: Talk
) -> None:
    hostile = vm(HOSTILE)
    hostile.out = talk
    with pytest.raises(InternalError, match="breaks the exec protocol"):
        run(clients)
    assert taken_of(hostile) <= (6 << 20) + MAX_AFTER_END + IN_A_SOCKET
    becomes_honest(vm(OTHER))
    assert run(clients, OTHER) == CommandResult(0, b"fine", b""), "another VM is served"


LIES: dict[str, tuple[Talk, type[ShimError]]] = {
    "hangs up before the start": (lambda token: [None], Unavailable),
    "hangs up in the middle of a record": (lambda token: [b"\1" + token, None], Unavailable),
    "hangs up after the exit": (lambda token: [record(token, b"start") + record(token, b"exit 0"), None], Unavailable),
    "cannot start, and says so in escape sequences": (records(b"fail directory \x1b[2J/tmp"), ShimError),
    "cannot start, for a reason of a kilobyte": (records(b"fail directory " + b"/" * 1000), ShimError),
    "cannot start, for a reason that there is not": (records(b"fail because"), InternalError),
    "uses the token of another session": (lambda token: [record(b"0" * 32, b"start") * 3], DeadlineExceeded),
    "says nothing": (lambda token: [], DeadlineExceeded),
    "goes silent after the start": (records(), DeadlineExceeded),
}


@pytest.mark.parametrize(("talk", "error"), LIES.values(), ids=LIES)
def test_a_guest_that_lies_about_a_command_harms_that_command_only(
    vm: Callable[[ContainerId], HostileVm], clients: AgentClients, talk: Talk, error: type[ShimError]
) -> None:
    vm(HOSTILE).out = talk
    with pytest.raises(error) as told:
        run(clients, seconds=0.6 if error is DeadlineExceeded else 30.0)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 600
    becomes_honest(vm(OTHER))
    assert run(clients, OTHER) == CommandResult(0, b"fine", b"")


def test_output_beyond_the_limit_is_not_kept(vm: Callable[[ContainerId], HostileVm], clients: AgentClients) -> None:
    hostile = vm(HOSTILE)
    much = b"x" * (1 << 20)
    hostile.ends = True
    hostile.out = lambda token: [
        record(token, b"start"), *[much] * (2 * OUTPUT_LIMIT // len(much)), record(token, b"exit 3"), record(token, b"end"),
    ]  # fmt: skip
    assert run(clients) == CommandResult(3, b"x" * OUTPUT_LIMIT, b"")


def test_output_sent_byte_by_byte_is_read_in_batches(
    vm: Callable[[ContainerId], HostileVm], clients: AgentClients
) -> None:
    """The reader pauses after the first thousand pieces."""
    waited: list[float] = []

    class Cancelled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    hostile = vm(HOSTILE)
    hostile.speaks_byte_by_byte()
    hostile.ends = True
    hostile.out = lambda token: [
        record(token, b"start"), b"x" * 1800, record(token, b"exit 0"), record(token, b"end"),
    ]  # fmt: skip
    assert clients.run(HOSTILE, TRUE, 60.0, Cancelled()).stdout == b"x" * 1800
    assert len(waited) > 500


def test_both_streams_may_be_malformed_at_once(vm: Callable[[ContainerId], HostileVm], clients: AgentClients) -> None:
    hostile = vm(HOSTILE)
    hostile.out = hostile.err = BROKEN["records without end"]
    with pytest.raises(InternalError, match="keeps sending records"):
        run(clients)
    becomes_honest(hostile)
    assert run(clients).stdout == b"fine", "its ports are free again"


# --- sessions of users


async def all_of(session: StreamSession) -> tuple[bytes, int]:
    seen = b""
    while True:
        match await session.read():
            case Output(_, data):
                seen += data
            case Ended(code):
                return seen, code


@pytest.mark.parametrize("talk", BROKEN.values(), ids=BROKEN)
def test_a_session_with_a_malformed_stream_is_broken_off_and_other_vms_are_served(
    vm: Callable[[ContainerId], HostileVm], clients: AgentClients, talk: Talk
) -> None:
    vm(HOSTILE).out = talk
    becomes_honest(vm(OTHER))

    async def test() -> None:
        session = await clients.open(HOSTILE, TRUE, Streams(stdout=True, stderr=True))
        with pytest.raises(InternalError, match="breaks the exec protocol"):
            await all_of(session)
        await session.close()
        other = await clients.open(OTHER, TRUE, Streams(stdout=True, stderr=True))
        assert await all_of(other) == (b"fine", 0)
        await other.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_session_output_sent_byte_by_byte_is_read_at_a_limited_rate(
    vm: Callable[[ContainerId], HostileVm], clients: AgentClients
) -> None:
    """All sessions share one loop. A thousand reads are unlimited."""
    hostile = vm(HOSTILE)
    hostile.speaks_byte_by_byte()
    hostile.ends = True
    hostile.out = lambda token: [
        record(token, b"start"), b"x" * 1150, record(token, b"exit 0"), record(token, b"end"),
    ]  # fmt: skip

    async def test() -> float:
        loop = asyncio.get_running_loop()
        session = await clients.open(HOSTILE, TRUE, Streams(stdout=True, stderr=True))
        began = loop.time()
        assert await all_of(session) == (b"x" * 1150, 0)
        took = loop.time() - began
        await session.close()
        return took

    assert asyncio.run(asyncio.wait_for(test(), 60)) > 0.9, "two hundred reads a second"


def test_a_guest_that_only_answers_input_is_never_rate_limited() -> None:
    """A chatty protocol through a session: a question, a few bytes of answer, the next question."""
    pace = ReadPace(0.0)
    for _ in range(100_000):
        pace.spoken_to(0.0)
        assert pace.pause_after(10, 0.0) == 0.0
