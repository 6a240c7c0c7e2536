"""CheckpointContainer writes an archive while the container keeps running, and refuses what it cannot write."""

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.cri

Code = grpc.StatusCode


def checkpoint(client: Client, container: str, location: str = "/checkpoints/x.tar", timeout: int = 30) -> None:
    client.CheckpointContainer(
        pb.CheckpointContainerRequest(container_id=container, location=location, timeout=timeout)
    )


def test_a_checkpoint_is_written_and_the_container_keeps_running(client: Client, world: World) -> None:
    _, made = client.running()
    checkpoint(client, made[:20])
    checkpoint(client, made, "/checkpoints/y.tar", 0)
    assert set(world.outside.archives.finished) == {"/checkpoints/x.tar", "/checkpoints/y.tar"}
    assert client.status(made).state == pb.CONTAINER_RUNNING
    assert client.status(made).message == ""


@pytest.mark.parametrize("location", ["", "relative/x.tar"])
def test_a_bad_location_is_refused(client: Client, location: str) -> None:
    _, made = client.running()
    with refused(Code.INVALID_ARGUMENT, "location"):
        checkpoint(client, made, location)


def test_a_negative_time_is_refused(client: Client) -> None:
    _, made = client.running()
    with refused(Code.INVALID_ARGUMENT, "timeout"):
        checkpoint(client, made, timeout=-1)


def test_a_checkpoint_needs_an_existing_running_container(client: Client) -> None:
    with refused(Code.NOT_FOUND):
        checkpoint(client, "f" * 64)
    with refused(Code.FAILED_PRECONDITION, "only a running container"):
        checkpoint(client, client.create(client.run()))


@pytest.mark.parametrize(
    ("call", "request_"),
    [("CheckpointPod", pb.CheckpointPodRequest()), ("RestorePod", pb.RestorePodRequest())],
)
def test_checkpoints_of_whole_pods_are_unimplemented(client: Client, call: str, request_: object) -> None:
    with refused(Code.UNIMPLEMENTED):
        getattr(client, call)(request_)
