"""If a QEMU's monitor or tapmanager hangs, calls that need it fail with the reason, and everything else works. After
SIGCONT all is well again.

A call that answers while a process is stopped did not wait for it. A call that waits without a bound gets the client's
DEADLINE_EXCEEDED, without a message of virtshim."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator

import grpc
import pytest
from fakes.processes import hanging
from mortal_node import MortalNode
from podclient import wait_until
from work import Work

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.operator_client import operating
from virtshim.guest.operation import Action
from virtshim.model.errors import DeadlineExceeded
from virtshim.model.layout import admin_socket

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

# Seconds.
SOON = 15.0
GRACE = 2


def code_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def all_at_once(*calls: Callable[[], object]) -> list[tuple[grpc.StatusCode, str]]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(code_of, calls))


@pytest.fixture
def hung(mortal: MortalNode, work: Work) -> Iterator[int]:
    """Stops the QEMU of the running pod `work`."""
    for step in (work.run, work.create, work.start):
        step()
    assert mortal.bystander is not None
    (pid,) = mortal.qemu_pids() - mortal.bystander.pids
    with hanging(pid):
        yield pid


def conditions(work: Work) -> dict[str, pb.RuntimeCondition]:
    status = work.cri.runtime.Status(pb.StatusRequest(), timeout=30).status
    return {condition.type: condition for condition in status.conditions}


def test_a_hung_qemu_blocks_nobody_and_is_killed_after_its_grace_period(
    mortal: MortalNode, work: Work, hung: int
) -> None:
    runtime = work.cri.runtime
    assert len(work.cri.pods()) == 2
    assert len(work.cri.containers()) == 2
    assert work.cri.status(work.container).state == pb.CONTAINER_RUNNING
    assert all(condition.status for condition in conditions(work).values())
    assert len(runtime.ListContainerStats(pb.ListContainerStatsRequest(), timeout=30).stats) == 2
    assert len(runtime.ListPodSandboxStats(pb.ListPodSandboxStatsRequest(), timeout=30).stats) == 2
    other = Work(mortal, work.cri, work.image)
    for step in (other.run, other.create, other.start, other.stop, other.remove_pod):
        step()
    mortal.check_bystander(work.cri)
    bigger = pb.LinuxContainerResources(memory_limit_in_bytes=48 << 20)
    update = pb.UpdateContainerResourcesRequest(container_id=work.container, linux=bigger)
    code, words = code_of(lambda: runtime.UpdateContainerResources(update, timeout=60))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "does not answer" in words
    work.cri.stop(work.container, GRACE)
    status = work.cri.status(work.container)
    assert (status.state, status.exit_code) == (pb.CONTAINER_EXITED, 137)
    assert hung not in mortal.qemu_pids()


def pause(mortal: MortalNode, work: Work) -> None:
    with operating(admin_socket(mortal.settings.layout())) as operator:
        operator.act(Action.PAUSE, work.container)


@pytest.mark.full
def test_a_hung_pause_is_given_up_and_does_not_block_a_stop(mortal: MortalNode, work: Work, hung: int) -> None:
    with pytest.raises(DeadlineExceeded, match="does not answer"):
        pause(mortal, work)
    work.cri.stop(work.container, GRACE)
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED
    assert hung not in mortal.qemu_pids()


@pytest.mark.full
def test_a_paused_vm_whose_qemu_hangs_can_be_stopped(mortal: MortalNode, work: Work) -> None:
    """The VM must be resumed before it is asked to shut down."""
    for step in (work.run, work.create, work.start):
        step()
    pause(mortal, work)
    assert mortal.bystander is not None
    (pid,) = mortal.qemu_pids() - mortal.bystander.pids
    with hanging(pid):
        work.cri.stop(work.container, GRACE)
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED
    assert pid not in mortal.qemu_pids()


@pytest.mark.full
def test_a_pod_whose_qemu_hangs_can_be_removed(mortal: MortalNode, work: Work, hung: int) -> None:
    work.remove_pod()
    assert work.is_pod_removed()
    assert hung not in mortal.qemu_pids()


@pytest.mark.full
def test_virtshim_can_restart_while_a_qemu_hangs(mortal: MortalNode, work: Work, hung: int) -> None:
    mortal.kill("virtshim")
    mortal.up()
    assert work.cri.status(work.container).state == pb.CONTAINER_RUNNING
    other = Work(mortal, work.cri, work.image)
    for step in (other.run, other.create, other.start, other.stop, other.remove_pod):
        step()
    work.cri.stop(work.container, GRACE)
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED


def test_a_hung_tapmanager_is_reported_and_calls_work_when_it_continues(mortal: MortalNode, work: Work) -> None:
    idle, late = Work(mortal, work.cri, work.image), Work(mortal, work.cri, work.image)
    for step in (work.run, work.create, idle.run):
        step()
    with hanging(mortal.pid("tapmanager")):
        told = conditions(work)
        assert not told["NetworkReady"].status
        assert "tapmanager" in told["NetworkReady"].message
        assert told["RuntimeReady"].status
        for code, words in all_at_once(late.run, work.start, idle.stop_pod):
            assert code is grpc.StatusCode.UNAVAILABLE, words
            assert "tapmanager" in words
        assert {work.pod, idle.pod} <= {pod.id for pod in work.cri.pods()}
        assert mortal.bystander is not None
        assert work.cri.status(mortal.bystander.container).state == pb.CONTAINER_RUNNING
    wait_until(lambda: all(one.status for one in conditions(work).values()), SOON, "the network is ready again")
    late.run()
    assert late.is_ready()
    late.remove_pod()
    idle.stop_pod()
    assert idle.is_pod_stopped()
