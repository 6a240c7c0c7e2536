"""kubelet draws the right conclusions about a runtime that is down, while kubelet runs and when it starts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes.cri import refused
from fakes.journal import WAIT_LIMIT
from fakes.kubelet_calls import Kubelet, KubeletPod
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy

FAIL = 'when_down = "fail"'


@pytest.fixture
def primary(place: Path) -> Iterator[FakeRuntime]:
    with FakeRuntime(f"{place}/primary.sock", "primary") as runtime:
        yield runtime


@pytest.fixture
def other(place: Path) -> Iterator[FakeRuntime]:
    with FakeRuntime(f"{place}/other.sock", "other") as runtime:
        yield runtime


def kubelet_of(proxy: Proxy) -> Kubelet:
    return Kubelet(proxy.client.runtime, proxy.client.image)


def started(kubelet: Kubelet, name: str, handler: str = "") -> tuple[KubeletPod, str]:
    """Starts a pod with one container, which kubelet's next relist finds: first the lists, then the statuses."""
    made = KubeletPod(kubelet, name, handler)
    made.run()
    container = made.start("main", f"image-of-{name}")
    look(kubelet)
    return made, container


def look(kubelet: Kubelet) -> None:
    """One relist of kubelet's pod lifecycle event generator."""
    kubelet.runtime.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=WAIT_LIMIT)
    request = pb.ListContainersRequest(filter=pb.ContainerFilter())
    for one in kubelet.runtime.ListContainers(request, timeout=WAIT_LIMIT).containers:
        kubelet.runtime.PodSandboxStatus(
            pb.PodSandboxStatusRequest(pod_sandbox_id=one.pod_sandbox_id), timeout=WAIT_LIMIT
        )
        kubelet.runtime.ContainerStatus(pb.ContainerStatusRequest(container_id=one.id), timeout=WAIT_LIMIT)


def wait_until_kept(place: Path, pod: KubeletPod, container: str) -> None:
    """On disk."""
    wanted = {"pods": pod.sandbox, "containers": container, "statuses": container}
    files = {place / f"state/proxy/other.{what}": id_.encode() for what, id_ in wanted.items()}
    wait_until(
        lambda: all(file.exists() and id_ in file.read_bytes() for file, id_ in files.items()), WAIT_LIMIT, "it is kept"
    )


def anew(proxy: Proxy) -> None:
    """Kills and starts the proxy."""
    proxy.stop(signal.SIGKILL)
    proxy.start()

    def answers() -> bool:
        try:
            proxy.client.Status(pb.StatusRequest())
        except grpc.RpcError:
            return False
        return True

    wait_until(answers, WAIT_LIMIT, "the proxy is reached again")


# --- a kubelet that starts


