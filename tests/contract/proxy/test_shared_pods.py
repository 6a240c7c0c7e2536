"""For a pod that the primary makes and whose VM virtshim runs, the proxy routes each call to the right runtime."""

from typing import Any

import grpc
import pytest
from fakes.cri import container, pod, refused
from fakes.journal import WAIT_LIMIT
from fakes.kubelet_calls import KubeletPod
from fakes.runtime import Refusal
from fakes.shared_pods import DISK, HANDLER, NETNS, Node, creating, done, hangs, status_of
from podclient import wait_until

from criproto.operator_v1 import operator_pb2 as operator
from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.proxy, pytest.mark.helpers]

DOWN = Refusal(grpc.StatusCode.UNAVAILABLE, "tapmanager is not there")


# --- making pods and containers


def test_the_primary_makes_the_pod_after_virtshim_has_checked_it(node: Node) -> None:
    made = node.run(**{"virtshim.io/ports": "22"})
    assert made.sandbox in node.primary.pods
    assert not node.virtshim.pods
    asked = operator.AdoptRequest.FromString(node.admin.asked("Adopt")[0].request)
    assert (asked.sandbox_id, asked.netns, asked.runtime_handler) == ("", "", HANDLER)
    assert pb.PodSandboxConfig.FromString(asked.config) == made.config


def test_a_pod_that_virtshim_refuses_is_not_made(node: Node) -> None:
    node.admin.answers["Adopt"] = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "annotation virtshim.io/ports: 99999")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "virtshim.io/ports: 99999"):
        node.run()
    assert not node.primary.pods


@pytest.mark.parametrize("down", ["virtshim", "tapmanager"])
def test_no_pod_is_made_while_its_vm_could_not_start(node: Node, down: str) -> None:
    if down == "virtshim":
        node.admin.stop()
    else:
        node.admin.answers["Adopt"] = DOWN
    with refused(grpc.StatusCode.UNAVAILABLE, "admin.sock does not adopt the pod"):
        node.run()
    assert not node.primary.pods


def test_a_virtshim_that_is_too_old_to_adopt_is_named(node: Node) -> None:
    del node.admin.answers["Adopt"]
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "older than this proxy.*restart virtshim"):
        node.run()


def test_other_pods_of_the_primary_need_no_virtshim(node: Node) -> None:
    node.admin.stop()
    node.virtshim.stop()
    sandbox = node.client.run(handler="runc")
    node.client.create(sandbox)
    node.client.stop_pod(sandbox)
    assert not node.admin.calls


def test_the_vm_is_virtshims_and_every_other_container_is_the_primarys(node: Node) -> None:
    made = node.run()
    helpers = {made.start("fetch", "busybox"), made.start("proxy", "envoy")}
    vm = made.start("vm", DISK)
    assert set(node.primary.containers) == helpers
    assert set(node.virtshim.containers) == {vm}
    asked = node.virtshim.asked("CreateContainer")[0].request
    assert pb.CreateContainerRequest.FromString(asked).pod_sandbox_id == made.sandbox
    assert [(one.sandbox_id, one.netns, list(one.addresses)) for one in node.adopted()] == [
        (made.sandbox, NETNS, ["10.88.0.7", "fd00::7"])
    ]
    assert pb.PodSandboxConfig.FromString(node.adopted()[0].config) == made.config


def test_a_pods_later_sandbox_is_adopted_at_once(node: Node) -> None:
    """virtshim keeps the pod's root disk while it knows a sandbox of the pod. kubelet may remove the earlier sandbox before it
    creates the VM's container."""
    made = node.run()
    assert not node.adopted()
    made.attempt = 1
    made.run()
    (adopted,) = node.adopted()
    assert (adopted.sandbox_id, adopted.netns) == (made.sandbox, NETNS)
    assert pb.PodSandboxConfig.FromString(adopted.config) == made.config


def test_a_later_sandbox_that_is_not_adopted_at_once_is_adopted_with_the_vm(node: Node) -> None:
    made = node.run()
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary, info={"netNamespaceClosed": True})
    made.attempt = 1
    made.run()
    assert not node.adopted()
    wait_until(lambda: "proxy.pod.not-adopted" in node.proxy.log.read_text(), WAIT_LIMIT, "the log says so")
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary)
    made.start("vm", DISK)
    assert [one.sandbox_id for one in node.adopted()] == [made.sandbox]


def test_helpers_start_before_the_vm_and_never_need_virtshim(node: Node) -> None:
    made = node.run()
    node.virtshim.stop()
    node.admin.stop()
    helper = made.start("proxy", "envoy")
    node.client.stop(helper)
    assert not node.adopted()


