"""If one pod takes as much as it can of shared resources, other pods, and its own probes, are still served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from fakes.background import Background
from fakes.cri import refused, served
from fakes.hostile import HostileAgent, HostileVm, record, silent

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.guest.agents import OF_VM, WAITING, AgentClients, VmWorkers
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.guest.exec_collector import OutputMemory
from virtshim.guest.wait import CancellableDeadline, ExecLimits, Turns
from virtshim.model.errors import InternalError, ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Streams
from virtshim.system.pod_places import Places, PodPlaces

pytestmark = pytest.mark.hostile

HOSTILE, OTHER = ContainerId("a" * 64), ContainerId("b" * 64)
TRUE = GuestCommand(("true",))
OUT = Streams(stdout=True)
Code = grpc.StatusCode


@pytest.fixture
def layout(short_path: Path) -> Layout:
    layout = Layout(state_dir=f"{short_path}/state", run_dir=str(short_path))
    for container in (HOSTILE, OTHER):
        Path(layout.socket_dir(container)).mkdir(parents=True)
    return layout


@pytest.fixture
def guests() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def limits() -> ExecLimits:
    return ExecLimits()


@pytest.fixture
def clients(layout: Layout, limits: ExecLimits) -> Iterator[AgentClients]:
    def no_more(container: ContainerId, number: int) -> None:
        raise InternalError("no free slot")

    clients = AgentClients(layout, no_more, limits=limits)
    yield clients
    clients.close()


def honest(token: bytes) -> list[bytes]:
    return [record(token, b"start") + b"fine" + record(token, b"exit 0") + record(token, b"end")]


def hears_only(agent: HostileAgent, connected: object) -> None:
    for _ in agent.asked(connected):
        pass


def test_a_hundred_execs_into_a_silent_guest_do_not_block_another_guest(
    layout: Layout, clients: AgentClients, guests: contextlib.ExitStack
) -> None:
    guests.enter_context(contextlib.closing(HostileAgent(Path(layout.agent_socket(HOSTILE)), hears_only)))
    other = guests.enter_context(contextlib.closing(HostileVm(Path(layout.socket_dir(OTHER)))))
    other.out = honest

    async def test() -> None:
        waiting = [asyncio.create_task(clients.open(HOSTILE, TRUE, OUT)) for _ in range(100)]
        await asyncio.sleep(0)
        session = await asyncio.wait_for(clients.open(OTHER, TRUE, OUT), 20)
        await session.close()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(test())


def test_calls_waiting_for_one_guest_are_bounded_and_do_not_block_others() -> None:
    workers, go = VmWorkers(), threading.Event()
    busy = [workers.submit(HOSTILE, go.wait, 20) for _ in range(OF_VM + WAITING)]
    with pytest.raises(ResourceExhausted, match=r"256 requests wait .* whether its guest agent answers"):
        workers.submit(HOSTILE, go.wait, 20)
    assert workers.submit(OTHER, lambda: "served").result(10) == "served"
    assert not any(future.done() for future in busy)
    go.set()
    assert all(future.result(10) for future in busy)
    workers.close()


@pytest.mark.parametrize("limits", [ExecLimits(lease=0.2)])
def test_a_probe_runs_while_user_sessions_hold_all_their_ports(
    layout: Layout, clients: AgentClients, guests: contextlib.ExitStack
) -> None:
    vm = guests.enter_context(contextlib.closing(HostileVm(Path(layout.socket_dir(HOSTILE)), ports=12)))
    vm.out = vm.err = lambda token: [record(token, b"start")]  # and never ends

    async def sessions() -> None:
        made, told = [], ""
        while not told:
            try:
                made.append(await clients.open(HOSTILE, TRUE, OUT))
            except ResourceExhausted as exc:
                told = str(exc)
        assert len(made) == 5
        assert told.startswith("all 10 ports for sessions are in use in this virtual machine")
        vm.out, vm.err = honest, silent
        probe = asyncio.to_thread(clients.run, HOSTILE, TRUE, 10.0, threading.Event())
        assert await probe == CommandResult(0, b"fine", b"")
        for session in made:
            await session.close()

    asyncio.run(sessions())


@dataclass(frozen=True)
class Awaited(CancellableDeadline):
    """A deadline that reports when somebody waits on it."""

    is_awaited: threading.Event = field(default_factory=threading.Event)

    def slice(self, waiting_for: str) -> float:
        self.is_awaited.set()
        return super().slice(waiting_for)


def test_a_probe_goes_before_waiting_sessions() -> None:
    turns, order, held, go = Turns(), [], threading.Event(), threading.Event()

    def turn(name: str, until: Awaited) -> None:
        with turns.mine(until, "a turn"):
            order.append(name)

    def first() -> None:
        with turns.mine(CancellableDeadline.after(20.0), "a turn"):
            held.set()
            go.wait(20)

    holding = Background(first)
    assert held.wait(10)
    waiting = []
    for name in (*(f"session {number}" for number in range(5)), "probe"):
        until = Awaited.after(20.0, patient=name != "probe")
        waiting.append(Background(lambda name=name, until=until: turn(name, until)))
        assert until.is_awaited.wait(10)
    go.set()
    for one in (holding, *waiting):
        one.done()
    assert order == ["probe", *(f"session {number}" for number in range(5))]


def test_collected_output_of_a_hundred_commands_is_bounded_and_the_next_one_runs() -> None:
    memory, mebibyte = OutputMemory(256 << 20), 1 << 20
    held = [0] * 100
    for _ in range(40):
        for command, mine in enumerate(held):
            held[command] += memory.take(mebibyte, mine)
    assert sum(held) <= 256 << 20
    assert memory.take(mebibyte, 0) > mebibyte // 2, "the next"
    for mine in held:
        memory.give_back(mine)
    alone = 0
    while granted := memory.take(mebibyte, alone):
        alone += granted
    assert alone >= 32 << 20, "both streams of a command that is alone"


# --- places by pod

PLACES = Places("commands running", 80, 16, "wait for some to end", "wait for others to end")


def test_a_pod_beyond_its_session_limit_gets_an_error_that_names_the_limit() -> None:
    places = PodPlaces(PLACES)
    for _ in range(16):
        places.take("default/a")
    with pytest.raises(
        ResourceExhausted, match="pod default/a has 16 commands running, the limit for one pod; wait for some to end"
    ):
        places.take("default/a")
    assert (places.refusals("default/a"), places.refusals("default/b")) == (1, 0)
    places.take("default/b")
    places.give_back("default/a")
    places.take("default/a")


def test_a_pod_gets_its_first_session_while_twenty_pods_hold_all_they_can() -> None:
    places = PodPlaces(PLACES)
    for number in range(20):
        with contextlib.suppress(ResourceExhausted):
            for _ in range(20):
                places.take(f"default/hostile-{number}")
    places.take("default/other")
    with pytest.raises(ResourceExhausted, match="kept for pods that have none"):
        places.take("default/other")


def test_the_error_about_places_without_a_pod_says_so() -> None:
    places = PodPlaces(Places("pulls under way", 24, 12, "wait for some to end", "wait", holder="namespace"))
    for _ in range(12):
        places.take("")
    with pytest.raises(
        ResourceExhausted,
        match=r"^there are 12 pulls under way without a pod, the limit for one namespace; wait for some",
    ):
        places.take("")
    places.give_back("")
    for number in range(7):
        places.take(f"other-{number}")
    with pytest.raises(
        ResourceExhausted, match=r"^there are 11 pulls under way without a pod; the last 6 of this node's 24 are kept"
    ):
        places.take("")


def test_the_sessions_of_a_node_are_bounded() -> None:
    places = PodPlaces(PLACES)
    for number in range(80):
        places.take(f"default/{number}")
    with pytest.raises(ResourceExhausted, match="80 commands running together, which is the limit; wait for others"):
        places.take("default/last")


def test_hung_commands_in_one_pod_do_not_block_another_pods_probe(tmp_path: Path) -> None:
    with served(tmp_path, cri={"max_calls": 32}) as (world, client, _):
        world.pull()
        _, hostile = client.running()
        _, other = client.running("other")
        started, over = threading.Semaphore(0), threading.Event()

        def hang(*_: object) -> CommandResult:
            started.release()
            over.wait(20)
            return CommandResult(0, b"", b"")

        world.outside.guests.do = hang
        request = pb.ExecSyncRequest(container_id=hostile, cmd=["sleep", "9"])
        calls = [client.runtime.ExecSync.future(request) for _ in range(12)]
        for _ in calls:
            assert started.acquire(timeout=20)
        with refused(Code.RESOURCE_EXHAUSTED, "pod .* commands running"):
            client.ExecSync(request)
        world.outside.guests.do = lambda *_: CommandResult(0, b"ready", b"")
        assert client.ExecSync(pb.ExecSyncRequest(container_id=other, cmd=["probe"])).stdout == b"ready"
        over.set()
        for call in calls:
            call.result(20)
