"""virtshim refuses containers of a pod that cannot all run. Whole orders of kubelet's calls are in
tests/contract/kubelet_orders."""

from __future__ import annotations

import pytest
from fakes.adopted import adopt
from fakes.world import World

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import OffReason


@pytest.fixture
def sandbox(world: World) -> SandboxId:
    world.pull()
    return world.run()


def lists(world: World, *names: str, pod: str = "web") -> None:
    """What kubelet lists of a pod."""
    world.outside.devices.listed |= {("default", pod, name) for name in names}


def started(world: World, sandbox: SandboxId, name: str = "vm", attempt: int = 0) -> ContainerId:
    container = world.create(sandbox, name, attempt)
    world.start(container)
    return container


def ended(world: World, container: ContainerId, code: int = 0) -> None:
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


def test_neither_of_two_containers_boots_in_any_sandbox_of_the_pod(world: World, sandbox: SandboxId) -> None:
    lists(world, "vm", "sidecar")
    for name in ("vm", "sidecar", "init"):
        why = refusal(world, sandbox, name)
        assert f"container '{name}' cannot run in this pod: a pod is one virtual machine" in why
        assert "has 2 containers ('sidecar', 'vm'; native sidecars count" in why
    world.stop_sandbox(sandbox)
    refusal(world, world.run(attempt=1), "vm")
    assert world.outside.vms.domains == {}
    lists(world, "sidecar", pod="another-pod")
    started(world, world.run("another-pod"), "sidecar")


def test_a_refused_container_does_not_cause_later_refusals(world: World, sandbox: SandboxId) -> None:
    lists(world, "vm")
    first = started(world, sandbox, "init-1")
    before = (world.sandbox(sandbox), world.records.containers.all())
    assert "runs in it" in refusal(world, sandbox, "init-2")
    assert (world.sandbox(sandbox), world.records.containers.all()) == before
    ended(world, first)
    ended(world, started(world, sandbox, "init-2"))
    started(world, sandbox)


def test_an_unlisted_container_is_refused_where_the_pods_own_has_run(world: World, sandbox: SandboxId) -> None:
    lists(world, "vm")
    vm = started(world, sandbox)
    assert "an ephemeral container" in refusal(world, sandbox, "debugger-x7k2p")
    ended(world, vm)
    assert f"container 'vm' ({vm}) is it" in refusal(world, sandbox, "debugger-x7k2p")
    assert "is it" in refusal(world.recovered(), sandbox, "debugger-x7k2p")


def test_init_containers_run_again_when_the_pods_own_was_removed(world: World, sandbox: SandboxId) -> None:
    lists(world, "vm")
    ended(world, started(world, sandbox, "init"))
    vm = started(world, sandbox)
    refusal(world, sandbox, "init", attempt=1)
    world.remove(vm)
    ended(world, started(world, sandbox, "init", attempt=1))
    started(world, sandbox, attempt=1)


def test_a_container_that_could_not_be_started_is_tried_again(world: World, sandbox: SandboxId) -> None:
    world.journal.fail("vms.start", Unavailable("no"))
    with pytest.raises(ShimError):
        started(world, sandbox)
    started(world, sandbox, attempt=1)


def test_without_kubelets_list_only_a_running_container_refuses_another(world: World, sandbox: SandboxId) -> None:
    vm = started(world, sandbox)
    why = refusal(world, sandbox, "sidecar")
    assert f"container 'vm' ({vm}) runs in it. Put a second one (a sidecar" in why
    assert "kubectl debug" in why
    assert "stop it first" in refusal(world, sandbox, "vm", attempt=1)
    ended(world, vm)
    started(world, sandbox, "sidecar")


def test_a_container_that_was_never_started_refuses_no_other(world: World, sandbox: SandboxId) -> None:
    world.create(sandbox, "never-started")
    started(world, sandbox)


def test_helpers_of_an_adopted_sandbox_do_not_count_as_its_vm(world: World) -> None:
    world.pull()
    lists(world, "vm", "mesh-proxy", "vault-agent")
    sandbox = adopt(world)
    ended(world, started(world, sandbox, "vm-init"))
    vm = started(world, sandbox)
    ended(world, vm, code=137)
    assert world.container(started(world, sandbox, attempt=1)).is_running


def test_a_second_vm_of_an_adopted_sandbox_is_refused_whether_the_first_runs_or_has_ended(world: World) -> None:
    world.pull()
    lists(world, "vm", "second", "mesh-proxy")
    sandbox = adopt(world)
    vm = started(world, sandbox)
    why = refusal(world, sandbox, "second")
    assert "a pod has one virtual machine" in why
    assert "('second', 'vm';" in why
    assert "Put the second one into a pod of its own" in why
    ended(world, vm)
    assert refusal(world, sandbox, "second") == why
    assert "an ephemeral container" in refusal(world, sandbox, "debugger-x7k2p")
