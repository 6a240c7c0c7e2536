"""StopPodSandbox and RemovePodSandbox may be repeated at any time, and nothing is left behind."""

import pytest
from fakes.world import World

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Unavailable
from virtshim.model.sandbox import SandboxPhase
from virtshim.model.vm import Power


def test_a_stopped_sandbox_is_not_ready_and_has_no_network(world: World) -> None:
    sandbox = world.run()
    world.stop_sandbox(sandbox)
    record = world.sandbox(sandbox)
    assert (record.phase, record.reason, record.network_released) == (SandboxPhase.NOT_READY, "stopped", True)
    assert world.outside.networks.networks == {}


def test_stop_ends_running_containers_and_removes_nothing(world: World) -> None:
    sandbox, container = world.running()
    world.stop_sandbox(sandbox)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert container in world.outside.disks.directories


def test_the_vm_is_off_before_its_network_is_released(world: World) -> None:
    sandbox, _ = world.running()
    world.journal.calls.clear()
    world.stop_sandbox(sandbox)
    assert world.journal.calls.index("vms.destroy") < world.journal.calls.index("networks.release")


def test_stop_gives_no_grace(world: World) -> None:
    sandbox, _ = world.running()
    before = world.outside.clock.monotonic()
    world.stop_sandbox(sandbox)
    assert world.outside.vms.pressed == []
    assert world.outside.clock.monotonic() == before


def test_the_network_is_released_once(world: World) -> None:
    sandbox = world.run()
    world.stop_sandbox(sandbox)
    world.stop_sandbox(sandbox)
    assert world.journal.count("networks.release") == 1


def test_a_failed_release_is_an_error_and_the_next_stop_tries_again(world: World) -> None:
    sandbox = world.run()
    world.journal.fail("networks.release", Unavailable("tapmanager is gone"))
    with pytest.raises(Unavailable):
        world.stop_sandbox(sandbox)
    assert world.sandbox(sandbox).phase is SandboxPhase.NOT_READY
    world.stop_sandbox(sandbox)
    assert world.sandbox(sandbox).network_released


def test_the_release_gets_its_minimum_time_even_after_the_callers_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    sandbox = world.run()
    monkeypatch.setattr(world.outside.networks, "release", lambda sandbox, timeout: given.append(timeout))
    world.do.stop_sandbox.stop(world.sandbox(sandbox), world.deadline(0))
    assert given == [world.settings.cri.stop_timeout]


def test_a_vm_whose_removal_failed_is_off_before_its_network_is_released(world: World) -> None:
    sandbox, container = world.running()
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.remove(container)
    world.stop_sandbox(sandbox)
    assert world.outside.vms.power(world.domain(container)).power is Power.OFF


def test_a_vm_whose_failed_start_was_not_undone_is_off_before_its_network_is_released(world: World) -> None:
    sandbox = world.run()
    container = world.create(sandbox)
    world.journal.fail("vms.start", Unavailable("lost the answer"), after=True)
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.start(container)
    world.stop_sandbox(sandbox)
    assert world.outside.vms.running() == []


def test_containers_of_other_pods_are_left_alone(world: World) -> None:
    sandbox, _ = world.running("one")
    _, other = world.running("two")
    world.remove_sandbox(sandbox)
    assert world.container(other).phase is ContainerPhase.RUNNING


def test_remove_removes_everything(world: World) -> None:
    sandbox, first = world.running()
    world.stop(first)
    second = world.create(sandbox, attempt=1)
    world.create(sandbox, attempt=2)  # never started
    world.start(second)
    world.remove_sandbox(sandbox)
    assert world.everything() == []


def test_removing_twice_is_no_error(world: World) -> None:
    record = world.sandbox(world.run())
    world.do.remove_sandbox.remove(record, world.deadline())
    world.do.remove_sandbox.remove(record, world.deadline())
    world.do.stop_sandbox.stop(record, world.deadline())


STEPS = ["vms.destroy", "vms.undefine", "disks.delete", "networks.release", "records.containers.delete"]
STEPS += ["records.sandboxes.replace", "records.sandboxes.delete"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_removal_that_failed_forgets_nothing_and_the_next_finishes_it(world: World, step: str, after: bool) -> None:
    sandbox, _ = world.running()
    record = world.sandbox(sandbox)
    # A disk is deleted when its container ends, where a failure holds up nothing, and by the removal again.
    times = 2 if step == "disks.delete" else 1
    world.journal.fail(step, Unavailable("not now"), times=times, after=after)
    with pytest.raises(Unavailable):
        world.remove_sandbox(sandbox)
    assert world.leftovers() == []
    world.do.remove_sandbox.remove(record, world.deadline())
    assert world.everything() == []
