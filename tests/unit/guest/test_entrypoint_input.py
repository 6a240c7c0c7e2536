"""A container's own command has input and a terminal. The scripts are real; this machine's shell runs them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from podclient import wait_until

from virtshim.guest.agents import AgentClients
from virtshim.guest.command import GuestCommand, OutputPosition
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Ended, OutStream, StreamSession

CONTAINER = ContainerId("c" * 64)
PATH = (("PATH", b"/usr/sbin:/usr/bin:/sbin:/bin"), ("TERM", b"xterm"))


class Running:
    """The command, and all that it has written."""

    def __init__(self, clients: AgentClients, script: str, **changes: object) -> None:
        self.clients = clients
        self.said = b""
        self.code: int | None = None
        self._read_to = OutputPosition()
        command = GuestCommand(("sh", "-c", script), **{"envs": PATH, "stdin": True} | changes)
        clients.start_entrypoint(CONTAINER, command, 10.0, threading.Event())

    def look(self) -> bool:
        progress = self.clients.progress(CONTAINER, self._read_to)
        self._read_to, self.code = progress.read_to, progress.code
        self.said += b"".join(piece.data for piece in progress.output if piece.stream is OutStream.STDOUT)
        return progress.ended and progress.read_to.over

    def until(self, text: bytes) -> None:
        wait_until(lambda: self.look() or text in self.said, 20, f"it says {text!r}")
        assert text in self.said

    def to_the_end(self) -> int | None:
        wait_until(self.look, 20, "its end")
        return self.code


def typing(clients: AgentClients, talk: Callable[[StreamSession], Awaitable[None]]) -> None:
    async def session() -> None:
        opened = await clients.entrypoint_input.open(CONTAINER)
        try:
            await talk(opened)
        finally:
            await opened.close()

    asyncio.run(asyncio.wait_for(session(), 30))


async def types(session: StreamSession, text: bytes) -> None:
    """And leaves when it has been passed on."""
    await session.write_stdin(text)
    await session.close_stdin()
    while not isinstance(await session.read(), Ended):
        pass


def test_clients_send_input_in_turn_and_the_end_of_input_is_separate(guest, clients):
    running = Running(clients, "read a; echo got-$a; read b; echo got-$b; cat; echo over; exit 5")
    typing(clients, lambda session: types(session, b"one\n"))
    running.until(b"got-one\n")
    typing(clients, lambda session: types(session, b"two\nrest"))
    running.until(b"got-two\nrest")
    clients.entrypoint_input.end(CONTAINER, 10)
    assert running.to_the_end() == 5
    assert running.said == b"got-one\ngot-two\nrestover\n"


def test_much_input_arrives_whole(guest, clients):
    data = bytes(range(256)) * 2000
    running = Running(clients, "head -c 512000 | cksum")
    typing(clients, lambda session: types(session, data))
    assert running.to_the_end() == 0
    assert b" 512000" in running.said


def test_an_unused_input_can_be_ended(guest, clients):
    running = Running(clients, "cat; echo over")
    clients.entrypoint_input.end(CONTAINER, 10)
    assert running.to_the_end() == 0
    assert running.said == b"over\n"


def test_a_command_without_input_reads_end_of_file(guest, clients):
    running = Running(clients, "cat; echo over", stdin=False)
    assert running.to_the_end() == 0
    clients.entrypoint_input.end(CONTAINER, 10)


def test_clients_can_resize_and_signal_through_a_terminal(guest, clients):
    script = 'tty | sed s,[0-9]*$,,; stty size; read go; stty size; echo "a b" \'c\'"\'"; exec sleep 100'
    running = Running(clients, script, tty=True)
    running.until(b"24 80\r\n")
    assert running.said.startswith(b"/dev/pts/\r\n")
    clients.entrypoint_input.resize(CONTAINER, 132, 50, 10)
    typing(clients, lambda session: types(session, b"go\r"))
    running.until(b"50 132\r\na b c'\r\n")
    typing(clients, lambda session: types(session, b"\x03"))  # ctrl-c
    assert running.to_the_end() == 130


@pytest.mark.parametrize("step", ["mkfifo", "mv"])
def test_an_end_that_comes_while_the_pipes_are_made_is_not_lost(guest, clients, tmp_path, step):
    slow = tmp_path / step
    slow.write_text(f'#!/bin/sh\n/usr/bin/{step} "$@" && exec sleep 1\n')
    slow.chmod(0o755)
    running = Running(clients, "cat", envs=(("PATH", f"{tmp_path}:/usr/bin:/bin".encode()),))
    clients.entrypoint_input.end(CONTAINER, 10)
    assert running.to_the_end() == 0


def test_a_command_without_terminal_has_no_size(guest, clients):
    running = Running(clients, "cat")
    with pytest.raises(InternalError):
        clients.entrypoint_input.resize(CONTAINER, 132, 50, 10)
    clients.entrypoint_input.end(CONTAINER, 10)
    running.to_the_end()
