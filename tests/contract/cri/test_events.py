"""GetContainerEvents sends clients the events of pods as they happen."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.cri import Client, refused, served
from fakes.journal import WAIT_LIMIT
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.config.settings import Cri
from virtshim.model.vm import OffReason

pytestmark = pytest.mark.cri

CREATED, STARTED = pb.CONTAINER_CREATED_EVENT, pb.CONTAINER_STARTED_EVENT
STOPPED, DELETED = pb.CONTAINER_STOPPED_EVENT, pb.CONTAINER_DELETED_EVENT


@contextlib.contextmanager
def following(client: Client, seconds: float = WAIT_LIMIT) -> Iterator[Any]:
    """An event stream that receives everything from here on."""
    stream = client.GetContainerEvents(pb.GetEventsRequest(), timeout=seconds)
    stream.initial_metadata()
    yield stream
    stream.cancel()


def taken(stream: Any, count: int) -> list[pb.ContainerEventResponse]:
    return [next(stream) for _ in range(count)]


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + WAIT_LIMIT
    while not condition():
        assert time.monotonic() < end, what
        threading.Event().wait(0.005)


def whole_life(client: Client, name: str = "web") -> tuple[str, str]:
    sandbox, container = client.running(name)
    client.stop(container)
    client.remove(container)
    client.stop_pod(sandbox)
    client.remove_pod(sandbox)
    return sandbox, container


def test_every_client_gets_the_events_of_a_pods_life_in_order(client: Client) -> None:
    with following(client) as one, following(client) as two:
        sandbox, container = whole_life(client)
        first, second = taken(one, 8), taken(two, 8)
    assert first == second
    assert [(event.container_id, event.container_event_type) for event in first] == [
        *((sandbox, CREATED), (sandbox, STARTED)),
        *((container, CREATED), (container, STARTED), (container, STOPPED), (container, DELETED)),
        *((sandbox, STOPPED), (sandbox, DELETED)),
    ]
    stamps = [event.created_at for event in first]
    assert stamps == sorted(set(stamps))


def test_each_event_holds_the_statuses_of_pod_and_containers_at_that_moment(client: Client) -> None:
    with following(client) as stream:
        sandbox = client.run()
        pod_status = client.pod_status(sandbox)
        container = client.create(sandbox)
        client.start(container)
        running = client.status(container)
        client.stop(container)
        exited = client.status(container)
        client.remove(container)
        client.remove_pod(sandbox)
        told = taken(stream, 8)
    for event in told:
        assert event.pod_sandbox_status.metadata == pod_status.metadata
        assert event.pod_sandbox_status.id == sandbox
    assert [event.pod_sandbox_status.state for event in told] == [pb.SANDBOX_READY] * 6 + [pb.SANDBOX_NOTREADY] * 2
    assert told[0].pod_sandbox_status == pod_status
    statuses = [list(event.containers_statuses) for event in told]
    assert statuses[:2] == statuses[6:] == [[], []]
    assert [[one.state for one in pod] for pod in statuses[2:6]] == [
        [pb.CONTAINER_CREATED],
        [pb.CONTAINER_RUNNING],
        [pb.CONTAINER_EXITED],
        [pb.CONTAINER_EXITED],
    ]
    assert statuses[3] == [running]
    assert statuses[4] == statuses[5] == [exited]


def test_a_guest_that_shuts_itself_down_sends_an_event_without_any_call(client: Client, world: World) -> None:
    _, container = client.running()
    (vm,) = world.records.containers.all()
    with following(client) as stream:
        world.outside.vms.end(world.domain(vm.id), OffReason.SHUTDOWN)
        event = next(stream)
    assert (event.container_id, event.container_event_type) == (container, STOPPED)
    (status,) = event.containers_statuses
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 0, "Completed")


def test_the_ends_of_twenty_vms_send_events_while_the_reset_of_one_device_hangs(client: Client, world: World) -> None:
    node = "/dev/vfio/7"
    world.outside.devices.add_function(node, "0000:3b:00.1")
    gate = world.journal.hold("drivers.reset")
    device = pb.Device(host_path=node, container_path=node, permissions="rw")
    hung = client.create(client.run("hung"), devices=[device])
    client.start(hung)
    containers = [hung, *(client.running(f"pod-{n}")[1] for n in range(19))]
    with following(client) as stream:
        for vm in world.records.containers.all():
            world.outside.vms.end(world.domain(vm.id), OffReason.SHUTDOWN)
        told = {next(stream).container_id for _ in containers}
    gate.wait()
    assert told == set(containers)
    assert client.status(hung).state == pb.CONTAINER_EXITED
    gate.open()


def test_a_client_that_goes_frees_its_place_at_once(client: Client, world: World) -> None:
    with following(client):
        assert world.app.services.events.has_listeners
    until(lambda: not world.app.services.events.has_listeners, "the subscription of a client that left is still there")


def test_a_connection_that_breaks_frees_its_place(client: Client, world: World) -> None:
    other = Client(client.address.removeprefix("unix:"))
    stream = other.GetContainerEvents(pb.GetEventsRequest())
    stream.initial_metadata()
    other.channel.close()
    until(lambda: not world.app.services.events.has_listeners, "the subscription of a broken connection is still there")


def test_streams_leave_threads_for_calls(tmp_path: Path) -> None:
    with served(tmp_path, cri={"max_calls": 8}) as (world, client, _), contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(following(client))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "2 clients already follow events"):
            list(client.GetContainerEvents(pb.GetEventsRequest()))
        assert client.Version(pb.VersionRequest()).runtime_name == "virtshim"
        stack.close()
        until(lambda: not world.app.services.events.has_listeners, "no place was freed")
        with following(client):
            pass


# Large enough that a client that does not read soon blocks the server in the middle of a message.
BIG = {"example.com/big": "x" * (511 << 10)}


def test_a_client_that_does_not_read_is_dropped_with_an_error_and_holds_nobody_up(world: World, client: Client) -> None:
    world.app.services.events.room = 8
    with following(client) as slow, following(client) as quick:
        expected = []
        for n in range(12):
            sandbox = client.run(f"pod-{n}", annotations=BIG)
            expected += [(sandbox, CREATED), (sandbox, STARTED)]
            assert [(e.container_id, e.container_event_type) for e in taken(quick, 2)] == expected[-2:]
        read = []
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "fell 8 events behind and was dropped"):
            read.extend((event.container_id, event.container_event_type) for event in slow)
    assert read == expected[: len(read)], "what it did get has no gaps"
    assert len(read) < len(expected)


def test_clients_that_never_read_again_lose_their_threads_too(tmp_path: Path) -> None:
    with served(tmp_path, cri={"max_calls": 8}) as (world, client, _), contextlib.ExitStack() as stack:
        world.app.services.events.room, world.app.services.events.grace = 2, 0.05
        for n in range(8):  # as many as there are threads
            stack.enter_context(following(client))
            for pod in range(8):
                client.run(f"pod-{n}-{pod}", annotations=BIG)
            assert not world.app.services.events.has_listeners
        assert client.Version(pb.VersionRequest()).runtime_name == "virtshim"


def test_a_client_that_is_dropped_while_the_system_has_no_thread_fails_no_call_of_others(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", no_thread)
    world.app.services.events.room = 2
    with following(client) as slow:
        for n in range(8):
            client.run(f"pod-{n}", annotations=BIG)
        assert not world.app.services.events.has_listeners
        with pytest.raises(grpc.RpcError):
            list(slow)


def test_a_stopping_server_ends_event_streams_at_once_as_unavailable(world: World, tmp_path: Path) -> None:
    settings = world.settings.model_copy(update={"cri": Cri(socket=str(tmp_path / "s"))})
    server = world.app.server(settings)
    server.start()
    client = Client(settings.cri_socket)
    with following(client) as stream:
        server.stop(grace=WAIT_LIMIT)  # at its end it would cut the stream off silently
        with refused(grpc.StatusCode.UNAVAILABLE, "virtshim is stopping"):
            next(stream)
    client.channel.close()
