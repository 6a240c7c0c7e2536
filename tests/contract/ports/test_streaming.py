"""The fakes, the real server, and clients attached to entrypoints fulfil the contract of streaming."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest
from fakes.clock import FakeClock
from fakes.guests import FakeEntrypointListeners
from fakes.journal import WAIT_LIMIT
from fakes.sessions import FakeSession, FakeSessions
from fakes.streaming import FakeStreaming
from fakes.streamnode import OneScreen

from virtshim.attach.entrypoint import EntrypointAttach
from virtshim.guest.agents import AgentClients
from virtshim.guest.ports import EntrypointListeners
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import (
    Attaches,
    AttachStreams,
    Ended,
    ExecRequest,
    ForwardRequest,
    Output,
    OutStream,
    Streaming,
    StreamRequest,
    Streams,
)
from virtshim.streaming.server import StreamingServer

A = ContainerId("a" * 64)
SANDBOX = SandboxId("5" * 64)
STREAMS = Streams(stdin=True, stdout=True)
HELLO = Output(OutStream.STDOUT, b"hello")


@pytest.fixture(params=["fake", "server"])
def streaming(request: pytest.FixtureRequest) -> Iterator[Streaming]:
    if request.param == "fake":
        yield FakeStreaming()
        return
    server, sessions = StreamingServer("127.0.0.1", 0, FakeClock()), FakeSessions()
    server.start(sessions, sessions, OneScreen())
    yield server
    server.stop()


def test_every_request_has_a_url_of_its_own(streaming: Streaming) -> None:
    requests: list[StreamRequest] = [
        ExecRequest(A, ("true",), STREAMS), ExecRequest(A, ("true",), STREAMS), AttachStreams(A, STREAMS),
        ForwardRequest(SANDBOX, "10.88.0.2", (80,)),
    ]  # fmt: skip
    urls = [streaming.offer(request) for request in requests]
    assert len(set(urls)) == len(urls)
    assert all(url.startswith("http://127.0.0.1:") for url in urls)


def test_a_pod_that_met_no_limit_was_refused_nothing(streaming: Streaming) -> None:
    streaming.offer(ForwardRequest(SANDBOX, "10.88.0.2", (80,), pod="default/web"))
    assert streaming.refused("default/web") == {"urls": 0, "sessions": 0, "connections": 0}


def test_ending_a_container_without_sessions_may_be_repeated(streaming: Streaming) -> None:
    streaming.offer(AttachStreams(A, STREAMS))
    for _ in range(2):
        streaming.end_container(A)
        streaming.end_sandbox(SANDBOX)
    assert streaming.offer(AttachStreams(A, STREAMS))


# --- who is attached to a container's own command


@pytest.fixture
def entrypoint_attach() -> Iterator[EntrypointAttach]:
    nowhere = Layout("/nonexistent", "/nonexistent")
    with contextlib.ExitStack() as stack:
        guests = stack.enter_context(contextlib.closing(AgentClients(nowhere, lambda _container, _number: None)))
        yield stack.enter_context(contextlib.closing(EntrypointAttach(guests.entrypoint_input)))


@pytest.fixture(params=["fake", "clients"])
def listeners(request: pytest.FixtureRequest, entrypoint_attach: EntrypointAttach) -> EntrypointListeners:
    return FakeEntrypointListeners() if request.param == "fake" else entrypoint_attach


def test_an_entrypoint_without_clients_writes_and_ends(listeners: EntrypointListeners) -> None:
    assert not listeners.has_clients(A)
    listeners.publish(A, [HELLO])
    listeners.ended(A, 3)
    for _ in range(2):
        listeners.forget(A)
    assert not listeners.has_clients(A)


async def _hello(session: FakeSession) -> int:
    await session.out(HELLO.data)
    return 3


@pytest.fixture(params=["fake", "clients"])
def attaches(
    request: pytest.FixtureRequest, entrypoint_attach: EntrypointAttach
) -> tuple[Attaches, Callable[[], None]]:
    """Attaches to a command; returns a function that lets the command print HELLO and end."""
    if request.param == "fake":
        sessions = FakeSessions()
        sessions.script = _hello
        return sessions, lambda: None

    def speak() -> None:
        entrypoint_attach.publish(A, [HELLO])
        entrypoint_attach.ended(A, 3)

    return entrypoint_attach, speak


def test_an_attached_client_gets_all_output_and_then_the_end(attaches: tuple[Attaches, Callable[[], None]]) -> None:
    async def client() -> None:
        to, speak = attaches
        session = await to.attach(AttachStreams(A, Streams(stdout=True)))
        async with asyncio.timeout(WAIT_LIMIT):
            await asyncio.to_thread(speak)
            assert [await session.read(), await session.read()] == [HELLO, Ended(3)]
        await session.close()

    asyncio.run(client())
