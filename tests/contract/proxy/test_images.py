"""The proxy routes each image call to the right runtime."""

import signal

import grpc
import pytest
from fakes.cri import Client, pod, refused
from fakes.journal import WAIT_LIMIT
from fakes.kubelet_calls import Kubelet, KubeletPod
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime, Refusal
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy

TARGET = "kubernetes.io/target-runtime"


def pull(client: Client, image: str, sandbox: pb.PodSandboxConfig | None = None, handler: str = "") -> None:
    spec = pb.ImageSpec(image=image, runtime_handler=handler)
    client.PullImage(pb.PullImageRequest(image=spec, sandbox_config=sandbox))


def image_of(client: Client, name: str, **fields: object) -> pb.Image | None:
    answer = client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=name, **fields)))
    return answer.image if answer.HasField("image") else None


def test_the_image_name_decides_where_a_pull_goes(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    pull(client, "virtlet.cloud/cirros")
    pull(client, "docker.io/library/busybox")
    assert [len(runtime.asked("PullImage")) for runtime in (primary, other)] == [1, 1]
    assert pb.PullImageRequest.FromString(other.calls[0].request).image.image == "virtlet.cloud/cirros"


def test_a_pull_goes_to_the_runtime_of_its_handler(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    pull(client, "quay.io/disk", handler="vm")
    assert other.images
    assert not primary.images


def test_a_manual_pull_goes_to_the_runtime_in_the_images_annotation(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    spec = pb.ImageSpec(image="quay.io/disk", annotations={TARGET: "other"})
    client.PullImage(pb.PullImageRequest(image=spec))
    assert other.images
    assert not primary.images


def test_a_pull_goes_to_the_runtime_of_its_pods_annotation(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    pull(client, "quay.io/disk", pod(annotations={TARGET: "other"}))
    assert other.images
    assert not primary.images


def test_a_pull_goes_to_the_runtime_of_its_pod(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    """kubelet does not repeat the handler."""
    client.run("vm-pod", handler="vm")
    pull(client, "quay.io/disk", pod("vm-pod"))
    assert other.images
    assert not primary.images


def test_a_pull_goes_to_the_runtime_of_a_pod_that_the_proxy_has_not_seen_start(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    other.add_pod(pod("older").metadata)
    primary.add_pod(pod("another").metadata)
    pull(client, "quay.io/disk", pod("older"))
    assert other.images
    assert not primary.images


def test_a_pull_for_an_unknown_pod_goes_to_the_primary(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    pull(client, "quay.io/disk", pod("nowhere"))
    assert primary.images


def test_an_image_of_one_runtime_for_a_pod_of_another_is_refused(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    client.run("plain")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "give the pod the annotation kubernetes.io/target-runtime=other"):
        pull(client, "virtlet.cloud/cirros", pod("plain"))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "virtlet.cloud/cirros belongs to the runtime other by its name"):
        pull(client, "virtlet.cloud/cirros", handler="runc")


def test_the_status_of_an_image_comes_from_the_runtime_that_has_it(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.add_image("sha256:1", "busybox")
    other.add_image("sha256:2", "disk")
    for name in ("busybox", "sha256:1", "disk", "sha256:2"):
        assert image_of(client, name), name
    assert image_of(client, "absent") is None


def test_an_image_of_both_runtimes_is_listed_twice(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    primary.add_image("sha256:1", "same")
    other.add_image("sha256:2", "same")
    assert [one.id for one in client.ListImages(pb.ListImagesRequest()).images] == ["sha256:1", "sha256:2"]
    status = image_of(client, "same")
    assert status
    assert status.id == "sha256:1"
    status = image_of(client, "same", runtime_handler="vm")
    assert status
    assert status.id == "sha256:2"


# --- an image name that both know, in kubelet's order of calls


@pytest.fixture
def kubelet(client: Client, primary: FakeRuntime, other: FakeRuntime) -> Kubelet:
    """A kubelet in front of two runtimes that refuse containers whose image they lack."""
    primary.needs_images = other.needs_images = True
    return Kubelet(client.runtime, client.image)


def test_a_pod_gets_its_own_runtimes_image_if_both_runtimes_have_that_name(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.add_image("sha256:primary", "disk")
    vm = KubeletPod(kubelet, "vm", "vm")
    vm.run()
    container = vm.start("main", "disk")
    assert other.containers[container].image.image == "sha256:other"
    assert not primary.asked("PullImage")


def test_an_image_that_only_the_other_runtime_has_is_pulled_for_the_pods_runtime(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    other.add_image("sha256:other", "disk")
    web = KubeletPod(kubelet, "web")
    web.run()
    assert primary.containers[web.start("main", "disk")].image.image == "sha256:primary"


def test_pods_of_both_runtimes_use_their_own_image_of_one_name(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    pods = [KubeletPod(kubelet, f"pod-{number}", "vm" if number % 2 else "") for number in range(6)]
    for one in pods:
        one.run()
    for number, one in enumerate(pods):
        runtime = other if number % 2 else primary
        assert runtime.containers[one.start("main", "disk")].image.image == f"sha256:{runtime.name}"


def test_an_image_volume_comes_from_the_pods_own_runtime(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.add_image("sha256:primary", "files")
    vm = KubeletPod(kubelet, "vm", "vm")
    vm.run()
    vm.start("main", "disk", volumes=["files"])
    (request,) = (pb.CreateContainerRequest.FromString(one.request) for one in other.asked("CreateContainer"))
    assert request.config.mounts[0].image.image == "sha256:other"


def test_a_pod_with_edited_annotations_gets_its_own_runtimes_image(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.add_image("sha256:primary", "disk")
    vm = KubeletPod(kubelet, "vm", "vm")
    vm.run()
    vm.annotations["team"] = "storage"
    assert vm.start("main", "disk") in other.containers


def test_a_restarted_proxy_knows_which_runtimes_image_a_pod_wants(
    proxy: Proxy, client: Client, kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.add_image("sha256:primary", "disk")
    vm = KubeletPod(kubelet, "vm", "vm")
    vm.run()
    proxy.stop(signal.SIGKILL)
    proxy.start()
    wait_until(lambda: _answers(client), WAIT_LIMIT, "the proxy is reached again")
    assert vm.start("main", "disk") in other.containers


def _answers(client: Client) -> bool:
    try:
        client.pods()
    except grpc.RpcError:
        return False
    return True


def test_a_restarted_kubelets_container_of_the_wrong_runtimes_image_is_refused_once(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """A restarted kubelet notes a new time at which it first saw the pod, and no runtime knows that time."""
    primary.add_image("sha256:primary", "disk:latest")
    vm = KubeletPod(kubelet, "vm", "vm")
    vm.run()
    vm.see()
    with refused(grpc.StatusCode.NOT_FOUND, "other has no image sha256:primary"):
        vm.start("main", "disk")
    assert vm.start("main", "disk") in other.containers
    assert not primary.asked("PullImage")


def test_an_image_name_of_another_runtime_is_refused_before_kubelet_finds_it_present(
    kubelet: Kubelet, primary: FakeRuntime, other: FakeRuntime
) -> None:
    other.add_image("sha256:other", "virtlet.cloud/cirros")
    web = KubeletPod(kubelet, "web")
    web.run()
    with refused(
        grpc.StatusCode.INVALID_ARGUMENT, "belongs to the runtime other by its name, but the pod runs on primary"
    ):
        web.start("main", "virtlet.cloud/cirros")


def test_a_runtime_that_rejects_the_image_name_counts_as_lacking_the_image(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.answers["ImageStatus"] = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "no reference: Upper/Case.qcow2")
    assert image_of(client, "host/Upper/Case.qcow2") is None
    other.answers["ImageStatus"] = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "no URL")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "no reference"):
        image_of(client, "host/Upper/Case.qcow2")


@pytest.mark.parametrize("name", ["sha256:2", "disk"])
def test_an_image_is_removed_from_the_runtime_that_has_it(
    client: Client, primary: FakeRuntime, other: FakeRuntime, name: str
) -> None:
    primary.add_image("sha256:1", "busybox")
    other.add_image("sha256:2", "disk")
    client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=name)))
    assert (list(primary.images), list(other.images)) == (["sha256:1"], [])
    client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=name)))


def test_an_image_of_both_runtimes_is_removed_from_both(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    for runtime in (primary, other):
        runtime.add_image("sha256:1", "same")
    client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image="same")))
    assert (primary.images, other.images) == ({}, {})


def test_the_image_field_has_the_same_number_in_all_requests() -> None:
    requests = (pb.PullImageRequest, pb.ImageStatusRequest, pb.RemoveImageRequest)
    assert len({one.DESCRIPTOR.fields_by_name["image"].number for one in requests}) == 1
