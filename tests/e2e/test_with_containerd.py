"""`virtshim up --with-containerd` runs a node of both runtimes, and kubelet's calls to its proxy reach a real
containerd and virtshim."""

from collections.abc import Iterator

import grpc
import pytest
from bench.containerd import IMAGE
from both_runtimes import LIMIT, Both, node_with_containerd
from fakes.cri import refused
from fakes.kubelet_calls import KubeletPod
from fakes.processes import hanging
from guest import answers
from podclient import PodClient, container_config, pod_config, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.proxy]


@pytest.fixture
def fresh_node() -> Iterator[Both]:
    with node_with_containerd() as made:
        yield made


@pytest.fixture(scope="module")
def node_of_both() -> Iterator[Both]:
    with node_with_containerd() as made:
        made.node.make_bridge()
        yield made


@pytest.fixture
def both(node_of_both: Both) -> Iterator[Both]:
    """The same node for each test; the test's pods are removed."""
    yield node_of_both
    for pod in node_of_both.proxy.pods():
        node_of_both.proxy.stop_pod(pod.id)
        node_of_both.proxy.remove_pod(pod.id)


def test_containers_keep_running_after_ctrl_c_and_are_removed_with_the_node(fresh_node: Both) -> None:
    node, cri = fresh_node.node, fresh_node.proxy
    config = pod_config("container", f"{node.directory}/logs")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(IMAGE), config)
    cri.start(container)
    vm_pod = cri.run_pod(pod_config("vm", f"{node.directory}/logs"), "virtshim")
    addresses = {cri.pod_ip(one) for one in (pod, vm_pod)}
    assert len(addresses) == 2
    assert all(one.startswith(node.pod_cidr.removesuffix("0.0/16")) for one in addresses)
    again(fresh_node)
    assert {one.id for one in cri.pods()} == {pod, vm_pod}
    status = cri.status(container)
    assert (status.state, status.metadata.attempt) == (pb.CONTAINER_RUNNING, 0)
    assert cri.exec_sync(container, "/busybox", "echo", "still here").stdout == b"still here\n"


def again(both: Both) -> None:
    """Restarts all daemons including the proxy; containers and VMs keep running."""
    both.node.stop()
    both.node.up("--with-containerd")
    wait_until(lambda: answers(both.containerd) and answers(both.proxy), LIMIT, "containerd serves again")


def test_kubectl_debug_adds_a_container_that_sees_the_others_processes(both: Both) -> None:
    pod = both.pod("debugged")
    pod.run()
    main = pod.start("main", IMAGE)
    debugger = pod.start("debugger-x7k2p", IMAGE, command=["/busybox", "sleep", "1000"], target=main)
    # kubelet looks for the container to attach to among the running ones of all runtimes.
    running = pb.ContainerFilter(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING))
    listed = both.proxy.runtime.ListContainers(pb.ListContainersRequest(filter=running), timeout=LIMIT).containers
    assert {main, debugger} <= {one.id for one in listed}
    attach = pb.AttachRequest(container_id=debugger, stdin=False, stdout=True, stderr=True)
    assert both.proxy.runtime.Attach(attach, timeout=LIMIT).url.startswith("http://127.0.0.1:")
    seen = both.proxy.exec_sync(debugger, "/busybox", "ps", "-o", "args").stdout.decode()
    assert "sleep 2147483647" in seen
    assert "sleep 1000" in seen


def test_static_pods_go_to_the_runtime_of_their_annotation_or_runtimeclass(both: Both) -> None:
    """A mirror pod exists in the API server only: kubelet makes no runtime call for it."""
    static = {
        "plain": both.pod("plain", source="file"),
        "by-annotation": both.pod("by-annotation", source="file", **{"kubernetes.io/target-runtime": "virtlet.cloud"}),
        "by-class": both.pod("by-class", "virtshim", source="file"),
    }
    for one in static.values():
        one.run()
    static["plain"].start("main", IMAGE)
    at = {client: {one.id: one for one in client.pods()} for client in (both.containerd, both.virtshim)}
    assert static["plain"].sandbox in at[both.containerd]
    for name in ("by-annotation", "by-class"):
        listed = at[both.virtshim][static[name].sandbox]
        assert dict(listed.annotations) == static[name].annotations
        assert listed.annotations["kubernetes.io/config.source"] == "file"
        assert static[name].sandbox not in at[both.containerd]


def test_an_image_of_containerd_is_not_used_for_a_vm(both: Both) -> None:
    """A proxy that has not seen the pods start behaves the same: both runtimes report when kubelet first saw them."""
    pods = {name: both.pod(f"{name}-image", handler) for name, handler in (("container", ""), ("vm", "virtshim"))}
    for one in pods.values():
        one.run()

    def is_there(pod: KubeletPod) -> bool:
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=IMAGE, annotations=pod.annotations))
        return bool(both.proxy.images.ImageStatus(request, timeout=LIMIT).image.id)

    for _ in range(2):
        assert {name: is_there(one) for name, one in pods.items()} == {"container": True, "vm": False}
        again(both)


def test_containers_start_and_vms_stay_listed_while_virtshim_does_not_answer(both: Both) -> None:
    vm = both.pod("vm-meanwhile", "virtshim")
    vm.run()
    both.kubelet.start()
    pid = both.node.daemons()["virtshim"]
    with hanging(pid):
        states = {one.id: one.state for one in both.proxy.pods()}
        assert states[vm.sandbox] == pb.SANDBOX_READY
        web = both.pod("web-meanwhile")
        web.run()
        container = web.start("main", IMAGE)
        assert container in both.kubelet.start()
        assert both.kubelet.images_in_use()
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime virtlet.cloud"):
            both.pod("vm-too", "virtshim").run()
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime virtlet.cloud"):
            both.proxy.pod_status(vm.sandbox)
    wait_until(lambda: _has(both.proxy, vm.sandbox), LIMIT, "virtshim is heard again")


def _has(cri: PodClient, pod: str) -> bool:
    try:
        return cri.pod_status(pod).state == pb.SANDBOX_READY
    except grpc.RpcError:
        return False
