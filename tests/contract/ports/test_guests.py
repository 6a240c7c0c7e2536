"""The fake, and the real clients with an agent that runs commands on this machine, fulfil the contract of guest agents
and sessions."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.guest import HostGuest
from fakes.guests import FakeGuests
from fakes.sessions import FakeSession, echo
from fakes.waiting import eventually

from virtshim.guest.agents import AgentClients
from virtshim.guest.command import CommandResult, EntrypointProgress, GuestCommand, OutputPosition, StreamPosition
from virtshim.guest.ports import GuestAgents, GuestOperations
from virtshim.model.container import ProcessUser
from virtshim.model.errors import Aborted, NotFound, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Ended, Output, OutStream, Streams, StreamSession

A = ContainerId("a" * 64)
PATH = (("PATH", b"/usr/sbin:/usr/bin:/sbin:/bin"),)
NEVER = threading.Event()
PLAIN = Streams(stdin=True, stdout=True, stderr=True)
SECONDS = 20.0
KEY = "ssh-ed25519 AAAA me@here"
OTHER_KEY = "ssh-rsa BBBB"


def shell(script: str) -> GuestCommand:
    return GuestCommand(("sh", "-c", script), PATH)


# What the guest's commands do, in this machine's shell and in memory.
ECHO = shell("cat")
FAIL = shell("echo out; echo err >&2; exit 3")
WAIT = shell("while :; do sleep 0.02; done")


class World:
    """`A` is the only container, and its VM runs."""

    guests: GuestAgents
    operations: GuestOperations

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def is_about_to_open(self, command: GuestCommand) -> None:
        """Announces that the guest is about to open the port. Called on the loop."""

    def end_vm(self) -> None:
        raise NotImplementedError

    def lose_command(self) -> None:
        """Restarts the guest, which forgets the container's own command."""
        raise NotImplementedError

    def call_guest(self, name: str) -> None:
        raise NotImplementedError

    def frozen(self) -> bool:
        raise NotImplementedError

    def clock_is_right(self) -> bool:
        """False at first."""
        raise NotImplementedError

    def keys(self) -> list[str]:
        """Root's."""
        raise NotImplementedError

    def write(self, data: bytes) -> str:
        """Writes a file in the guest; returns its path."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs."""


async def _fail(session: FakeSession) -> int:
    await session.out(b"out\n")
    await session.err(b"err\n")
    return 3


