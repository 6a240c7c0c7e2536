"""A start that fails for any reason leaves no VM on, and the VM is off after a stop returns."""

from __future__ import annotations

import pytest
from fakes.world import World

from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import Unavailable


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError(24, "Too many open files")])
def test_a_start_that_fails_with_an_unexpected_error_leaves_no_vm_on(world: World, error: Exception) -> None:
    container = world.create(world.run())
    world.journal.fail("vms.start", error, after=True)
    with pytest.raises(type(error)):
        world.start(container)
    assert world.outside.vms.running() == []
    ended = world.container(container)
    assert ended.phase is ContainerPhase.EXITED
    assert ended.exit is not None
    assert ended.exit.reason is ExitReason.START_ERROR


def test_a_start_whose_follower_gets_no_thread_is_undone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    container = world.create(world.run())

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(type(world.app.guest_set_up), "follow", no_thread)
    with pytest.raises(RuntimeError):
        world.start(container)
    assert world.outside.vms.running() == []
    assert world.container(container).phase is ContainerPhase.EXITED


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_the_vm_of_a_created_container_is_off_when_its_stop_returns(world: World, grace: float) -> None:
    container = world.create(world.run())
    world.outside.vms.power_on(world.domain(container))
    world.stop(container, grace)
    assert world.outside.vms.running() == []


def test_the_vm_of_a_created_container_is_off_when_the_stop_of_its_pod_returns(world: World) -> None:
    sandbox = world.run()
    container = world.create(sandbox)
    world.outside.vms.power_on(world.domain(container))
    world.stop_sandbox(sandbox)
    assert world.outside.vms.running() == []
    assert world.outside.networks.networks == {}


def test_a_pod_keeps_its_network_while_the_vm_of_a_created_container_cannot_be_ended(world: World) -> None:
    sandbox = world.run()
    container = world.create(sandbox)
    world.outside.vms.power_on(world.domain(container))
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.stop_sandbox(sandbox)
    assert sandbox in world.outside.networks.networks
