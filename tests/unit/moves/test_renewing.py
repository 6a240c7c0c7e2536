"""A running guest gets a new QEMU, and its container continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.lasting import logged, memory, pod, running, state_of, steps_of, vm
from fakes.waiting import eventually
from fakes.world import World, container_config, sandbox_config

from virtshim.guest.operation import Outcome
from virtshim.model.container import ContainerPhase, ExitReason, Mount
from virtshim.model.errors import Aborted, InternalError, ResourceExhausted, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import PodKey
from virtshim.model.vm import OffReason, Power

RUNS = (ContainerPhase.RUNNING, Power.RUNNING)


def renew(world: World, container: ContainerId) -> Outcome:
    return world.app.operator.services.actions.renew(world.container(container))


def test_the_guest_continues_in_a_new_qemu_and_its_container_continues(world: World) -> None:
    container = running(world)
    before = world.container(container)
    assert renew(world, container).changed
    world.app.watch.look()
    now = world.container(container)
    assert state_of(world, container) == RUNS
    assert world.outside.vms.restored == [world.domain(container)]
    assert (now.status.started_at, now.exit) == (before.status.started_at, None)
    assert (now.status.saving, now.status.renewing, now.status.arriving) == (False, False, False)
    assert vm(world).saved is None
    assert not memory(world).exists()


def test_a_vm_is_renewed_as_often_as_wanted_and_then_saved(world: World) -> None:
    container = running(world)
    for _ in range(3):
        renew(world, container)
    world.stop(container, 30)
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.SAVED
    world.remove_sandbox(world.container(container).sandbox_id)
    second = running(world, 2)
    assert len(world.outside.vms.restored) == 4
    assert world.container(second).status.known_as == container


def test_the_vm_of_a_pod_without_save_can_be_renewed(world: World) -> None:
    world.pull()
    own = sandbox_config(annotations={"virtshim.io/vm": "db", "virtshim.io/disks": "a: {size: 1Gi}"})
    container = world.create(world.do.run_sandbox.run(PodKey("default", "db-0", "uid-1", 0), own, world.deadline()))
    world.start(container)
    renew(world, container)
    assert state_of(world, container) == RUNS


def test_a_vm_that_goes_with_its_pod_is_refused(world: World) -> None:
    world.pull()
    container = world.create(world.run())
    world.start(container)
    with pytest.raises(WrongState, match=r"virtshim\.io/vm can be renewed"):
        renew(world, container)
    assert state_of(world, container) == RUNS


def test_what_qemu_cannot_save_is_refused_with_the_remedy(world: World) -> None:
    world.pull()
    own = sandbox_config(annotations={"virtshim.io/vm": "db"})
    sandbox = world.do.run_sandbox.run(PodKey("default", "db-0", "uid-1", 0), own, world.deadline())
    shared = Mount("/data", "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv/mount")
    container = world.create(sandbox, config=container_config(mounts=(shared,)))
    world.start(container)
    with pytest.raises(WrongState, match=r"cannot be renewed with the shared volume /data.*use the root disk"):
        renew(world, container)


@pytest.mark.parametrize("failing", ["vms.save_memory", "saved_vms.finish", "saved_vms.put", "vms.pause"])
def test_a_guest_whose_memory_cannot_be_written_runs_on_in_its_qemu(world: World, failing: str) -> None:
    container = running(world)
    world.journal.fail(failing, ResourceExhausted("the disk is full"))
    with pytest.raises(ResourceExhausted):
        renew(world, container)
    assert state_of(world, container) == RUNS
    assert world.outside.vms.restored == []
    assert vm(world).saved is None
    renew(world, container)
    assert state_of(world, container) == RUNS


def test_if_libvirt_does_not_answer_the_next_container_continues(world: World) -> None:
    container = running(world)
    world.journal.fail("vms.restore", Unavailable("libvirt does not answer"))
    with pytest.raises(Unavailable):
        renew(world, container)
    ended = world.container(container)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (143, ExitReason.SAVED)
    again = world.create(ended.sandbox_id, attempt=1)
    world.start(again)
    assert world.outside.vms.restored == [world.domain(again)]
    assert vm(world).saved is None


def test_memory_that_the_new_qemu_refuses_ends_the_container_with_the_reason(world: World) -> None:
    container = running(world)
    world.journal.fail("vms.restore", InternalError("unknown machine type"))
    with pytest.raises(InternalError):
        renew(world, container)
    ended = world.container(container)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (137, ExitReason.ERROR)
    assert "unknown machine type" in ended.exit.message
    again = world.create(ended.sandbox_id, attempt=1)
    world.start(again)
    assert state_of(world, again) == RUNS
    assert any("it could not be restored" in line for line in logged(world))


def test_a_stop_waits_for_the_new_qemu_and_then_stops_it(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("saved_vms.flush")
    renewing = Background(lambda: renew(world, container))
    gate.wait()
    world.outside.clock.held = True
    stopping = Background(lambda: world.stop(container, 30))
    world.outside.clock.until_waiting()
    world.outside.clock.held = False
    gate.open()
    renewing.done()
    stopping.done()
    assert world.outside.vms.restored == [world.domain(container)]
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.SAVED


def test_a_stop_without_time_ends_the_vm_although_it_is_being_renewed(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("saved_vms.flush")
    renewing = Background(lambda: renew(world, container))
    gate.wait()
    ended_before = world.journal.count("vms.destroy")
    stopping = Background(lambda: world.stop(container, 0))
    eventually(lambda: world.journal.count("vms.destroy") > ended_before)
    gate.open()
    stopping.done()
    with contextlib.suppress(ShimError):
        renewing.done()
    assert state_of(world, container) == (ContainerPhase.EXITED, Power.OFF)
    ended = world.container(container).exit
    assert ended is not None
    assert ended.message == "killed: its memory was still being written after 0 s"


def test_two_renewals_at_once_are_refused(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("saved_vms.flush")
    renewing = Background(lambda: renew(world, container))
    gate.wait()
    with pytest.raises(Aborted, match="is getting a new QEMU"):
        renew(world, container)
    gate.open()
    renewing.done()
    assert state_of(world, container) == RUNS


def test_a_guest_that_powers_off_right_after_it_was_renewed_ends_its_container(world: World) -> None:
    container = running(world)
    renew(world, container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.app.watch.look()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.COMPLETED


def test_after_a_reboot_of_the_node_the_next_sandbox_continues(world: World) -> None:
    """The node lost power while QEMU was off."""
    container = running(world)
    world.journal.fail("vms.destroy", InternalError("libvirt is busy"))
    with pytest.raises(InternalError):
        renew(world, container)
    assert vm(world).saved is not None
    world.outside.vms.reboot_host()
    world = world.recovered(rebooted=True)
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.SAVED
    world.remove_sandbox(world.container(container).sandbox_id)
    second = world.create(pod(world, 2))
    world.start(second)
    assert world.outside.vms.restored == [world.domain(second)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_kill_at_any_step_of_a_renewal_loses_nothing(make_world: Callable[[], World], when: When) -> None:
    calls = steps_of(make_world, lambda world: renew(world, running(world)), running)
    assert calls > 15
    for at in range(1, calls + 1):
        world: World = make_world()
        container = running(world)
        world.journal.forget()
        world.journal.crash(at, when)
        with contextlib.suppress(Crash, Exception):
            renew(world, container)
        world = world.recovered()
        world.app.watch.look()
        assert state_of(world, container) == RUNS, f"at {at}"
        status = world.container(container).status
        assert (status.saving, status.renewing, status.arriving) == (False, False, False), f"at {at}"
        assert vm(world).saved is None, f"at {at}"
        assert not memory(world).exists(), f"at {at}"
        renew(world, container)
        assert state_of(world, container) == RUNS, f"at {at}"
        world.close()
