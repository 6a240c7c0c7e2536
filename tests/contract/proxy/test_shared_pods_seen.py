"""kubelet sees a pod of the primary with a VM of virtshim as one pod, in lists, stats, statuses and events."""

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from fakes.cri import refused
from fakes.journal import WAIT_LIMIT
from fakes.kubelet_calls import KubeletPod
from fakes.runtime import Refusal
from fakes.shared_pods import DISK, HANDLER, Node, done, fresh, hangs, serving, status_of
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.proxy, pytest.mark.helpers]


@dataclass(frozen=True)
class Running:
    pod: KubeletPod
    vm: str
    helper: str

    @property
    def status(self) -> pb.PodSandboxStatus:
        """Of the sandbox in an event."""
        return pb.PodSandboxStatus(id=self.pod.sandbox, runtime_handler=HANDLER)


@pytest.fixture
def running(node: Node) -> Running:
    return _running(node)


def _running(node: Node) -> Running:
    made = node.run()
    return Running(made, made.start("vm", DISK), made.start("helper", "busybox"))


def test_containers_listed_by_their_pod_are_those_of_both_runtimes(node: Node, running: Running) -> None:
    for _ in range(2):
        listed = node.client.containers(pod_sandbox_id=running.pod.sandbox)
        assert {one.id for one in listed} == {running.vm, running.helper}
        assert {one.pod_sandbox_id for one in listed} == {running.pod.sandbox}
        wanted = pb.StreamContainersRequest(filter=pb.ContainerFilter(pod_sandbox_id=running.pod.sandbox))
        pieces = node.client.runtime.StreamContainers(wanted, timeout=WAIT_LIMIT)
        assert {one.id for piece in pieces for one in piece.containers} == {running.vm, running.helper}
        node.again()


def test_stats_listed_by_their_pod_are_those_of_both_runtimes(node: Node, running: Running) -> None:
    _give_stats(node, running)
    wanted = pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(pod_sandbox_id=running.pod.sandbox))
    stats = node.client.ListContainerStats(wanted).stats
    assert {one.attributes.id for one in stats} == {running.vm, running.helper}


def _give_stats(node: Node, running: Running) -> None:
    """Both runtimes have stats of their container; the primary has the pod's."""
    for runtime, one in ((node.primary, running.helper), (node.virtshim, running.vm)):
        told = [pb.ContainerStats(attributes=pb.ContainerAttributes(id=one))]
        runtime.answers["ListContainerStats"] = pb.ListContainerStatsResponse(stats=told).SerializeToString()
    sandboxes = [running.pod.sandbox, "another"]
    pods = [
        pb.PodSandboxStats(
            attributes=pb.PodSandboxAttributes(id=sandbox),
            linux=pb.LinuxPodSandboxStats(
                process=pb.ProcessUsage(timestamp=7),
                containers=[pb.ContainerStats(attributes=pb.ContainerAttributes(id=f"helper-of-{sandbox}"))],
            ),
        )
        for sandbox in sandboxes
    ]
    node.primary.answers["PodSandboxStats"] = pb.PodSandboxStatsResponse(stats=pods[0]).SerializeToString()
    node.primary.answers["ListPodSandboxStats"] = pb.ListPodSandboxStatsResponse(stats=pods).SerializeToString()
    node.virtshim.answers["ListPodSandboxStats"] = done
    streamed = pb.StreamPodSandboxStatsResponse(pod_sandbox_stats=pods).SerializeToString()
    node.primary.answers["StreamPodSandboxStats"] = streamed
    node.virtshim.answers["StreamPodSandboxStats"] = lambda _request, _context: []