def test_a_vm_whose_image_has_no_prefix_is_named_by_an_annotation(node: Node) -> None:
    """The first CreateContainer tells the proxy which image is the VM's. kubelet asks again, and pulls it at virtshim."""
    made = node.run(**{"virtshim.io/vm-container": "fedora"})
    node.virtshim.answers["CreateContainer"] = Refusal(grpc.StatusCode.NOT_FOUND, "no image containerdisks/fedora")
    made.start("helper", "busybox")
    with refused(grpc.StatusCode.NOT_FOUND, "no image containerdisks/fedora"):
        made.start("fedora", "containerdisks/fedora")
    node.virtshim.answers["CreateContainer"] = creating(node.virtshim)
    vm = made.start("fedora", "containerdisks/fedora")
    assert vm in node.virtshim.containers
    assert [one.repo_tags for one in node.virtshim.images.values()] == [["containerdisks/fedora:latest"]]


def test_an_image_that_the_vm_mounts_is_pulled_at_virtshim(node: Node) -> None:
    made = node.run()
    node.virtshim.answers["CreateContainer"] = Refusal(grpc.StatusCode.NOT_FOUND, "no image models/one")
    with refused(grpc.StatusCode.NOT_FOUND, "no image models/one"):
        made.start("vm", DISK, volumes=("models/one",))
    node.virtshim.answers["CreateContainer"] = creating(node.virtshim)
    made.start("vm", DISK, volumes=("models/one",))
    pulled = [pb.PullImageRequest.FromString(one.request).image.image for one in node.virtshim.asked("PullImage")]
    assert "models/one:latest" in pulled


def test_an_ephemeral_container_cannot_share_the_vms_processes(node: Node) -> None:
    made = node.run()
    vm, helper = made.start("vm", DISK), made.start("proxy", "envoy")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, f"target container {vm} .* is the pod's VM.*leave --target out"):
        made.start("debugger", "busybox", target=vm)
    assert made.start("debugger", "busybox", target=helper) in node.primary.containers
    assert made.start("alone", "busybox") in node.primary.containers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"namespaces": [{"type": "network"}]}, "primary names no network namespace .* cannot use the host's network"),
        ({"namespaces": None}, "primary names no network namespace"),
        ({"info": {"netNamespaceClosed": True}}, "the network namespace of the pod sandbox .* is closed"),
        ({"handler": ""}, "primary does not say .* has a handler of virtshim's .*containerd says so, CRI-O does not"),
    ],
)
def test_a_vm_is_refused_in_a_sandbox_of_which_the_primary_does_not_say_enough(
    node: Node, changes: dict[str, Any], says: str
) -> None:
    made = node.run()
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary, **changes)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, says):
        made.start("vm", DISK)
    assert not node.adopted()
    assert not node.virtshim.containers


def test_a_vm_is_refused_in_a_sandbox_that_is_not_ready(node: Node) -> None:
    made = node.run()
    node.primary.pods[made.sandbox].state = pb.SANDBOX_NOTREADY
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "is not ready, so no VM can join it"):
        made.start("vm", DISK)


def test_a_vm_that_virtshim_does_not_adopt_is_not_created(node: Node) -> None:
    made = node.run()
    node.admin.answers["Adopt"] = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "the namespace belongs to pod other")
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "the namespace belongs to pod other"):
        made.start("vm", DISK)
    assert not node.virtshim.asked("CreateContainer")


def test_a_pod_that_names_virtshim_by_the_old_annotation_too_is_refused(node: Node) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "'virtshim-pod' belongs to the runtime primary"):
        node.run(**{"kubernetes.io/target-runtime": "other"})


def test_a_pod_with_a_vm_is_not_checkpointed(node: Node) -> None:
    made = node.run()
    with refused(grpc.StatusCode.UNIMPLEMENTED, "CheckpointPod: a pod with a VM"):
        node.client.CheckpointPod(pb.CheckpointPodRequest(pod_sandbox_id=made.sandbox))
    with refused(grpc.StatusCode.UNIMPLEMENTED, "RestorePod: a pod with a VM"):
        node.client.RestorePod(pb.RestorePodRequest(config=pod(), runtime_handler=HANDLER))


# --- images


def test_images_of_the_vm_are_told_by_their_prefix(node: Node) -> None:
    made = node.run()
    for image, has in ((DISK, node.virtshim), ("busybox", node.primary)):
        made.ensure_image(image, always=True)
        assert [call.method.rpartition("/")[2] for call in has.calls if "Image" in call.method] == [
            "PullImage", "ImageStatus",
        ]  # fmt: skip


def test_an_image_of_both_runtimes_is_the_primarys_in_such_a_pod(node: Node) -> None:
    node.primary.add_image("sha256:one", "both")
    node.virtshim.add_image("sha256:one", "both")
    made = node.run()
    assert made.start("helper", "both") in node.primary.containers


