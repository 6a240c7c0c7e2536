"""QEMU runs when StartContainer returns; a failed start ends the container with StartError."""

import uuid
from typing import Any

import pytest
from fakes.world import LOG_DIRECTORY, World, sandbox_config

from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import InternalError, NotFound, ResourceExhausted, ShimError, Unavailable, WrongState
from virtshim.model.vm import OffReason


def test_the_vm_runs_and_the_log_file_is_there(world: World) -> None:
    container = world.create(world.run())
    world.outside.clock.advance(5)
    world.start(container)
    record = world.container(container)
    assert record.phase is ContainerPhase.RUNNING
    assert record.status.started_at == world.outside.clock.now_ns()
    assert world.outside.vms.power(world.domain(container)).is_on
    assert world.outside.consoles.logs == {f"{LOG_DIRECTORY}/vm/0.log": []}


@pytest.mark.parametrize(
    ("annotations", "queues"),
    [({}, 1), ({"VirtletVCPUCount": "4"}, 4), ({"VirtletVCPUCount": "4", "virtshim.io/nic-queues": "2"}, 2)],
)
def test_the_vm_is_given_as_many_queues_as_it_has_vcpus(world: World, annotations: dict[str, str], queues: int) -> None:
    world.pull()
    container = world.create(world.run(config=sandbox_config(annotations=annotations)))
    world.start(container)
    assert world.outside.cgroups.group(container).nic_queues == queues


def test_times_stay_in_order_when_the_clock_is_set_back(world: World) -> None:
    container = world.create(world.run())
    world.outside.clock.set_back(3600)
    world.start(container)
    world.outside.clock.set_back(3600)
    world.stop(container)
    ended = world.container(container)
    assert ended.exit is not None
    assert ended.created_at <= ended.status.started_at <= ended.exit.finished_at


def test_the_console_is_open_before_the_vm_boots(world: World) -> None:
    container = world.create(world.run())
    world.journal.calls.clear()
    world.start(container)
    assert world.journal.calls[:4] == ["consoles.open", "cgroups.make", "vms.start", "records.containers.replace"]


def test_a_running_container_is_not_started_again(world: World) -> None:
    _, container = world.running()
    with pytest.raises(WrongState, match="only a created one"):
        world.start(container)
    assert world.container(container).phase is ContainerPhase.RUNNING


def test_an_exited_container_is_not_started_again(world: World) -> None:
    _, container = world.running()
    world.stop(container)
    with pytest.raises(WrongState, match="exited"):
        world.start(container)


def test_a_container_removed_meanwhile_is_not_found(world: World) -> None:
    container = world.container(world.create(world.run()))
    world.remove(container.id)
    with pytest.raises(NotFound):
        world.do.start_container.start(container)


def test_a_container_of_a_stopped_sandbox_does_not_start(world: World) -> None:
    sandbox = world.run()
    container = world.create(sandbox)
    world.stop_sandbox(sandbox)
    with pytest.raises(WrongState, match="not ready"):
        world.start(container)


def test_a_second_container_does_not_run_beside_the_first(world: World) -> None:
    sandbox = world.run()
    first, second = world.create(sandbox), world.create(sandbox, "sidecar")
    world.start(first)
    with pytest.raises(WrongState, match="a pod is one virtual machine") as refused:
        world.start(second)
    assert first.value in str(refused.value)
    assert world.container(second).phase is ContainerPhase.CREATED


def test_a_second_container_runs_after_the_first(world: World) -> None:
    sandbox = world.run()
    first, second = world.create(sandbox), world.create(sandbox, "main")
    world.start(first)
    world.stop(first)
    world.start(second)
    assert world.container(second).phase is ContainerPhase.RUNNING


def test_containers_of_other_pods_do_not_matter(world: World) -> None:
    world.running("one")
    world.running("two")
    assert len(world.outside.vms.running()) == 2


def test_the_vm_of_a_container_whose_removal_failed_ends_before_another_starts(world: World) -> None:
    sandbox, first = world.running()
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"), times=2)
    with pytest.raises(Unavailable):
        world.remove(first)
    second = world.create(sandbox, attempt=1)
    with pytest.raises(Unavailable):
        world.start(second)
    world.start(second)
    assert [vm.container_id for vm in world.outside.vms.running()] == [second]


