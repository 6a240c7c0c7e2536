"""Clients that are attached to a container's own command share its output and its input."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from virtshim.attach.console import MAX_CLIENTS, MAX_WAITING
from virtshim.attach.entrypoint import EntrypointAttach, EntrypointSession
from virtshim.model.errors import ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import AttachStreams, Ended, Output, OutStream, Streams

VM = ContainerId("c" * 64)
BOTH = Streams(stdin=True, stdout=True, stderr=True)
TTY = Streams(stdin=True, stdout=True, tty=True)
OUT, ERR = OutStream.STDOUT, OutStream.STDERR


class Way:
    """The command's input. Implements `virtshim.streaming.ports.StreamSession`."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._over = asyncio.Event()

    async def read(self) -> Output | Ended:
        await self._over.wait()
        return Ended(0)

    async def write_stdin(self, data: bytes) -> None:
        self._inputs.typed += data

    async def close_stdin(self) -> None:
        self._over.set()

    async def resize(self, width: int, height: int) -> None: ...

    async def close(self) -> None:
        self._inputs.closed += 1


class Inputs:
    """Implements `virtshim.guest.ports.EntrypointInputs`."""

    def __init__(self) -> None:
        self.typed = b""
        self.opened = self.closed = 0
        self.ended: list[ContainerId] = []
        self.sizes: list[tuple[int, int]] = []
        self.sized = threading.Event()
        self.error: Exception | None = None

    async def open(self, container: ContainerId) -> Way:
        if self.error is not None:
            raise self.error
        self.opened += 1
        return Way(self)

    def end(self, container: ContainerId, timeout: float) -> None:
        self.ended.append(container)

    def resize(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        self.sizes.append((columns, rows))
        self.sized.set()


def run(test: Callable[[Inputs, EntrypointAttach], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        inputs = Inputs()
        with contextlib.closing(EntrypointAttach(inputs)) as hub:
            await asyncio.wait_for(test(inputs, hub), 20)

    asyncio.run(whole())


def request(streams: Streams = BOTH, *, once: bool = False) -> AttachStreams:
    return AttachStreams(VM, streams, once, to_entrypoint=True)


async def all_of(session: EntrypointSession) -> tuple[list[Output], int]:
    said = []
    while isinstance(event := await session.read(), Output):
        said.append(event)
    return said, event.code


def test_all_clients_get_the_commands_output_and_exit_code():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        assert not hub.has_clients(VM)
        first, second = await hub.attach(request()), await hub.attach(request(Streams(stdout=True)))
        assert hub.has_clients(VM)
        said = [Output(OUT, b"out"), Output(ERR, b"err")]
        await asyncio.to_thread(hub.publish, VM, said)
        await asyncio.to_thread(hub.publish, ContainerId("d" * 64), [Output(OUT, b"another's")])
        await asyncio.to_thread(hub.ended, VM, 3)
        assert await all_of(first) == (said, 3)
        assert await all_of(second) == (said[:1], 3)
        await first.close()
        await second.close()
        assert not hub.has_clients(VM)

    run(test)


def test_a_terminal_has_one_output():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        session = await hub.attach(request(TTY))
        hub.publish(VM, [Output(OUT, b"a"), Output(ERR, b"b")])
        hub.ended(VM, 0)
        assert await all_of(session) == ([Output(OUT, b"a"), Output(OUT, b"b")], 0)
        await session.close()

    run(test)


def test_stdin_opens_with_the_first_input_and_closes_with_its_client():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        silent, typist = await hub.attach(request()), await hub.attach(request())
        await typist.write_stdin(b"one ")
        await typist.write_stdin(b"two")
        await silent.close()
        await typist.close()
        assert (inputs.typed, inputs.opened, inputs.closed, inputs.ended) == (b"one two", 1, 1, [])

    run(test)


def test_a_terminal_that_closes_its_input_has_detached_and_the_command_continues():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        terminal, piped = await hub.attach(request(TTY)), await hub.attach(request())
        await terminal.write_stdin(b"typed")
        await terminal.close_stdin()
        assert await asyncio.wait_for(all_of(terminal), 5) == ([], 0)
        await terminal.close()
        await piped.close_stdin()
        assert (inputs.typed, inputs.closed, inputs.ended) == (b"typed", 1, [])
        hub.publish(VM, [Output(OUT, b"on")])
        hub.ended(VM, 3)
        assert await all_of(piped) == ([Output(OUT, b"on")], 3)
        await piped.close()

    run(test)


@pytest.mark.parametrize("typed", [b"", b"last words"])
def test_the_first_client_ends_the_input_of_a_pod_with_stdin_once(typed):
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        session = await hub.attach(request(once=True))
        if typed:
            await session.write_stdin(typed)
        await session.close_stdin()
        await session.write_stdin(b"too late")
        assert (inputs.typed, inputs.ended) == (typed, [VM])
        await session.close()
        assert inputs.ended == [VM]
        with pytest.raises(WrongState, match="stdinOnce"):
            await hub.attach(request(once=True))
        listener = await hub.attach(request(Streams(stdout=True), once=True))
        await listener.close()
        hub.forget(VM)
        await (await hub.attach(request())).close()

    run(test)


def test_input_that_reaches_no_command_is_reported_once_and_output_continues():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        inputs.error = Unavailable("no guest agent answers")
        session = await hub.attach(request())
        await session.write_stdin(b"a")
        await session.write_stdin(b"b")
        hub.publish(VM, [Output(OUT, b"still here")])
        hub.ended(VM, 0)
        (why, said), _ = await all_of(session)
        assert b"no guest agent answers" in why.data
        assert said.data == b"still here"
        await session.close()

    run(test)


def test_a_client_that_does_not_read_is_told_that_its_oldest_output_is_lost():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        session = await hub.attach(request())
        for number in range(12):
            hub.publish(VM, [Output(OUT, bytes([number]) * (MAX_WAITING // 8))])
        hub.ended(VM, 0)
        await asyncio.sleep(0)
        said, _ = await all_of(session)
        assert f"{4 * MAX_WAITING // 8} bytes lost".encode() in said[0].data
        assert [piece.data[0] for piece in said[1:]] == list(range(4, 12))
        await session.close()

    run(test)


def test_the_command_gets_the_size_of_the_clients_terminal():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        session = await hub.attach(request(TTY))
        await session.resize(132, 50)
        await asyncio.to_thread(inputs.sized.wait, 10)
        assert inputs.sizes == [(132, 50)]
        await session.close()

    run(test)


def test_the_number_of_clients_is_limited():
    async def test(inputs: Inputs, hub: EntrypointAttach) -> None:
        sessions = [await hub.attach(request()) for _ in range(MAX_CLIENTS)]
        with pytest.raises(ResourceExhausted):
            await hub.attach(request())
        for session in sessions:
            await session.close()
        await (await hub.attach(request())).close()

    run(test)