def test_a_pods_stats_have_the_vms_container_beside_the_primarys(node: Node, running: Running) -> None:
    _give_stats(node, running)
    mine = running.pod.sandbox
    one = node.client.PodSandboxStats(pb.PodSandboxStatsRequest(pod_sandbox_id=mine)).stats
    listed = list(node.client.ListPodSandboxStats(pb.ListPodSandboxStatsRequest()).stats)
    streamed = [
        one
        for piece in node.client.runtime.StreamPodSandboxStats(pb.StreamPodSandboxStatsRequest(), timeout=WAIT_LIMIT)
        for one in piece.pod_sandbox_stats
    ]
    for found in (one, listed[0], streamed[0]):
        assert found.linux.process.timestamp == 7
        assert [one.attributes.id for one in found.linux.containers] == [f"helper-of-{mine}", running.vm]
    for others in (listed[1:], streamed[1:]):
        assert [one.attributes.id for found in others for one in found.linux.containers] == ["helper-of-another"]


def test_stats_of_a_pod_without_a_vm_need_no_virtshim(node: Node) -> None:
    other = node.client.run(handler="runc")
    told = [pb.PodSandboxStats(attributes=pb.PodSandboxAttributes(id=other))]
    node.primary.answers["ListPodSandboxStats"] = pb.ListPodSandboxStatsResponse(stats=told).SerializeToString()
    node.virtshim.stop()
    wanted = pb.ListPodSandboxStatsRequest(filter=pb.PodSandboxStatsFilter(id=other))
    assert list(node.client.ListPodSandboxStats(wanted).stats) == told


def test_a_virtshim_that_does_not_tell_stats_does_not_make_the_primary_count_as_down() -> None:
    with serving('when_down = "fail"', "answer_timeout = 1.0") as made:
        node = fresh(made)
        _give_stats(node, _running(node))
        node.virtshim.answers["ListContainers"] = hangs
        stream = node.client.runtime.StreamPodSandboxStats(pb.StreamPodSandboxStatsRequest(), timeout=WAIT_LIMIT)
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other at .* is not available: no answer within"):
            list(stream)
        assert '"runtime": "primary"' not in node.proxy.log.read_text()


def test_a_pods_status_has_the_vm_if_kubelet_takes_containers_from_it(node: Node, running: Running) -> None:
    """kubelet does so if the answer has a timestamp. The primary's bytes stay as they are."""
    helper = pb.ContainerStatus(id=running.helper)
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary, timestamp=9, containers=[helper])
    question = pb.PodSandboxStatusRequest(pod_sandbox_id=running.pod.sandbox)
    told = node.client.PodSandboxStatus(question)
    assert (told.timestamp, told.status.network.ip) == (9, "10.88.0.7")
    assert [(one.id, one.metadata.name) for one in told.containers_statuses] == [
        (running.helper, ""),
        (running.vm, "vm"),
    ]
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary)
    before = len(node.virtshim.calls)
    assert not node.client.PodSandboxStatus(question).containers_statuses
    assert len(node.virtshim.calls) == before


def test_a_pods_status_has_the_vms_last_known_status_while_virtshim_is_down(degraded_node: Node) -> None:
    """Without it kubelet would start the VM a second time."""
    node, running = degraded_node, _running(degraded_node)
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary, timestamp=9)
    question = pb.PodSandboxStatusRequest(pod_sandbox_id=running.pod.sandbox)
    node.client.pods()
    node.client.containers()
    told = node.client.PodSandboxStatus(question)
    assert [(one.id, one.state) for one in told.containers_statuses] == [(running.vm, pb.CONTAINER_RUNNING)]
    node.virtshim.stop()
    assert node.client.PodSandboxStatus(question) == told
    node.virtshim.containers[running.vm].state = pb.CONTAINER_EXITED
    node.virtshim.start()
    wait_until(lambda: _state_of(node, running.vm) == pb.CONTAINER_EXITED, WAIT_LIMIT, "virtshim is back")
    node.client.containers()
    node.virtshim.stop()
    assert node.client.PodSandboxStatus(question).containers_statuses[0].state == pb.CONTAINER_EXITED


def _state_of(node: Node, one: str) -> int:
    try:
        return node.client.status(one).state
    except grpc.RpcError:
        return -1


