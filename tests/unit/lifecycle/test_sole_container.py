"""A pod whose containers cannot all run, asked for as kubelet does: in the order of its spec, again and again."""

from __future__ import annotations

import pytest
from fakes.world import World

from virtshim.domain.container import ContainerPhase
from virtshim.domain.errors import ShimError, Unavailable, WrongState
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.vm import OffReason


@pytest.fixture
def sandbox(world: World) -> SandboxId:
    world.pull()
    return world.run()


def started(world: World, sandbox: SandboxId, name: str = "vm", attempt: int = 0) -> ContainerId:
    container = world.create(sandbox, name, attempt)
    world.start(container)
    return container


def ended(world: World, container: ContainerId, code: int) -> None:
    """As its guest ends by itself, or QEMU by a signal."""
    world.outside.vms.end(world.domain(container), OffReason.CRASHED if code else OffReason.SHUTDOWN)
    world.deliver()
    found = world.container(container)
    assert found.exit is not None
    assert (found.phase, found.exit.code == 0) == (ContainerPhase.EXITED, code == 0)


def refusal(world: World, sandbox: SandboxId, name: str, attempt: int = 0) -> str:
    with pytest.raises(WrongState) as refused:
        world.create(sandbox, name, attempt)
    return str(refused.value)


@pytest.mark.parametrize("code", [0, 137])
def test_a_second_container_never_takes_the_first_ones_place(world: World, sandbox: SandboxId, code: int) -> None:
    first = started(world, sandbox)
    why = refusal(world, sandbox, "sidecar")
    assert "container 'sidecar' cannot run in this pod: a pod is one virtual machine" in why
    assert "that of container 'vm'" in why
    ended(world, first, code)
    assert refusal(world, sandbox, "sidecar") == why
    world = world.recovered()
    assert refusal(world, sandbox, "sidecar") == why
    world.remove(first)
    assert refusal(world, sandbox, "sidecar") == why
    again = started(world, sandbox, attempt=1)
    assert refusal(world, sandbox, "sidecar") == why
    assert [vm.container_id for vm in world.outside.vms.running()] == [again]


def test_the_pod_keeps_its_identity_in_its_next_sandbox(world: World, sandbox: SandboxId) -> None:
    """kubelet does not begin a container again that has succeeded, and would begin with the other one."""
    first = started(world, sandbox)
    why = refusal(world, sandbox, "sidecar")
    ended(world, first, 0)
    world.stop_sandbox(sandbox)
    assert refusal(world, world.run(attempt=1), "sidecar") == why
    started(world, world.run("another-pod"), "sidecar")


def test_a_container_that_failed_was_no_init_container(world: World, sandbox: SandboxId) -> None:
    ended(world, started(world, sandbox), 137)
    refusal(world, sandbox, "sidecar")
    started(world, sandbox, attempt=1)


def test_a_container_that_could_not_be_started_keeps_its_pod(world: World, sandbox: SandboxId) -> None:
    world.journal.fail("vms.start", Unavailable("no"))
    with pytest.raises(ShimError):
        started(world, sandbox)
    refusal(world, sandbox, "sidecar")
    started(world, sandbox, attempt=1)


def test_an_ephemeral_container_is_refused_beside_a_running_one_and_after_a_restart(
    world: World, sandbox: SandboxId
) -> None:
    ended(world, started(world, sandbox), 0)
    second = started(world, sandbox, attempt=1)
    ended(world, second, 0)
    assert "an ephemeral container" in refusal(world, sandbox, "debugger-x7k2p")


def test_init_containers_run_one_after_another_and_then_the_container(world: World, sandbox: SandboxId) -> None:
    ended(world, started(world, sandbox, "init-1"), 137)
    ended(world, started(world, sandbox, "init-1", attempt=1), 0)
    ended(world, started(world, sandbox, "init-2"), 0)
    container = started(world, sandbox)
    refusal(world, sandbox, "sidecar")
    ended(world, container, 0)
    refusal(world, sandbox, "sidecar")
    started(world, sandbox, attempt=1)


def test_a_native_sidecar_that_runs_is_the_pod(world: World, sandbox: SandboxId) -> None:
    """Nothing in CRI tells it from a container; it is asked for first, and never ends before the others are."""
    started(world, sandbox, "native-sidecar")
    for _ in range(2):
        assert "that of container 'native-sidecar'" in refusal(world, sandbox, "vm")


def test_a_container_that_was_only_created_decides_nothing(world: World, sandbox: SandboxId) -> None:
    world.create(sandbox, "never-started")
    started(world, sandbox)