def test_a_new_proxy_routes_images_of_such_a_pod_in_the_same_way(node: Node) -> None:
    made = node.run()
    node.again()
    made.ensure_image(DISK)
    made.ensure_image("busybox")
    assert [one.repo_tags for one in node.virtshim.images.values()] == [[f"{DISK}:latest"]]
    assert [one.repo_tags for one in node.primary.images.values()] == [["busybox:latest"]]


def test_the_handler_in_an_images_spec_is_enough(node: Node) -> None:
    for image in (DISK, "busybox"):
        node.client.PullImage(pb.PullImageRequest(image=pb.ImageSpec(image=image, runtime_handler=HANDLER)))
    assert [one.repo_tags for one in node.virtshim.images.values()] == [[DISK]]
    assert [one.repo_tags for one in node.primary.images.values()] == [["busybox"]]


# --- ending pods


@pytest.mark.parametrize("method", ["StopPodSandbox", "RemovePodSandbox"])
def test_a_pod_ends_at_virtshim_first_and_then_at_the_primary(node: Node, method: str) -> None:
    made = node.run()
    for known in (True, False):
        if not known:
            node.again()
        getattr(node.client.runtime, method)(_request(method, made.sandbox[: 64 if known else 13]), timeout=20)
        assert node.order(method)[-2:] == ["virtshim", "primary"]
        asked = pb.StopPodSandboxRequest.FromString(node.virtshim.asked(method)[-1].request)
        assert asked.pod_sandbox_id == made.sandbox


@pytest.mark.parametrize("method", ["StopPodSandbox", "RemovePodSandbox"])
def test_a_pod_whose_primary_is_down_ends_there_when_the_call_is_repeated(node: Node, method: str) -> None:
    made = node.run()
    node.primary.stop()
    try:
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime primary at .* is not available"):
            getattr(node.client.runtime, method)(_request(method, made.sandbox), timeout=20)
        assert len(node.virtshim.asked(method)) == 1
    finally:
        node.primary.start()
    wait_until(lambda: _ends(node, method, made.sandbox), WAIT_LIMIT, "the primary is back")
    assert node.order(method)[-2:] == ["virtshim", "primary"]


@pytest.mark.parametrize("method", ["StopPodSandbox", "RemovePodSandbox"])
@pytest.mark.parametrize("half", ["virtshim", "primary"])
def test_a_call_that_a_kill_of_the_proxy_cuts_off_is_finished_by_the_repeated_one(
    node: Node, half: str, method: str
) -> None:
    made = node.run()
    runtime = getattr(node, half)
    runtime.answers[method] = hangs
    cut_off = getattr(node.client.runtime, method).future(_request(method, made.sandbox), timeout=WAIT_LIMIT)
    wait_until(lambda: bool(runtime.asked(method)), WAIT_LIMIT, f"{half} is asked")
    node.again()
    assert cut_off.exception().code() is grpc.StatusCode.UNAVAILABLE
    runtime.answers[method] = done
    getattr(node.client.runtime, method)(_request(method, made.sandbox), timeout=20)
    assert node.order(method)[-2:] == ["virtshim", "primary"]


@pytest.mark.parametrize(
    ("of", "method"), [("primary", "PodSandboxStatus"), ("admin", "Adopt"), ("virtshim", "CreateContainer")]
)
def test_a_vm_whose_creation_a_kill_of_the_proxy_cuts_off_is_created_by_the_repeated_call(
    node: Node, of: str, method: str
) -> None:
    made = node.run()
    made.ensure_image(DISK)
    runtime = getattr(node, of)
    told, runtime.answers[method] = runtime.answers[method], hangs
    runtime.calls.clear()
    cut_off = node.client.runtime.CreateContainer.future(_creation(made), timeout=WAIT_LIMIT)
    wait_until(lambda: bool(runtime.asked(method)), WAIT_LIMIT, f"{of} is asked")
    node.again()
    assert cut_off.exception().code() is grpc.StatusCode.UNAVAILABLE
    assert not node.virtshim.containers
    runtime.answers[method] = told
    vm = node.client.runtime.CreateContainer(_creation(made), timeout=20).container_id
    assert set(node.virtshim.containers) == {vm}
    assert {(one.sandbox_id, one.netns) for one in node.adopted()} == {(made.sandbox, NETNS)}


@pytest.mark.parametrize("of", ["primary", "virtshim"])
def test_an_ids_beginning_means_a_pod_that_is_there_and_not_one_that_was(node: Node, of: str) -> None:
    """The proxy remembers ids of pods that are gone."""
    gone = node.run()
    del node.primary.pods[gone.sandbox]
    alive = f"{gone.sandbox[:13]}{'0' * 51}"
    runtime = getattr(node, of)
    runtime.pods[alive] = pb.PodSandbox(id=alive)
    node.client.stop_pod(alive[:13])
    (asked,) = runtime.asked("StopPodSandbox")
    assert pb.StopPodSandboxRequest.FromString(asked.request).pod_sandbox_id == alive[:13]
    assert node.order("StopPodSandbox") == [of]


