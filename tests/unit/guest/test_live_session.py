"""The streams of a command are read and written while it runs, as `kubectl exec` does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from leaks import runs
from podclient import wait_until

from virtshim.guest.command import GuestCommand
from virtshim.guest.wait import ExecLimits
from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Ended, Output, OutStream, Streams, StreamSession

CONTAINER = ContainerId("c" * 64)
ENV = (("PATH", b"/usr/sbin:/usr/bin:/sbin:/bin"), ("TERM", b"xterm"))
PLAIN = Streams(stdin=True, stdout=True, stderr=True)
TERMINAL = Streams(stdin=True, stdout=True, tty=True)


async def everything(session: StreamSession) -> tuple[int, bytes, bytes]:
    out = dict.fromkeys(OutStream, b"")
    while isinstance(item := await session.read(), Output):
        assert item.data
        assert len(item.data) <= 65536
        out[item.stream] += item.data
    return item.code, out[OutStream.STDOUT], out[OutStream.STDERR]


async def until(session: StreamSession, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        item = await session.read()
        assert isinstance(item, Output), seen
        seen += item.data
    return seen


@pytest.fixture
def talk(clients) -> Callable[..., None]:
    """Runs a command with a client that is a coroutine of the session; the session is closed afterwards."""

    def run(script: str, client: Callable[[StreamSession], Awaitable[None]], streams: Streams = PLAIN) -> None:
        async def whole() -> None:
            command = GuestCommand(("sh", "-c", script), ENV)
            session = await clients.open(CONTAINER, command, streams)
            try:
                async with asyncio.timeout(20):
                    await client(session)
            finally:
                await session.close()

        asyncio.run(whole())

    return run


def test_output_comes_while_the_command_runs(talk, make_guest):
    async def client(session):
        assert b"first" in await until(session, b"first")
        await session.write_stdin(b"go\n")
        assert await everything(session) == (5, b"got go\n", b"")

    make_guest()
    talk("echo first; read word; echo got $word; exit 5", client)


@pytest.mark.parametrize("data", [os.urandom(2_000_000), b"\1" * 2_000_000], ids=["random", "beginnings-of-records"])
def test_large_input_and_output_pass_unchanged_and_the_end_of_input_arrives(talk, make_guest, data):

    async def client(session):
        async def feed():
            await session.write_stdin(data)
            await session.close_stdin()
            await session.close_stdin()

        feeding = asyncio.create_task(feed())
        code, out, err = await everything(session)
        await feeding
        assert (code, out, err) == (0, data, b"")

    make_guest()
    talk("cat", client)


def test_the_streams_are_separate(talk, make_guest):
    async def client(session):
        await session.close_stdin()
        assert await everything(session) == (3, b"out\n", b"err\n")

    make_guest()
    talk("cat; echo out; echo err >&2; exit 3", client)


def test_input_that_is_no_longer_read_is_dropped(talk, make_guest):
    async def client(session):
        writing = asyncio.create_task(session.write_stdin(os.urandom(3_000_000)))
        code, out, _ = await everything(session)
        await writing
        assert (code, len(out)) == (0, 5)

    make_guest()
    talk("head -c 5", client)


def test_a_terminal_has_a_size_that_follows_the_clients(talk, make_guest):
    async def client(session):
        await session.resize(133, 44)
        await until(session, b"prompt")
        while b"44 133" not in await asked_for_size(session):
            pass
        await session.resize(90, 20)
        while b"20 90" not in await asked_for_size(session):
            pass
        await session.resize(0, 1 << 40)  # of no terminal
        await session.write_stdin(b"exit\n")
        code, _, err = await everything(session)
        assert (code, err) == (9, b"")

    async def asked_for_size(session):
        await session.write_stdin(b"size\n")
        return await until(session, b"asked")

    make_guest()
    script = "test -t 0 && test -t 1 && test -t 2 || exit 1; echo prompt; "
    script += "while read word; do case $word in size) stty size; echo asked;; exit) exit 9;; esac; done"
    talk(script, client, TERMINAL)


def test_a_control_character_reaches_the_command(talk, make_guest):
    async def client(session):
        await until(session, b"ready")
        await session.write_stdin(b"\3")
        code, out, _ = await everything(session)
        assert code == 42
        assert b"interrupted" in out

    make_guest()
    talk("trap 'echo interrupted; exit 42' INT; echo ready; while :; do sleep 0.05; done", client, TERMINAL)


def test_a_client_that_leaves_ends_the_command(talk, make_guest, tmp_path):
    async def client(session):
        await until(session, b"up")

    guest = make_guest(ports=3)
    for streams in (PLAIN, TERMINAL):
        talk(f"echo $$ > {tmp_path}/pid; echo up; sleep 300; true", client, streams)
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda pid=pid: not runs(pid), 20, "the command is gone")
        wait_until(lambda: guest.running() == 0, 20, "its ports are free")


def test_output_from_before_the_vms_end_is_still_read(talk, make_guest):
    async def client(session):
        wait_until(lambda: len(os.listdir(guest.devices)) == 3, 20, "the command has its ports")
        assert b"last words" in await until(session, b"up")
        guest.close()
        for _ in range(2):
            with pytest.raises(Unavailable):
                await everything(session)

    guest = make_guest()
    talk("echo last words; echo up; sleep 300", client)


def test_a_slow_reader_slows_the_command_down(talk, make_guest, tmp_path):
    async def client(session):
        first = await session.read()
        assert not (tmp_path / "done").exists()  # more than all buffers on the way hold
        rest = await everything(session)
        assert len(first.data) + len(rest[1]) == 5_000_000
        assert (tmp_path / "done").exists()

    make_guest()
    talk(f"head -c 5000000 /dev/zero; touch {tmp_path}/done", client)


def test_an_abandoned_start_leaves_no_command(clients, make_guest):
    guest = make_guest()
    guest.canned["guest-exec-status"] = {"exited": False}  # the first script, which clears up, never ends

    async def whole():
        starting = asyncio.create_task(clients.open(CONTAINER, GuestCommand(("sleep", "300"), ENV), PLAIN))
        await asyncio.to_thread(wait_until, lambda: guest.swept == 1, 20, "it has begun")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(whole())


def test_a_command_that_cannot_start_breaks_the_session_off(talk, make_guest):
    async def client(session):
        with pytest.raises(ShimError):
            await everything(session)

    make_guest().shell = ["/bin/false"]
    talk("true", client)


@pytest.mark.parametrize("limits", [ExecLimits(lease=0.2)])
def test_a_vm_with_no_room_for_enough_ports_refuses(talk, make_guest):
    make_guest(ports=2, slots=2)
    with pytest.raises(ResourceExhausted, match="no free slot"):
        talk("true", everything)


def test_the_end_is_reported_once_and_last(talk, make_guest):
    async def client(session):
        await session.close_stdin()
        assert await session.read() == Output(OutStream.STDOUT, b"x\n")
        assert await session.read() == Ended(0)

    make_guest()
    talk("echo x", client)
