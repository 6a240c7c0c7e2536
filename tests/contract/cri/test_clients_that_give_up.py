"""If a client gives up at any step of its call, the call continues, a repeated call succeeds, and nothing is lost."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, container, pod, refused
from fakes.lifecycle import CALLS, again, clear, new_name, picture, prepared, steps_of
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InternalError

pytestmark = pytest.mark.cri

Code = grpc.StatusCode


@pytest.mark.parametrize("rpc", list(CALLS))
def test_a_client_may_leave_at_any_step_of_its_call(shared: tuple[World, Client], rpc: str) -> None:
    world, client = shared
    for step in steps_of(world, client, rpc):
        name = new_name()
        request = prepared(world, client, rpc, name)
        gate = world.journal.hold(step)
        call = getattr(client.runtime, rpc).future(request)
        gate.wait()
        call.cancel()
        assert len(client.pods()) <= 1, step  # lists answer, whatever is under way
        repeat = Background(lambda request=request: again(client, rpc, request))
        gate.open()
        repeat.done()
        assert picture(client, name) == CALLS[rpc].after, step
        clear(client)
        assert world.everything() == world.leftovers() == [], step


@pytest.mark.parametrize("rpc", ["RunPodSandbox", "CreateContainer"])
def test_a_repeated_call_returns_the_id_that_the_departed_client_missed(shared: tuple[World, Client], rpc: str) -> None:
    world, client = shared
    request = CALLS[rpc].request(client, "late")
    table = "sandboxes" if rpc == "RunPodSandbox" else "containers"
    gate = world.journal.hold(f"records.{table}.replace")  # its last step
    call = getattr(client.runtime, rpc).future(request)
    gate.wait()
    call.cancel()
    gate.open()
    first = getattr(client, rpc)(request)
    assert getattr(client, rpc)(request) == first
    assert picture(client, "late") == CALLS[rpc].after
    clear(client)


@pytest.mark.parametrize("rpc", ["RunPodSandbox", "CreateContainer"])
def test_a_name_is_taken_while_its_call_is_in_progress(shared: tuple[World, Client], rpc: str) -> None:
    world, client = shared
    request = CALLS[rpc].request(client, "slow")
    other = type(request).FromString(request.SerializeToString())
    other.config.annotations["a"] = "different"
    step = "networks.attach" if rpc == "RunPodSandbox" else "disks.create"
    gate = world.journal.hold(step)
    first = Background(lambda: getattr(client, rpc)(request))
    gate.wait()
    with refused(Code.ALREADY_EXISTS, "different configuration"):
        getattr(client, rpc)(other)
    repeats = [Background(lambda: getattr(client, rpc)(request)) for _ in range(5)]
    gate.open()
    assert [repeat.done() for repeat in repeats] == [first.done()] * 5
    assert picture(client, "slow") == CALLS[rpc].after
    clear(client)


@pytest.mark.parametrize(("rpc", "step"), [("RunPodSandbox", "networks.attach"), ("CreateContainer", "disks.create")])
def test_a_failed_call_fails_for_all_clients_that_joined_it_and_frees_its_name(
    shared: tuple[World, Client], rpc: str, step: str
) -> None:
    world, client = shared
    request = CALLS[rpc].request(client, "unlucky")
    before = picture(client, "unlucky")
    world.journal.fail(step, InternalError("it broke"), after=True)
    gate = world.journal.hold(step)
    calls = [Background(lambda: getattr(client, rpc)(request))]
    gate.wait()
    calls += [Background(lambda: getattr(client, rpc)(request)) for _ in range(3)]
    gate.open()
    failed = 0
    for call in calls:
        try:
            call.done()
        except grpc.RpcError as error:
            assert (error.code(), error.details()) == (Code.INTERNAL, "it broke")
            failed += 1
    assert failed >= 1  # the next call after its end created it again
    if failed == len(calls):
        assert picture(client, "unlucky") == before
    getattr(client, rpc)(request)
    assert picture(client, "unlucky") == CALLS[rpc].after
    clear(client)
    assert world.everything() == []


@pytest.mark.parametrize("seconds", [0.001, 0.003, 0.01, 0.05, 2.0])
def test_a_pod_life_cycle_works_if_every_call_is_cut_short_and_repeated(
    shared: tuple[World, Client], seconds: float
) -> None:
    world, client = shared
    name = new_name()

    def twice(rpc: str, request: Any) -> Any:
        try:
            return getattr(client, rpc)(request, timeout=seconds)
        except grpc.RpcError as error:
            assert error.code() is Code.DEADLINE_EXCEEDED, error.details()
        return again(client, rpc, request) or None

    def by_id(rpc: str, **ids: str) -> None:
        twice(rpc, getattr(pb, f"{rpc}Request")(**ids))

    twice("PullImage", pb.PullImageRequest(image=pb.ImageSpec(image=container().image.image)))
    twice("RunPodSandbox", pb.RunPodSandboxRequest(config=pod(name)))
    sandbox = client.run(name)
    twice("CreateContainer", pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container()))
    made = client.create(sandbox)
    by_id("StartContainer", container_id=made)
    by_id("ContainerStatus", container_id=made)
    by_id("PodSandboxStatus", pod_sandbox_id=sandbox)
    assert picture(client, name) == "ready running"
    by_id("StopContainer", container_id=made)
    assert picture(client, name) == "ready exited"
    by_id("RemoveContainer", container_id=made)
    by_id("StopPodSandbox", pod_sandbox_id=sandbox)
    by_id("RemovePodSandbox", pod_sandbox_id=sandbox)
    assert (picture(client, name), world.everything()) == ("", [])