def _creation(made: KubeletPod) -> pb.CreateContainerRequest:
    """Of the pod's VM."""
    image = pb.ImageSpec(image=DISK, user_specified_image=DISK)
    return pb.CreateContainerRequest(
        pod_sandbox_id=made.sandbox, config=container(image=image), sandbox_config=made.config
    )


def _request(method: str, sandbox: str) -> Any:
    return getattr(pb, f"{method}Request")(pod_sandbox_id=sandbox)


@pytest.mark.parametrize("method", ["StopPodSandbox", "RemovePodSandbox"])
def test_nothing_is_released_while_virtshim_is_down(node: Node, method: str) -> None:
    made = node.run()
    node.virtshim.stop()
    with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other at .* is not available"):
        getattr(node.client.runtime, method)(_request(method, made.sandbox), timeout=20)
    assert not node.primary.asked(method)
    node.virtshim.start()
    wait_until(lambda: _ends(node, method, made.sandbox), WAIT_LIMIT, "virtshim is back")
    assert len(node.primary.asked(method)) == 1


def _ends(node: Node, method: str, sandbox: str) -> bool:
    try:
        getattr(node.client.runtime, method)(_request(method, sandbox), timeout=20)
    except grpc.RpcError:
        return False
    return True


@pytest.mark.parametrize("method", ["StopPodSandbox", "RemovePodSandbox"])
def test_nothing_is_released_while_virtshim_hangs(node: Node, method: str) -> None:
    """The call fails before its caller gives up, who may wait for minutes."""
    made = node.run()
    for hanging in (method, "Version"):
        node.virtshim.answers[hanging] = hangs
    with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other at .* is not available: no answer within"):
        getattr(node.client.runtime, method)(_request(method, made.sandbox), timeout=5)
    assert not node.primary.asked(method)


def test_a_vm_is_not_created_while_virtshim_hangs(node: Node) -> None:
    made = node.run()
    made.ensure_image(DISK)
    node.admin.answers["Adopt"] = node.virtshim.answers["Version"] = hangs
    with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other at .* is not available: no answer within"):
        node.client.runtime.CreateContainer(_creation(made), timeout=5)


def test_a_virtshim_that_takes_long_is_waited_for(node: Node) -> None:
    made = node.run()
    before = len(node.virtshim.asked("Version"))

    def slow(_request: bytes, _context: Any) -> bytes:
        wait_until(lambda: len(node.virtshim.asked("Version")) > before, WAIT_LIMIT, "the proxy asks whether it hangs")
        return b""

    node.virtshim.answers["StopPodSandbox"] = slow
    node.client.runtime.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=made.sandbox), timeout=5)
    assert node.order("StopPodSandbox") == ["virtshim", "primary"]


def test_a_resize_of_the_pod_reaches_both_runtimes(node: Node) -> None:
    made = node.run()
    request = pb.UpdatePodSandboxResourcesRequest(pod_sandbox_id=made.sandbox)
    node.primary.answers["UpdatePodSandboxResources"] = done
    for told in (done, Refusal(grpc.StatusCode.NOT_FOUND, "no such pod")):  # of a pod that has no VM yet
        node.virtshim.answers["UpdatePodSandboxResources"] = told
        node.client.UpdatePodSandboxResources(request)
    assert node.order("UpdatePodSandboxResources") == ["virtshim", "primary"] * 2
    node.virtshim.answers["UpdatePodSandboxResources"] = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too little memory")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "too little memory"):
        node.client.UpdatePodSandboxResources(request)


def test_port_forward_is_the_primarys(node: Node) -> None:
    made = node.run()
    made.start("vm", DISK)
    node.primary.answers["PortForward"] = pb.PortForwardResponse(url="http://primary").SerializeToString()
    assert node.client.PortForward(pb.PortForwardRequest(pod_sandbox_id=made.sandbox)).url == "http://primary"


# --- a new proxy, and two calls at once


def test_a_new_proxy_knows_the_pod_by_its_handler(node: Node) -> None:
    made = node.run()
    node.again()
    vm = made.start("vm", DISK)
    assert vm in node.virtshim.containers
    node.again()
    node.client.stop(vm)
    assert node.virtshim.asked("StopContainer")
    assert made.start("helper", "busybox") in node.primary.containers


def test_two_calls_at_once_each_adopt_the_pod(node: Node) -> None:
    made = node.run()
    made.ensure_image(DISK)
    waiting = [node.client.runtime.CreateContainer.future(_creation(made), timeout=20) for _ in range(2)]
    ids = {one.result().container_id for one in waiting}
    assert ids == set(node.virtshim.containers)
    assert {one.sandbox_id for one in node.adopted()} == {made.sandbox}
    assert len(node.adopted()) == 2