class InMemory(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.guests = self.operations = self._fake = FakeGuests()
        self._fake.process_user = ProcessUser(os.geteuid(), os.getegid(), (os.getegid(),))
        self._fake.do = lambda command, *_: (
            CommandResult(0, command.input, b"") if command.input else CommandResult(3, b"out\n", b"err\n")
        )
        self._ended = asyncio.Event()
        end = OutputPosition(StreamPosition(0, 4, over=True), StreamPosition(0, 4, over=True))
        said = (Output(OutStream.STDOUT, b"out\n"), Output(OutStream.STDERR, b"err\n"))
        self._fake.tell(0, EntrypointProgress(said, OutputPosition(StreamPosition(1), StreamPosition(1)), 3))
        self._fake.tell(1, EntrypointProgress((), end, 3))

    def is_about_to_open(self, command: GuestCommand) -> None:
        scripts: dict[GuestCommand, Callable[[FakeSession], Awaitable[int]]] = {
            ECHO: echo, FAIL: _fail, WAIT: self._wait,
        }  # fmt: skip
        self._fake.sessions.append(FakeSession(scripts[command]))

    async def _wait(self, session: FakeSession) -> int:
        await self._ended.wait()
        raise Unavailable("the virtual machine has ended")

    def end_vm(self) -> None:
        self._fake.gone = True
        self._ended.set()

    def lose_command(self) -> None:
        self._fake.still_there = False

    def call_guest(self, name: str) -> None:
        self._fake.told = {"hostname": name}

    def frozen(self) -> bool:
        return bool(self._fake.frozen)

    def clock_is_right(self) -> bool:
        return bool(self._fake.clocks_set)

    def keys(self) -> list[str]:
        return [key for user, key in self._fake.ssh_keys if user == "root"]

    def write(self, data: bytes) -> str:
        self._fake.files["/said"] = data
        return "/said"


class OnThisMachine(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        layout = Layout(f"{directory}/state", f"{directory}/run")
        Path(layout.socket_dir(A)).mkdir(parents=True)
        self._guest = HostGuest(Path(layout.socket_dir(A)))
        self._guest.clock_ns -= 3_600 * 10**9
        self.guests = self._clients = AgentClients(layout, lambda _container, number: self._guest.plug(number))
        self.operations = self._clients.operations

    def end_vm(self) -> None:
        self._guest.close()

    def lose_command(self) -> None:
        """Loses the command; its last shell may still be about to write."""
        self._guest.restart_agent()
        lost = self._guest.run.with_name("lost")
        lost.mkdir()
        for path in self._guest.run.iterdir():
            path.rename(lost / path.name)

    def call_guest(self, name: str) -> None:
        self._guest.canned["guest-get-host-name"] = {"host-name": name}

    def frozen(self) -> bool:
        return self._guest.frozen

    def clock_is_right(self) -> bool:
        return abs(self._guest.clock_ns - time.time_ns()) < 60 * 10**9

    def keys(self) -> list[str]:
        return self._guest.ssh_keys["root"]

    def write(self, data: bytes) -> str:
        path = self.directory / "said"
        path.write_bytes(data)
        return str(path)

    def close(self) -> None:
        self._clients.close()
        self._guest.close()


@pytest.fixture(params=[InMemory, OnThisMachine])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Uses a short path, because a socket's address holds 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ga-") as directory:
        made: World = request.param(Path(directory))
        yield made
        made.close()


def talk(world: World, command: GuestCommand, client: Callable[[StreamSession], Awaitable[None]]) -> None:
    """Runs a command with a client that is a coroutine of the session; the session is closed afterwards."""

    async def whole() -> None:
        world.is_about_to_open(command)
        session = await world.guests.open(A, command, PLAIN)
        try:
            async with asyncio.timeout(SECONDS):
                await client(session)
        finally:
            await session.close()

    asyncio.run(whole())


# --- commands


def test_a_command_returns_its_two_streams_and_its_exit_code(world: World) -> None:
    assert world.guests.run(A, FAIL, SECONDS, NEVER) == CommandResult(3, b"out\n", b"err\n")


@pytest.mark.parametrize("size", [1, 300_000])
def test_a_command_reads_its_input_to_the_end(world: World, size: int) -> None:
    given = bytes(range(1, 256)) * (size // 255) + b"x"
    assert world.guests.run(A, replace(ECHO, input=given), SECONDS, NEVER) == CommandResult(0, given, b"")


def test_a_command_that_does_not_read_its_input_ends(world: World) -> None:
    unread = GuestCommand(("sh", "-c", "exit 0"), PATH, input=bytes(5_000_000))
    assert world.guests.run(A, unread, SECONDS, NEVER).code == 0
    eventually(lambda: "exec-input" not in {thread.name for thread in threading.enumerate()})


def test_a_command_is_given_up_if_its_caller_leaves(world: World) -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(Aborted):
        world.guests.run(A, WAIT, SECONDS, given_up)


# --- commands with streams


def test_output_comes_by_stream_and_the_exit_code_comes_last(world: World) -> None:
    async def client(session: StreamSession) -> None:
        seen = dict.fromkeys(OutStream, b"")
        while isinstance(item := await session.read(), Output):
            seen[item.stream] += item.data
        assert seen == {OutStream.STDOUT: b"out\n", OutStream.STDERR: b"err\n"}
        assert item == Ended(3)

    talk(world, FAIL, client)


def test_input_reaches_the_command_and_may_be_closed_twice(world: World) -> None:
    async def client(session: StreamSession) -> None:
        await session.write_stdin(b"ping")
        assert await session.read() == Output(OutStream.STDOUT, b"ping")
        await session.close_stdin()
        await session.close_stdin()
        assert await session.read() == Ended(0)

    talk(world, ECHO, client)


def test_input_is_discarded_if_the_command_no_longer_reads(world: World) -> None:
    async def client(session: StreamSession) -> None:
        while isinstance(await session.read(), Output):
            pass
        for _ in range(10):
            await session.write_stdin(b"too late")
        await session.close_stdin()

    talk(world, FAIL, client)


def test_resizing_a_command_without_a_terminal_does_nothing(world: World) -> None:
    async def client(session: StreamSession) -> None:
        await session.resize(80, 24)
        await session.close_stdin()
        assert await session.read() == Ended(0)

    talk(world, ECHO, client)


def test_a_client_may_leave_while_the_command_runs(world: World) -> None:
    async def client(session: StreamSession) -> None:
        await session.write_stdin(b"unread")

    talk(world, WAIT, client)


def test_the_end_of_the_vm_breaks_the_session(world: World) -> None:
    async def client(session: StreamSession) -> None:
        reading = asyncio.create_task(session.read())
        await asyncio.to_thread(world.end_vm)
        with pytest.raises(Unavailable):
            await reading

    talk(world, WAIT, client)


# --- a container's own command


def test_progress_of_a_command_has_its_output_and_its_end(world: World) -> None:
    world.guests.start_entrypoint(A, FAIL, SECONDS, NEVER)
    world.guests.start_entrypoint(A, FAIL, SECONDS, NEVER)  # once in a boot, however often it is said
    seen = dict.fromkeys(OutStream, b"")
    last = EntrypointProgress((), OutputPosition())

    def is_over() -> bool:
        nonlocal last
        last = world.guests.progress(A, last.read_to)
        for piece in last.output:
            seen[piece.stream] += piece.data
        return last.ended and last.read_to.over

    eventually(is_over)
    assert seen == {OutStream.STDOUT: b"out\n", OutStream.STDERR: b"err\n"}
    assert last.code == 3
    assert world.guests.progress(A, last.read_to) == EntrypointProgress((), last.read_to, 3), (
        "it comes again with each answer"
    )


def test_the_user_of_a_command_is_known_once_it_has_started(world: World) -> None:
    assert world.guests.entrypoint_user(A) is None
    world.guests.start_entrypoint(A, FAIL, SECONDS, NEVER)
    eventually(lambda: world.guests.entrypoint_user(A))
    eventually(lambda: world.guests.progress(A, OutputPosition()).ended)
    user = world.guests.entrypoint_user(A)
    assert user is not None
    assert (user.uid, user.gid, user.groups[0]) == (os.geteuid(), os.getegid(), os.getegid())


def test_unread_output_is_returned_again(world: World) -> None:
    world.guests.start_entrypoint(A, FAIL, SECONDS, NEVER)
    eventually(lambda: world.guests.progress(A, OutputPosition()).output)
    assert world.guests.progress(A, OutputPosition()).output


def test_a_command_that_the_guest_lost_is_not_found(world: World) -> None:
    world.guests.start_entrypoint(A, FAIL, SECONDS, NEVER)
    eventually(lambda: world.guests.entrypoint_exists(A))
    eventually(lambda: world.guests.progress(A, OutputPosition()).ended)
    world.lose_command()
    assert not world.guests.entrypoint_exists(A)


# --- what a guest says of itself


def test_guest_info_is_a_small_document(world: World) -> None:
    world.call_guest("web")
    info = world.guests.guest_info(A, SECONDS)
    assert info["hostname"] == "web"
    assert len(json.dumps(info)) < 4096


# --- operations


def test_file_systems_stay_frozen_until_thawed_and_may_be_thawed_twice(world: World) -> None:
    assert world.operations.freeze(A, SECONDS) > 0
    assert world.frozen()
    for _ in range(2):
        world.operations.thaw(A, SECONDS)
        assert not world.frozen()


def test_the_clock_is_set(world: World) -> None:
    assert not world.clock_is_right()
    world.operations.set_clock(A, SECONDS)
    assert world.clock_is_right()


def test_ssh_keys_are_added_once(world: World) -> None:
    world.operations.add_ssh_keys(A, "root", [KEY], SECONDS)
    world.operations.add_ssh_keys(A, "root", [KEY, OTHER_KEY], SECONDS)
    assert world.keys() == [KEY, OTHER_KEY]
    with pytest.raises(NotFound, match="nobody-here"):
        world.operations.add_ssh_keys(A, "nobody-here", [KEY], SECONDS)


@pytest.mark.parametrize(("most", "tail"), [(4, b"said"), (100, b"all said")])
def test_the_end_of_a_file_is_read(world: World, most: int, tail: bytes) -> None:
    assert world.operations.read_tail(A, world.write(b"all said"), most, SECONDS) == tail


def test_the_tail_of_a_missing_file_is_empty(world: World) -> None:
    assert world.operations.read_tail(A, "/nowhere/at/all", 4096, SECONDS) == b""


# --- a VM that is gone

ASKED: dict[str, Callable[[World], object]] = {
    "run": lambda world: world.guests.run(A, FAIL, SECONDS, NEVER),
    "open": lambda world: talk(world, FAIL, lambda session: asyncio.sleep(0)),
    "start_entrypoint": lambda world: world.guests.start_entrypoint(A, FAIL, SECONDS, NEVER),
    "entrypoint_user": lambda world: world.guests.entrypoint_user(A),
    "progress": lambda world: world.guests.progress(A, OutputPosition()),
    "entrypoint_exists": lambda world: world.guests.entrypoint_exists(A),
    "thaw": lambda world: world.operations.thaw(A, SECONDS),
    "set_clock": lambda world: world.operations.set_clock(A, SECONDS),
    "add_ssh_keys": lambda world: world.operations.add_ssh_keys(A, "root", [KEY], SECONDS),
    "read_tail": lambda world: world.operations.read_tail(A, "/etc/hostname", 10, SECONDS),
    "resize_console": lambda world: world.operations.resize_console(A, 80, 24, SECONDS),
    "reboot": lambda world: world.operations.reboot(A, SECONDS),
    "freeze": lambda world: world.operations.freeze(A, SECONDS),
    "filesystems": lambda world: world.operations.filesystems(A, SECONDS),
}


@pytest.mark.parametrize("call", ASKED)
def test_calls_to_the_agent_of_an_ended_vm_fail(world: World, call: str) -> None:
    world.end_vm()
    with pytest.raises(Unavailable):
        ASKED[call](world)


def test_an_ended_vm_has_no_guest_facts(world: World) -> None:
    world.call_guest("web")
    world.end_vm()
    assert world.guests.guest_info(A, SECONDS) == {}


def test_a_guest_may_be_forgotten_twice(world: World) -> None:
    world.operations.thaw(A, SECONDS)
    for _ in range(2):
        world.guests.forget(A)