def test_a_pods_status_fails_if_nothing_tells_the_vms_state(node: Node, running: Running) -> None:
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary, timestamp=9)
    node.virtshim.stop()
    with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other"):
        node.client.pod_status(running.pod.sandbox)


def _events(node: Node, number: int, *tell: Any) -> list[pb.ContainerEventResponse]:
    """The first events of a listener that begins before `tell` is called."""
    stream = node.client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=WAIT_LIMIT)
    wait_until(lambda: node.primary.listeners and node.virtshim.listeners, WAIT_LIMIT, "the proxy listens")
    for one in tell:
        one()
    found = [next(stream) for _ in range(number)]
    stream.cancel()
    wait_until(lambda: not node.primary.listeners, WAIT_LIMIT, "the listener is gone")
    return found


def test_an_event_of_the_primary_has_the_vms_container_too(node: Node, running: Running) -> None:
    helper = pb.ContainerStatus(id=running.helper, exit_code=3)
    kind = pb.CONTAINER_STOPPED_EVENT
    (told,) = _events(
        node,
        1,
        lambda: node.primary.tell(
            running.helper, running.status, containers_statuses=[helper], created_at=5, container_event_type=kind
        ),
    )
    assert (told.container_id, told.created_at, told.container_event_type) == (running.helper, 5, kind)
    assert [one.id for one in told.containers_statuses] == [running.helper, running.vm]
    assert told.containers_statuses[0] == helper


def test_an_event_of_virtshim_has_the_primarys_sandbox_and_containers(node: Node, running: Running) -> None:
    vm = pb.ContainerStatus(id=running.vm, reason="NetworkLost")
    (told,) = _events(
        node, 1, lambda: node.virtshim.tell(running.vm, running.status, containers_statuses=[vm], created_at=5)
    )
    assert (told.container_id, told.created_at) == (running.vm, 5)
    assert told.pod_sandbox_status.network.ip == "10.88.0.7"
    assert told.pod_sandbox_status.metadata.uid == running.pod.uid
    assert [(one.id, one.reason) for one in told.containers_statuses] == [
        (running.vm, "NetworkLost"), (running.helper, ""),
    ]  # fmt: skip


def test_an_event_of_a_vm_whose_sandbox_is_gone_has_none_so_that_kubelet_ignores_it(
    node: Node, running: Running
) -> None:
    del node.primary.pods[running.pod.sandbox]
    (told,) = _events(node, 1, lambda: node.virtshim.tell(running.vm, running.status))
    assert not told.HasField("pod_sandbox_status")


def test_events_of_other_pods_pass_unchanged(node: Node, running: Running) -> None:
    other = pb.PodSandboxStatus(id="other", runtime_handler="runc")
    told = _events(node, 2, lambda: node.primary.tell("one", other), lambda: node.primary.tell("two"))
    assert told == [
        pb.ContainerEventResponse(container_id="one", pod_sandbox_status=other),
        pb.ContainerEventResponse(container_id="two"),
    ]


def test_an_event_of_a_vm_is_not_passed_on_while_the_primary_does_not_tell_its_part(
    node: Node, running: Running
) -> None:
    node.primary.answers["PodSandboxStatus"] = Refusal(grpc.StatusCode.UNAVAILABLE, "not yet")
    (told,) = _events(
        node, 1, lambda: node.virtshim.tell(running.vm, running.status), lambda: node.virtshim.tell("another")
    )
    assert told.container_id == "another"


def test_an_event_that_would_lack_the_vm_is_not_passed_on(node: Node, running: Running) -> None:
    """kubelet would start the VM a second time. Its next relist finds what has happened."""
    node.virtshim.answers["ListContainers"] = Refusal(grpc.StatusCode.UNAVAILABLE, "not yet")
    (told,) = _events(
        node, 1, lambda: node.primary.tell(running.helper, running.status), lambda: node.primary.tell("another")
    )
    assert told.container_id == "another"
    wait_until(lambda: "proxy.event.not-passed-on" in node.proxy.log.read_text(), WAIT_LIMIT, "the log says so")