def test_a_kubelet_that_starts_while_lists_fail_ends_at_its_first_call(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """The service manager restarts kubelet. Later in its life, kubelet would take a failed list for an empty one."""
    with Proxy(place, primary.socket, other.socket, others=FAIL) as proxy:
        kubelet = kubelet_of(proxy)
        _, container = started(kubelet, "gpu")
        other.stop()
        with refused(grpc.StatusCode.UNAVAILABLE, f"the runtime other at {other.socket} is not available"):
            proxy.client.Version(pb.VersionRequest())
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other"):
            kubelet.start()
        other.start()
        wait_until(lambda: _starts(kubelet), WAIT_LIMIT, "kubelet starts")
        assert kubelet.start() == {container}


def _starts(kubelet: Kubelet) -> bool:
    try:
        kubelet.start()
    except grpc.RpcError:
        return False
    return True


def test_a_kubelet_that_starts_while_a_runtime_may_be_down_finds_all_containers_running(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """kubelet admits containers again that it does not find running. It has not heard of their device plugin yet, so it
    fails their pods for good."""
    with Proxy(place, primary.socket, other.socket) as proxy:
        kubelet = kubelet_of(proxy)
        (_, container), (pod, vm) = started(kubelet, "gpu"), started(kubelet, "vm", "vm")
        wait_until_kept(place, pod, vm)
        other.stop()
        assert kubelet.start() == {container, vm}
        anew(proxy)
        assert kubelet.start() == {container, vm}


def test_lists_and_kubelets_start_fail_if_a_runtime_has_never_answered(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """The runtime's pods are not known, and kubelet would start each a second time."""
    other.stop()
    with Proxy(place, primary.socket, other.socket) as proxy:
        kubelet = kubelet_of(proxy)
        for call in (
            lambda: proxy.client.Version(pb.VersionRequest()),
            kubelet.start,
            proxy.client.pods,
            lambda: list(proxy.client.runtime.StreamContainers(pb.StreamContainersRequest(), timeout=WAIT_LIMIT)),
            lambda: proxy.client.pod_status("f" * 64),
        ):
            with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other"):
                call()
        other.start()
        wait_until(lambda: _starts(kubelet), WAIT_LIMIT, "kubelet starts")
        kept = [place / f"state/proxy/other.{what}" for what in ("pods", "containers")]
        wait_until(lambda: all(one.exists() for one in kept), WAIT_LIMIT, "that it has no pods is kept")
        other.stop()
        anew(proxy)
        assert kubelet.start() == set()


def test_kept_lists_are_deleted_if_the_runtime_may_no_longer_be_down(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    with Proxy(place, primary.socket, other.socket) as proxy:
        started(kubelet_of(proxy), "vm", "vm")
    assert sorted(os.listdir(place / "state/proxy")) == ["other.containers", "other.pods", "other.statuses"]
    with Proxy(place, primary.socket, other.socket, others=FAIL):
        assert os.listdir(place / "state/proxy") == []


# --- a kubelet that runs


def test_a_new_container_is_known_before_kubelet_lists_again(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    with Proxy(place, primary.socket, other.socket) as proxy:
        container = proxy.client.create(proxy.client.run(handler="vm"))
        kept = place / "state/proxy/other.containers"

        def states() -> list[int]:
            if not kept.exists():
                return []
            return [one.state for one in pb.ListContainersResponse.FromString(kept.read_bytes()).containers]

        wait_until(lambda: states() == [pb.CONTAINER_CREATED], WAIT_LIMIT, "it is kept")
        proxy.client.start(container)
        wait_until(lambda: states() == [pb.CONTAINER_RUNNING], WAIT_LIMIT, "that it runs is kept")


def test_kubelet_collects_images_while_a_runtime_is_down(place: Path, primary: FakeRuntime, other: FakeRuntime) -> None:
    """A proxy that was started meanwhile behaves the same; an image that is a volume of a VM still counts as in use."""
    primary.needs_images = other.needs_images = True
    with Proxy(place, primary.socket, other.socket) as proxy:
        kubelet = kubelet_of(proxy)
        started(kubelet, "web")
        vm = KubeletPod(kubelet, "vm", "vm")
        vm.run()
        container = vm.start("main", "disk", volumes=["files"])
        look(kubelet)
        wait_until_kept(place, vm, container)
        assert kubelet.images_in_use() == {"sha256:primary", "sha256:other"}
        other.stop()
        for _ in range(2):
            assert kubelet.images_in_use() == {"sha256:primary", "sha256:other"}
            anew(proxy)


def test_while_a_runtime_is_down_last_statuses_exist_for_containers_but_not_for_pods(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """Without the pod's status, kubelet decides nothing about the pod. Of the container's status it uses mounts and log
    path: with an empty log path it would match any file of its directory when it removes logs."""
    with Proxy(place, primary.socket, other.socket) as proxy:
        vm, container = started(kubelet_of(proxy), "vm", "vm")
        told = proxy.client.status(container)
        assert told.log_path == "/logs/main/0.log"
        other.stop()
        assert proxy.client.status(container) == told
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other"):
            proxy.client.pod_status(vm.sandbox)
        for call in (lambda: proxy.client.stop(container), lambda: proxy.client.stop_pod(vm.sandbox)):
            with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other"):
                call()


def test_a_status_from_before_a_containers_end_is_not_returned_after_its_end(
    place: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """kubelet would believe that the container runs, or that it succeeded."""
    with Proxy(place, primary.socket, other.socket) as proxy:
        kubelet = kubelet_of(proxy)
        _, container = started(kubelet, "vm", "vm")
        other.containers[container].state = pb.CONTAINER_EXITED
        proxy.client.ListContainers(pb.ListContainersRequest())
        other.stop()
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other"):
            proxy.client.status(container)


def test_statuses_of_removed_containers_are_forgotten(place: Path, primary: FakeRuntime, other: FakeRuntime) -> None:
    with Proxy(place, primary.socket, other.socket) as proxy:
        kubelet = kubelet_of(proxy)
        (_, first), (_, second) = started(kubelet, "first", "vm"), started(kubelet, "second", "vm")
        del other.containers[first]
        look(kubelet)
        kept = place / "state/proxy/other.statuses"

        def ids() -> list[str]:
            told = pb.PodSandboxStatusResponse.FromString(kept.read_bytes())
            return [one.id for one in told.containers_statuses]

        wait_until(lambda: kept.exists() and ids() == [second], WAIT_LIMIT, "the first is forgotten")
