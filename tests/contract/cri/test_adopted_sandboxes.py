"""Adopt takes in sandboxes that another runtime made: CRI's callers do not see them, operators do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fakes.adopted import CGROUP, HANDLER, NETNS, SANDBOX
from fakes.cri import CALL_SECONDS, Client, pod, refused
from fakes.world import World
from podclient import wait_until

from criproto.operator_v1 import operator_pb2, operator_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import connected
from virtshim.cri.operator_server import OperatorServer

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
ID = SANDBOX.value
ADDRESSES = ("10.88.7.7", "fd00::7")


class Proxy:
    """What `virtshim proxy` asks of virtshim."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = operator_pb2_grpc.OperatorStub(channel)

    def adopt(self, sandbox: str = ID, netns: str = NETNS, handler: str = HANDLER, **changes: Any) -> None:
        config = changes.pop("config", None) or shared(**changes).SerializeToString()
        request = operator_pb2.AdoptRequest(
            sandbox_id=sandbox, config=config, runtime_handler=handler, netns=netns, addresses=ADDRESSES
        )
        self._stub.Adopt(request, timeout=CALL_SECONDS)

    def check(self, **changes: Any) -> None:
        self.adopt(sandbox="", netns="", **changes)


def shared(context: dict[str, Any] | None = None, **changes: Any) -> pb.PodSandboxConfig:
    linux = pb.LinuxPodSandboxConfig(
        cgroup_parent=CGROUP,
        overhead=pb.LinuxContainerResources(memory_limit_in_bytes=512 << 20),
        security_context=pb.LinuxSandboxSecurityContext(**context or {}),
    )
    labels = {"io.kubernetes.pod.name": "web"}
    return pod(**{"linux": linux, "labels": labels} | changes)


@pytest.fixture
def proxy(world: World) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="op-") as short:
        server = OperatorServer(f"{short}/admin.sock", world.app.operator)
        server.start()
        with grpc.insecure_channel(f"unix:{short}/admin.sock") as channel:
            yield Proxy(channel)
        server.stop(0)


def running(proxy: Proxy, client: Client) -> str:
    proxy.adopt()
    vm = client.create(ID)
    client.start(vm)
    return vm


def test_no_list_and_no_status_shows_an_adopted_sandbox(proxy: Proxy, client: Client) -> None:
    running(proxy, client)
    other = client.run("other")
    assert [one.id for one in client.pods()] == [other]
    assert client.pods(id=ID) == []
    assert client.pods(label_selector={"io.kubernetes.pod.name": "web"}) == []
    stats = client.ListPodSandboxStats(pb.ListPodSandboxStatsRequest()).stats
    assert [one.attributes.id for one in stats] == [other]
    for name in ("StreamPodSandboxes", "StreamPodSandboxStats"):
        batches = list(getattr(client, name)(getattr(pb, f"{name}Request")()))
        assert ID not in str(batches)
    with refused(Code.NOT_FOUND):
        client.pod_status(ID)
    with refused(Code.NOT_FOUND):
        client.PodSandboxStats(pb.PodSandboxStatsRequest(pod_sandbox_id=ID))


def test_its_vms_container_is_shown_with_the_other_runtimes_sandbox_id(proxy: Proxy, client: Client) -> None:
    vm = running(proxy, client)
    (one,) = client.containers(pod_sandbox_id=ID)
    assert (one.id, one.pod_sandbox_id, one.state) == (vm, ID, pb.CONTAINER_RUNNING)
    assert client.status(vm).state == pb.CONTAINER_RUNNING
    (stats,) = client.ListContainerStats(
        pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(pod_sandbox_id=ID))
    ).stats
    assert stats.attributes.id == vm
    (measured,) = client.ListPodSandboxMetrics(pb.ListPodSandboxMetricsRequest()).pod_metrics
    # The pod's own metrics are the other runtime's.
    assert (measured.pod_sandbox_id, len(measured.metrics)) == (ID, 0)
    assert [one.container_id for one in measured.container_metrics] == [vm]
    assert measured.container_metrics[0].metrics


def test_only_the_containers_events_are_told_and_they_name_the_pod(proxy: Proxy, client: Client) -> None:
    stream = client.GetContainerEvents(pb.GetEventsRequest())
    stream.initial_metadata()
    vm = running(proxy, client)
    client.stop(vm)
    client.stop_pod(ID)
    client.remove_pod(ID)
    other = client.run("other")
    told = []
    for event in stream:
        told.append(event)
        if event.container_id == other:
            break
    stream.cancel()
    assert [one.container_id for one in told] == [vm] * 4 + [other]
    assert [one.container_event_type for one in told[:4]] == [
        pb.CONTAINER_CREATED_EVENT,
        pb.CONTAINER_STARTED_EVENT,
        pb.CONTAINER_STOPPED_EVENT,
        pb.CONTAINER_DELETED_EVENT,
    ]
    for event in told[:4]:
        assert (event.pod_sandbox_status.id, event.pod_sandbox_status.runtime_handler) == (ID, HANDLER)