def test_the_vm_of_a_failed_start_ends_before_the_next_attempt_starts(world: World) -> None:
    sandbox = world.run()
    world.journal.fail("vms.start", Unavailable("lost the answer"), after=True)
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.start(world.create(sandbox))
    second = world.create(sandbox, attempt=1)
    world.start(second)
    assert [vm.container_id for vm in world.outside.vms.running()] == [second]


@pytest.mark.parametrize("step", ["consoles.open", "vms.start"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failed_start_is_an_end_with_start_error(world: World, step: str, after: bool) -> None:
    container = world.create(world.run())
    world.journal.fail(step, InternalError("no such file: root.qcow2"), after=after)
    with pytest.raises(InternalError, match="no such file"):
        world.start(container)
    ended = world.container(container)
    assert ended.phase is ContainerPhase.EXITED
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (128, ExitReason.START_ERROR)
    assert "no such file" in ended.exit.message
    assert world.outside.vms.running() == []
    assert world.outside.consoles.following == {}
    assert world.outside.cgroups.armed == set()
    assert world.outside.cgroups.cgroups == {}


def test_no_vm_runs_if_its_start_could_not_be_recorded(world: World) -> None:
    container = world.create(world.run())
    world.journal.fail("records.containers.replace", ResourceExhausted("disk full"))
    with pytest.raises(ResourceExhausted):
        world.start(container)
    assert world.outside.vms.running() == []
    assert world.container(container).phase is not ContainerPhase.RUNNING


def test_no_vm_runs_if_not_even_its_failed_start_could_be_recorded(world: World) -> None:
    sandbox = world.run()
    container = world.create(sandbox)
    world.journal.fail("records.containers.replace", ResourceExhausted("disk full"), times=2)
    with pytest.raises(ResourceExhausted):
        world.start(container)
    assert world.outside.vms.running() == []
    assert world.outside.consoles.following == {}
    world.remove_sandbox(sandbox)
    assert world.everything() == []


def test_a_failed_undo_does_not_hide_why_the_start_failed(world: World) -> None:
    container = world.create(world.run())
    world.journal.fail("vms.start", InternalError("QEMU said no"), after=True)
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(InternalError, match="QEMU said no"):
        world.start(container)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert world.outside.consoles.following == {}


def test_a_guest_that_ends_before_the_record_says_running_is_seen(world: World) -> None:
    world.outside.vms.ends_at_once = True
    _, container = world.running()
    ended = world.container(container)
    assert ended.phase is ContainerPhase.EXITED
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (0, ExitReason.COMPLETED)


def test_a_start_succeeds_even_if_the_vms_state_cannot_be_read_afterwards(world: World) -> None:
    container = world.create(world.run())
    world.journal.fail("vms.power", Unavailable("libvirt is gone"))
    try:
        world.start(container)
    except ShimError as error:
        pytest.fail(f"the VM runs, but kubelet is told: {error}")
    assert world.container(container).phase is ContainerPhase.RUNNING


def test_a_paused_vm_counts_as_running(world: World) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container))
    world.outside.vms.deliver()
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.outside.vms.end(world.domain(container), OffReason.CRASHED)


@pytest.mark.parametrize("call", ["create", "start"])
def test_the_number_of_other_pods_adds_no_uuid_to_a_call(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Making one from its text takes 2 us, and a node has hundreds of records."""
    made: list[str] = []

    class Counted(uuid.UUID):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append("one")
            super().__init__(*args, **options)

    def uuids(number: int) -> int:
        sandbox = world.run(f"pod-{number}")
        container = None if call == "create" else world.create(sandbox)
        with monkeypatch.context() as patched:
            patched.setattr(uuid, "UUID", Counted)
            made.clear()
            world.create(sandbox) if container is None else world.start(container)
        return len(made)

    alone, *with_others = [uuids(number) for number in range(4)]
    assert with_others == [alone] * 3
