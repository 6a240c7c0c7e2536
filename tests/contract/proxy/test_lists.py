"""The proxy merges the lists and streams of all runtimes."""

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.journal import WAIT_LIMIT
from fakes.runtime import FakeRuntime, Refusal
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.wire import METHODS, Shape

pytestmark = pytest.mark.proxy

MERGED = [method.name for method in METHODS.values() if method.shape is Shape.LISTS]


def test_lists_have_the_items_of_both_runtimes_primary_first(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    pods = [primary.add_pod(), primary.add_pod(), other.add_pod()]
    containers = [primary.add_container(pods[0]), other.add_container(pods[2])]
    assert [one.id for one in client.pods()] == pods
    assert [one.id for one in client.containers()] == containers
    mounts = [one.fs_id.mountpoint for one in client.ImageFsInfo(pb.ImageFsInfoRequest()).image_filesystems]
    assert mounts == ["/primary", "/other"]


def test_the_first_image_and_container_file_systems_are_the_primarys(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """The primary here, like containerd 1.6, has one file system for both and leaves the second field empty."""
    theirs = pb.ImageFsInfoResponse()
    theirs.image_filesystems.add(fs_id=pb.FilesystemIdentifier(mountpoint="/images"))
    theirs.container_filesystems.add(fs_id=pb.FilesystemIdentifier(mountpoint="/disks"))
    other.answers["ImageFsInfo"] = theirs.SerializeToString()
    answer = client.ImageFsInfo(pb.ImageFsInfoRequest())
    assert [one.fs_id.mountpoint for one in answer.image_filesystems] == ["/primary", "/images"]
    assert [one.fs_id.mountpoint for one in answer.container_filesystems] == ["/primary", "/disks"]


def test_unknown_fields_of_a_future_cri_stay_in_lists(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    """An unknown field beside the list, and one inside an item."""
    item = b"\x0a\x09\x0a\x02id\xfa\x3e\x02ab"
    primary.answers["ListPodSandbox"] = item + b"\xfa\x3e\x03abc"
    answer = client.channel.unary_unary("/runtime.v1.RuntimeService/ListPodSandbox")(b"", timeout=20)
    assert answer == item + b"\xfa\x3e\x03abc"


@pytest.mark.parametrize("name", MERGED)
def test_a_list_is_unimplemented_if_one_runtime_lacks_it(
    client: Client, primary: FakeRuntime, other: FakeRuntime, name: str
) -> None:
    """kubelet then falls back to another call; half a list would be wrong."""
    primary.answers[name] = lambda *_: b""
    other.answers[name] = Refusal(grpc.StatusCode.UNIMPLEMENTED, "not yet")
    with refused(grpc.StatusCode.UNIMPLEMENTED, "not yet"):
        path = next(path for path in METHODS if path.endswith(f"/{name}"))
        client.channel.unary_unary(path)(b"", timeout=20)


def test_a_list_fails_if_one_runtime_fails_it(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    other.answers["ListContainers"] = Refusal(grpc.StatusCode.INTERNAL, "the database is broken")
    with refused(grpc.StatusCode.INTERNAL, "^the database is broken$"):
        client.containers()


def test_a_filter_by_a_known_id_asks_only_its_owner(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    sandbox = client.run(handler="vm")
    container = client.create(sandbox)
    assert [one.id for one in client.pods(id=sandbox)] == [sandbox]
    assert [one.id for one in client.containers(pod_sandbox_id=sandbox)] == [container]
    assert not primary.calls


def test_the_filter_field_has_the_same_number_in_all_list_requests() -> None:
    """The proxy finds the filter by that number alone."""
    messages = pb.DESCRIPTOR.message_types_by_name.values()
    requests = [one for one in messages if one.name.startswith(("List", "Stream")) and one.name.endswith("Request")]
    numbers = [one.fields_by_name["filter"].number for one in requests if "filter" in one.fields_by_name]
    assert len(numbers) > 5
    assert len(set(numbers)) == 1


def test_a_metric_is_described_once(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    for runtime, names in ((primary, ["cpu", "memory"]), (other, ["cpu", "vm"])):
        described = [pb.MetricDescriptor(name=name, help=runtime.name) for name in names]
        runtime.answers["ListMetricDescriptors"] = pb.ListMetricDescriptorsResponse(
            descriptors=described
        ).SerializeToString()
    answer = client.ListMetricDescriptors(pb.ListMetricDescriptorsRequest())
    assert [(one.name, one.help) for one in answer.descriptors] == [
        ("cpu", "primary"), ("memory", "primary"), ("vm", "other"),
    ]  # fmt: skip


def test_a_streamed_list_has_the_messages_of_all_runtimes(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    pods = [primary.add_pod(), primary.add_pod(), other.add_pod(), other.add_pod()]
    pieces = client.runtime.StreamPodSandboxes(pb.StreamPodSandboxesRequest(), timeout=20)
    assert [one.id for piece in pieces for one in piece.pod_sandboxes] == pods


def test_a_streamed_list_is_unimplemented_at_once_if_one_runtime_lacks_it(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.add_pod()
    other.answers["StreamPodSandboxes"] = Refusal(grpc.StatusCode.UNIMPLEMENTED, "no pieces here")
    with refused(grpc.StatusCode.UNIMPLEMENTED, "no pieces here"):
        next(client.runtime.StreamPodSandboxes(pb.StreamPodSandboxesRequest(), timeout=20))


def test_events_of_all_runtimes_reach_every_listener(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    streams = [client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=WAIT_LIMIT) for _ in range(3)]
    wait_until(lambda: len(primary.listeners) == len(other.listeners) == 3, WAIT_LIMIT, "all listen")
    for number in range(50):
        (primary, other)[number % 2].tell(str(number))
    for stream in streams:
        told = [next(stream).container_id for _ in range(50)]
        assert sorted(told, key=int) == [str(number) for number in range(50)]
        for of_one in (0, 1):  # what one runtime tells comes in its order
            assert [one for one in told if int(one) % 2 == of_one] == [str(number) for number in range(of_one, 50, 2)]
        stream.cancel()
    wait_until(lambda: not primary.listeners and not other.listeners, WAIT_LIMIT, "nobody listens any more")


def test_both_event_streams_end_when_the_listener_leaves(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    stream = client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=WAIT_LIMIT)
    wait_until(lambda: len(primary.listeners) == len(other.listeners) == 1, WAIT_LIMIT, "it listens")
    stream.cancel()
    wait_until(lambda: not primary.listeners and not other.listeners, WAIT_LIMIT, "nobody listens any more")


def test_events_are_unimplemented_if_one_runtime_lacks_them(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.answers["GetContainerEvents"] = Refusal(grpc.StatusCode.UNIMPLEMENTED, "no events")
    with refused(grpc.StatusCode.UNIMPLEMENTED, "no events"):
        next(client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=20))
