"""StopContainer and RemoveContainer keep their grace periods when stops overlap and clients leave."""

from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, refused
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.ids import ContainerId

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
NODE = pb.NamespaceMode.Value("NODE")


def domain(world: World, made: str) -> Any:
    return world.domain(ContainerId(made))


def test_a_running_container_is_removed_by_force(client: Client, world: World) -> None:
    sandbox, made = client.running()
    client.remove(made)
    client.remove_pod(sandbox)
    assert world.everything() == []


def test_a_negative_grace_period_counts_as_no_grace_period(client: Client) -> None:
    _, made = client.running()
    client.stop(made, -5)
    assert client.status(made).message == "killed: no grace period"


def test_a_guest_that_ignores_shutdown_is_killed_after_the_grace_period(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    client.stop(made, 45)
    status = client.status(made)
    assert (status.exit_code, status.reason) == (137, "Error")
    assert "within 45 s" in status.message


def test_after_a_stop_times_out_a_stop_without_grace_period_kills_the_guest(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after, world.outside.clock.held = None, True
    with refused(Code.DEADLINE_EXCEEDED):
        client.StopContainer(pb.StopContainerRequest(container_id=made, timeout=3600), timeout=0.2)
    assert client.status(made).state == pb.CONTAINER_RUNNING
    client.stop(made, 0)
    assert client.status(made).state == pb.CONTAINER_EXITED


def test_lists_and_status_answer_while_many_stops_wait(client: Client, world: World) -> None:
    made = [client.running(f"pod-{n}")[1] for n in range(12)]
    world.outside.vms.shuts_down_after, world.outside.clock.held = None, True
    stops = [Background(lambda one=one: client.stop(one, 3600)) for one in made]
    world.outside.clock.until_waiting(12)
    assert len(client.containers()) == len(client.pods()) == 12
    client.Status(pb.StatusRequest())
    for one in made:
        client.stop(one, 0)
    for stop in stops:
        stop.done()


def test_a_second_stop_with_a_shorter_grace_wins_over_the_wire(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.held = True
    first = Background(lambda: client.stop(made, 600))
    world.outside.clock.until_waiting()
    second = Background(lambda: client.stop(made, 0))
    first.done()
    second.done()
    status = client.status(made)
    assert (status.state, status.exit_code, status.message) == (pb.CONTAINER_EXITED, 137, "killed: no grace period")


def test_a_second_stop_with_a_longer_grace_changes_nothing_over_the_wire(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.held = True
    first = Background(lambda: client.stop(made, 30))
    world.outside.clock.until_waiting()
    second = Background(lambda: client.stop(made, 3600))
    world.outside.clock.advance(30)
    first.done()
    second.done()
    assert "within 30 s" in client.status(made).message


def test_a_stop_continues_after_its_client_gave_up_and_a_repeat_joins_it(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.held = True
    request = pb.StopContainerRequest(container_id=made, timeout=60)
    given_up = client.runtime.StopContainer.future(request, timeout=20.0)
    world.outside.clock.until_waiting()
    given_up.cancel()
    assert client.status(made).state == pb.CONTAINER_RUNNING
    repeat = Background(lambda: client.stop(made, 60))
    world.outside.clock.advance(60)
    repeat.done()
    assert client.status(made).exit_code == 137
    assert world.journal.count("vms.destroy") == 1
