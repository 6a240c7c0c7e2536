"""A container whose record cannot be read is shown as unknown, and can be stopped and removed."""

import json

import grpc
import pytest
from fakes.changed import changed
from fakes.cri import Client
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.container import ContainerPhase
from virtshim.model.ids import ContainerId, SandboxId

WHY = "a container record in the state database is unreadable at config"


@pytest.fixture
def unknown(world: World) -> tuple[SandboxId, ContainerId]:
    """An unreadable container whose VM runs."""
    sandbox, container = world.running()
    record = changed(world.container(container), phase=ContainerPhase.UNKNOWN, trouble=WHY)
    world.records.containers.put(record)
    return sandbox, container


def test_an_unreadable_container_is_listed_with_the_reason(
    client: Client, unknown: tuple[SandboxId, ContainerId]
) -> None:
    (listed,) = client.ListContainers(pb.ListContainersRequest()).containers
    assert (listed.id, listed.state) == (unknown[1].value, pb.CONTAINER_UNKNOWN)
    request = pb.ContainerStatusRequest(container_id=unknown[1].value, verbose=True)
    answer = client.ContainerStatus(request)
    assert (answer.status.state, answer.status.message) == (pb.CONTAINER_UNKNOWN, WHY)


@pytest.mark.parametrize("rpc", ["StartContainer", "ExecSync", "ReopenContainerLog", "CheckpointContainer"])
def test_calls_that_need_an_unreadable_record_are_refused(
    client: Client, unknown: tuple[SandboxId, ContainerId], rpc: str
) -> None:
    arguments = {"ExecSync": {"cmd": ["true"]}, "CheckpointContainer": {"location": "/tmp/x.tar"}}.get(rpc, {})
    request = getattr(pb, f"{rpc}Request")(container_id=unknown[1].value, **arguments)
    with pytest.raises(grpc.RpcError) as refused:
        getattr(client, rpc)(request)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "unknown" in refused.value.details()


def test_stop_ends_the_vm_of_an_unreadable_container_and_removal_leaves_nothing(
    world: World, client: Client, unknown: tuple[SandboxId, ContainerId]
) -> None:
    client.StopContainer(pb.StopContainerRequest(container_id=unknown[1].value, timeout=10))
    assert world.outside.vms.running() == []
    client.RemoveContainer(pb.RemoveContainerRequest(container_id=unknown[1].value))
    assert client.ListContainers(pb.ListContainersRequest()).containers == []
    client.RemovePodSandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=unknown[0].value))
    assert world.everything() == []


def test_the_nodes_status_names_unreadable_records(world: World, client: Client) -> None:
    world.records.containers.unreadable["f" * 64] = WHY
    info = client.Status(pb.StatusRequest(verbose=True)).info
    assert json.loads(info["config"])["unreadable"] == {"f" * 64: WHY}