def test_stop_remove_and_resize_find_it_by_its_full_id_alone(proxy: Proxy, client: Client, world: World) -> None:
    vm = running(proxy, client)
    client.stop_pod(ID[:20])
    assert client.status(vm).state == pb.CONTAINER_RUNNING
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=1 << 30)
    request = pb.UpdatePodSandboxResourcesRequest(pod_sandbox_id=ID, resources=resources)
    client.UpdatePodSandboxResources(request)
    assert world.sandbox(SANDBOX).resources.memory_limit_bytes == 1 << 30
    client.stop_pod(ID)
    assert client.status(vm).state == pb.CONTAINER_EXITED
    client.remove_pod(ID)
    client.remove_pod(ID)
    assert world.everything() == []
    with refused(Code.NOT_FOUND):
        client.UpdatePodSandboxResources(request)


def test_the_call_can_be_repeated_and_a_check_makes_nothing(proxy: Proxy, client: Client, world: World) -> None:
    proxy.check()
    assert world.everything() == []
    vm = running(proxy, client)
    proxy.adopt()
    proxy.adopt(annotations={"new": "one"})
    assert client.status(vm).state == pb.CONTAINER_RUNNING
    with refused(Code.FAILED_PRECONDITION, "cannot be adopted with /other"):
        proxy.adopt(netns="/other")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"sandbox": ID, "netns": ""}, "belong together"),
        ({"sandbox": "", "netns": NETNS}, "belong together"),
        ({"sandbox": "web", "netns": NETNS}, "not a sandbox id"),
        ({"config": b"\xff"}, "config is not a runtime.v1.PodSandboxConfig"),
        ({"handler": "kata"}, "pod_handlers"),
        ({"context": {"namespace_options": pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER)}}, "hostNetwork"),
        ({"context": {"namespace_options": pb.NamespaceOption(pid=pb.POD)}}, "shareProcessNamespace"),
        ({"linux": pb.LinuxPodSandboxConfig(cgroup_parent=CGROUP)}, "overhead"),
    ],
)
def test_what_cannot_be_adopted_is_refused_by_name(
    proxy: Proxy, world: World, asked: dict[str, Any], named: str
) -> None:
    with refused(Code.INVALID_ARGUMENT, named):
        proxy.adopt(**asked)
    assert world.everything() == []


def test_profiles_that_the_other_runtime_applies_to_its_containers_are_none_of_virtshims(
    proxy: Proxy, client: Client
) -> None:
    """kubelet gives the pod's profiles to each container, the VM's included."""
    profile = pb.SecurityProfile(profile_type=pb.SecurityProfile.Localhost, localhost_ref="profiles/helpers.json")
    proxy.adopt(context={"seccomp": profile, "apparmor": profile})
    context = pb.LinuxContainerSecurityContext(
        seccomp=profile, seccomp_profile_path="localhost/helpers.json", apparmor=profile, apparmor_profile="localhost/x"
    )
    client.start(client.create(ID, linux=pb.LinuxContainerConfig(security_context=context)))


def test_the_handler_is_for_the_proxy_alone_but_its_pods_images_are_pulled(client: Client) -> None:
    with refused(Code.INVALID_ARGUMENT, "virtshim proxy"):
        client.run(handler=HANDLER)
    image = pb.ImageSpec(image="registry.test/vm/guest:1", runtime_handler=HANDLER)
    assert client.PullImage(pb.PullImageRequest(image=image)).image_ref


def test_operators_tools_show_the_pod_and_find_its_vm_by_name(proxy: Proxy, client: Client, world: World) -> None:
    vm = running(proxy, client)
    with connected(world.settings.cri_socket) as node:
        (seen,) = node.pods()
        assert (seen.id, f"{seen.namespace}/{seen.name}", seen.is_ready) == (ID, "default/web", True)
        assert running_vm("web", node.pods(), node.vms()).id == vm
        assert node.addresses(ID) == list(ADDRESSES)
        assert [one.pod for one in node.usage()] == [ID]
        assert node.forward_url(ID, 22)
        assert not node.has_vnc(ID)


def test_a_vm_that_ends_and_starts_again_does_so_in_the_same_sandbox(
    proxy: Proxy, client: Client, world: World
) -> None:
    vm = running(proxy, client)
    client.stop(vm)
    proxy.adopt()
    again = client.create(ID, attempt=1)
    client.start(again)
    wait_until(lambda: client.status(again).state == pb.CONTAINER_RUNNING, 20, "the VM runs again")
    assert len(world.outside.networks.requests) == 1
