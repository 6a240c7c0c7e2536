"""In kubelet's order of calls, the right containers of a pod become virtual machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from contract.kubelet_orders.kubelet import KubeletPod, node
from fakes.pod_resources import FakePodResources

ONE_VM = "a pod is one virtual machine"
Pods = Callable[..., KubeletPod]


def _pods(directory: Path, books: FakePodResources | None) -> Iterator[Pods]:
    with node(directory, books=books) as (world, client):

        def pod(**spec: Any) -> KubeletPod:
            return KubeletPod(world, client, books, **spec)

        yield pod


@pytest.fixture(params=["works", "off"])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pods]:
    """Pods with a pod-resources list, by either of its calls: before 1.34 there is no Get."""
    yield from _pods(tmp_path, FakePodResources(request.param))


@pytest.fixture
def pods_without_list(tmp_path: Path) -> Iterator[Pods]:
    yield from _pods(tmp_path, None)


def started(pod: KubeletPod) -> list[str]:
    """Runs one sync; returns the containers that it started. None may be refused."""
    asked = pod.sync()
    assert [one.refusal for one in asked if one.refusal] == []
    return [one.name for one in asked]


def initialised(pod: KubeletPod) -> None:
    for name in pod.init:
        assert started(pod) == [name]
        assert pod.sync() == []
        pod.ends(name)
    assert started(pod) == list(pod.containers)


# --- init containers


def test_init_containers_run_one_after_another_and_then_the_pods_own(pods: Pods) -> None:
    pod = pods(init=("first", "second"))
    initialised(pod)
    assert list(pod.running()) == ["vm"]


def test_an_init_container_that_failed_runs_again(pods: Pods) -> None:
    pod = pods(init=("prepare",))
    started(pod)
    pod.ends("prepare", failed=True)
    assert started(pod) == ["prepare"]
    pod.ends("prepare")
    assert started(pod) == ["vm"]


def test_each_new_sandbox_begins_with_the_first_init_container(pods: Pods) -> None:
    pod = pods(init=("first", "second"))
    initialised(pod)
    for _ in range(2):
        pod.loses_its_sandbox()
        initialised(pod)
    assert list(pod.running()) == ["vm"]


def test_a_pod_that_loses_its_sandbox_during_initialisation_starts_over(pods: Pods) -> None:
    pod = pods(init=("first", "second"))
    started(pod)
    pod.ends("first", failed=True)
    started(pod)
    pod.loses_its_sandbox()
    initialised(pod)


@pytest.mark.parametrize("failed", [False, True])
def test_a_guest_that_powers_itself_off_starts_again_in_this_sandbox_and_in_the_next(pods: Pods, failed: bool) -> None:
    pod = pods(init=("prepare",), annotations={"virtshim.io/root-disk": "pod"})
    initialised(pod)
    pod.ends("vm", failed=failed)
    assert started(pod) == ["vm"]
    pod.ends("vm", failed=failed)
    pod.loses_its_sandbox()
    initialised(pod)
    assert list(pod.running()) == ["vm"]


def test_all_containers_are_restarted_in_the_same_sandbox(pods: Pods) -> None:
    pod = pods(init=("first", "second"))
    initialised(pod)
    sandbox = pod.ready_sandbox()
    pod.ends("vm", failed=True)
    pod.restarts_all_containers("vm")
    initialised(pod)
    pod.restarts_all_containers("second")
    initialised(pod)
    assert pod.ready_sandbox() == sandbox


# --- ephemeral containers


def test_an_ephemeral_container_is_refused_beside_an_init_container(pods: Pods) -> None:
    pod = pods(init=("first", "second"))
    started(pod)
    pod.debug()
    for _ in range(2):
        (debugger,) = pod.sync()
        assert debugger.code is grpc.StatusCode.FAILED_PRECONDITION
        assert ONE_VM in debugger.refusal
    assert list(pod.running()) == ["first"]


def test_an_ephemeral_container_is_refused_beside_and_in_place_of_the_pods_container(pods: Pods) -> None:
    """When the guest ends, kubelet starts the ephemeral container first."""
    pod = pods(init=("prepare",))
    initialised(pod)
    pod.debug()
    (debugger,) = pod.sync()
    assert (debugger.name, debugger.code) == ("debugger", grpc.StatusCode.FAILED_PRECONDITION)
    assert "kubectl exec" in debugger.refusal
    pod.ends("vm")
    debugger, vm = pod.sync()
    assert ONE_VM in debugger.refusal
    assert (vm.name, vm.refusal) == ("vm", "")
    assert list(pod.running()) == ["vm"]


def test_a_refused_ephemeral_container_does_not_block_init_containers_of_the_next_sandbox(pods: Pods) -> None:
    pod = pods(init=("first", "second"))
    initialised(pod)
    pod.debug()
    assert [one.runs for one in pod.sync()] == [False]
    pod.loses_its_sandbox()
    assert started(pod) == ["first"]
    assert [(one.name, one.runs) for one in pod.sync()] == [("debugger", False)]
    assert list(pod.running()) == ["first"]


def test_after_an_early_ephemeral_container_ends_the_pod_continues(pods: Pods) -> None:
    """If nothing runs yet, virtshim cannot tell it from an init container. The pod continues when it has ended."""
    pod = pods(init=("first", "second"))
    started(pod)
    pod.debug()
    pod.ends("first")
    assert [(one.name, one.runs) for one in pod.sync()] == [("debugger", True), ("second", False)]
    assert [(one.name, one.runs) for one in pod.sync()] == [("second", False)]
    pod.ends("debugger", failed=True)
    assert started(pod) == ["second"]
    pod.ends("second")
    assert started(pod) == ["vm"]


def test_the_refusal_of_the_pods_container_names_the_ephemeral_one_and_the_remedy(pods: Pods) -> None:
    pod = pods(init=("prepare",))
    started(pod)
    pod.debug()
    pod.ends("prepare")
    _, vm = pod.sync()
    assert f"container 'debugger' ({pod.running()['debugger']}) runs in it" in vm.refusal
    assert "crictl stop" in vm.refusal
    pod.ends("debugger")
    assert started(pod) == ["vm"]


# --- several containers


def test_a_pod_with_two_containers_is_refused_before_any_vm_boots(pods: Pods) -> None:
    pod = pods(init=("prepare",), containers=("vm", "sidecar"))
    for _ in range(2):
        (prepare,) = pod.sync()
        assert prepare.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "has 2 containers ('vm', 'sidecar';" in prepare.refusal
    assert pod.client.containers() == []
    assert pod.world.outside.vms.domains == {}


def test_a_native_sidecar_is_refused_before_it_boots(pods: Pods) -> None:
    pod = pods(init=("prepare", "proxy"), sidecars=("proxy",))
    for _ in range(2):
        (prepare,) = pod.sync()
        assert (prepare.name, prepare.code) == ("prepare", grpc.StatusCode.FAILED_PRECONDITION)
        assert "has 2 containers ('proxy', 'vm';" in prepare.refusal
    assert pod.client.containers() == []


# --- without the list


def test_init_containers_restarts_and_new_sandboxes_work_without_kubelets_list(pods_without_list: Pods) -> None:
    pod = pods_without_list(init=("first", "second"))
    initialised(pod)
    pod.ends("vm")
    assert started(pod) == ["vm"]
    pod.loses_its_sandbox()
    initialised(pod)
    pod.restarts_all_containers("vm")
    initialised(pod)


def test_a_second_container_is_refused_while_one_runs_without_kubelets_list(pods_without_list: Pods) -> None:
    pod = pods_without_list(containers=("vm", "sidecar"))
    vm, sidecar = pod.sync()
    assert vm.runs
    assert sidecar.code is grpc.StatusCode.FAILED_PRECONDITION
    assert ONE_VM in sidecar.refusal
    assert list(pod.running()) == ["vm"]


def test_an_ephemeral_container_is_refused_while_one_runs_without_kubelets_list(pods_without_list: Pods) -> None:
    pod = pods_without_list(init=("prepare",))
    started(pod)
    pod.debug()
    assert [(one.name, one.runs) for one in pod.sync()] == [("debugger", False)]
    pod.loses_its_sandbox()
    assert started(pod) == ["prepare"]
