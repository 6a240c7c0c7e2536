"""The Stream* calls return the same items as the plain lists, and end."""

from typing import Any

import grpc
import pytest
from fakes.cri import Client
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc

pytestmark = pytest.mark.cri


def sandboxes(client: Client, **wanted: Any) -> list[list[pb.PodSandbox]]:
    request = pb.StreamPodSandboxesRequest(filter=pb.PodSandboxFilter(**wanted))
    return [list(answer.pod_sandboxes) for answer in client.StreamPodSandboxes(request)]


def containers(client: Client, **wanted: Any) -> list[list[pb.Container]]:
    request = pb.StreamContainersRequest(filter=pb.ContainerFilter(**wanted))
    return [list(answer.containers) for answer in client.StreamContainers(request)]


def images(client: Client, name: str = "") -> list[list[pb.Image]]:
    request = pb.StreamImagesRequest(filter=pb.ImageFilter(image=pb.ImageSpec(image=name)))
    return [list(answer.images) for answer in client.StreamImages(request)]


def test_an_empty_node_streams_nothing_and_ends(client: Client, world: World) -> None:
    world.images.remove(world.images.all()[0].digest.value)
    assert (sandboxes(client), containers(client), images(client)) == ([], [], [])


def test_a_stream_holds_what_the_list_holds_in_the_same_order(client: Client) -> None:
    for name in ("one", "two", "three"):
        client.running(name)
    client.pull()
    assert sandboxes(client) == [client.pods()]
    assert containers(client) == [client.containers()]
    assert images(client) == [list(client.ListImages(pb.ListImagesRequest()).images)]


def test_many_bytes_come_in_several_messages_and_each_item_once(client: Client) -> None:
    big = {"example.com/big": "x" * (400 << 10)}
    made = [client.create(client.run(f"pod-{n}", annotations=big), annotations=big) for n in range(5)]
    assert [len(batch) for batch in sandboxes(client)] == [2, 2, 1]
    streamed = containers(client)
    assert [len(batch) for batch in streamed] == [2, 2, 1]
    assert [item.id for batch in streamed for item in batch] == made


def test_a_client_with_grpcs_limit_of_4_mib_can_stream_a_list_that_is_larger(client: Client) -> None:
    big = {"example.com/big": "x" * (500 << 10)}
    for n in range(10):
        client.run(f"pod-{n}", annotations=big)
    with grpc.insecure_channel(client.address) as channel:
        small = api_pb2_grpc.RuntimeServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            small.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=20)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answers = list(small.StreamPodSandboxes(pb.StreamPodSandboxesRequest(), timeout=20))
    assert sum(len(answer.pod_sandboxes) for answer in answers) == 10


def test_filters_work_as_in_the_plain_lists(client: Client) -> None:
    labels = {"app": "db"}
    wanted = client.run("db", labels=labels)
    made = client.create(wanted, "db", labels=labels)
    other, running = client.running("web")
    client.stop_pod(other)

    def pods(**by: Any) -> list[str]:
        return [item.id for batch in sandboxes(client, **by) for item in batch]

    def vms(**by: Any) -> list[str]:
        return [item.id for batch in containers(client, **by) for item in batch]

    assert pods(id=wanted[:12]) == pods(label_selector=labels) == [wanted]
    assert pods(state=pb.PodSandboxStateValue(state=pb.SANDBOX_NOTREADY)) == [other]
    assert pods(id=wanted, state=pb.PodSandboxStateValue(state=pb.SANDBOX_NOTREADY)) == []
    assert vms(id=made[:12]) == vms(label_selector=labels) == vms(pod_sandbox_id=wanted) == [made]
    assert vms(state=pb.ContainerStateValue(state=pb.CONTAINER_EXITED)) == [running]
    (image,) = client.ListImages(pb.ListImagesRequest()).images
    assert images(client, image.repo_tags[0]) == images(client, image.id) == [[image]]
    assert images(client, "registry.test/not/here:1") == []
