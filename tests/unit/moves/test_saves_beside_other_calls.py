"""VMs are saved and renewed correctly while other calls, guests and full disks interfere."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fakes.background import Background
from fakes.journal import Crash
from fakes.lasting import memory, pod, running, state_of, vm
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.containers.operate import VmActions
from virtshim.guest.freeze import GuestFreezer
from virtshim.model.container import ContainerPhase, Exit, ExitReason, Resources
from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, ResourceExhausted, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import PodKey
from virtshim.model.vm import Power
from virtshim.moves.files import SavedVmFiles
from virtshim.moves.values import VmRecord

RUNS = (ContainerPhase.RUNNING, Power.RUNNING)


def actions(world: World) -> VmActions:
    return world.app.operator.services.actions


def renew(world: World, container: ContainerId) -> Any:
    return actions(world).renew(world.container(container))


def save(world: World, container: ContainerId) -> Any:
    return actions(world).save(world.container(container))


def started(world: World, name: str) -> ContainerId:
    """A running VM of that name."""
    annotations = {"virtshim.io/vm": name}
    sandbox = world.do.run_sandbox.run(pod_key(name), sandbox_config(annotations=annotations), world.deadline())
    container = world.create(sandbox)
    world.start(container)
    return container


def test_old_memory_never_meets_new_empty_disks(world: World) -> None:
    own = sandbox_config(annotations={"virtshim.io/vm": "db", "virtshim.io/disks": "a: {size: 1Gi}"})
    container = world.create(world.do.run_sandbox.run(PodKey("default", "db-0", "uid-1", 0), own, world.deadline()))
    world.start(container)
    world.journal.fail("vms.restore", Unavailable("libvirt does not answer"))
    with pytest.raises(Unavailable):
        renew(world, container)
    again = world.create(world.container(container).sandbox_id, attempt=1)
    world.start(again)
    assert world.outside.vms.restored == [], "old memory on a new, empty disk"


def test_a_guest_is_not_saved_with_frozen_file_systems(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    container = running(world)
    world.outside.clock.held = True
    passed, go = threading.Event(), threading.Event()
    hold = GuestFreezer.hold

    def late(self: GuestFreezer, *args: Any) -> int:
        passed.set()
        go.wait(30)
        return hold(self, *args)

    monkeypatch.setattr(GuestFreezer, "hold", late)
    freezing = Background(lambda: actions(world).freeze(world.container(container)))
    passed.wait(30)
    gate = world.journal.hold("vms.pause")
    saving = Background(lambda: save(world, container))
    gate.wait()
    go.set()
    with contextlib.suppress(ShimError):
        freezing.done()
    frozen = set(world.outside.guests.frozen)
    gate.open()
    with contextlib.suppress(ShimError):
        saving.done()
    state = vm(world).saved
    assert not (state is not None and frozen), "the saved guest has frozen file systems, and nobody will thaw them"


def test_the_recorded_end_of_a_command_is_not_overwritten_by_a_save(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("vms.save_memory")
    saving = Background(lambda: world.app.watch.states.saving.save(world.container(container), 10.0))
    gate.wait()
    world.app.watch.exits.begin_end(container, Exit(0, ExitReason.COMPLETED, 1, ""))
    gate.open()
    with contextlib.suppress(Aborted):
        saving.done()
    now = world.container(container)
    how = now.exit or now.status.ending
    assert how is not None
    assert how.reason is ExitReason.COMPLETED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [Unavailable("libvirt does not answer"), InternalError("unknown machine type")])
def test_a_kill_after_a_failed_renewal_leaves_no_wrong_end(make_world: Callable[[], World], error: ShimError) -> None:
    wrong = []
    for at in range(14, 32):
        world: World = make_world()
        world.pull()
        own = sandbox_config(annotations={"virtshim.io/vm": "db"})
        container = world.create(world.do.run_sandbox.run(pod_key("db-0"), own, world.deadline()))
        world.start(container)
        world.journal.forget()
        world.journal.fail("vms.restore", error)
        world.journal.crash(at)
        with contextlib.suppress(Crash, Exception):
            renew(world, container)
        world = world.recovered()
        for _ in range(3):
            world.app.watch.look()
        now = world.container(container)
        state = vm(world).saved
        counts = state is not None and state.taken_by is None
        if now.exit is not None and now.exit.reason is ExitReason.SAVED and not counts:
            wrong.append((at, now.exit.message))
        if now.is_running and now.status.ending is not None:
            wrong.append((at, "running, with " + now.status.ending.message))
        world.close()
    assert wrong == []


@pytest.mark.parametrize("grace", [1, 2, 3, 6])
def test_a_silent_agent_does_not_use_up_the_grace_period(world: World, grace: int) -> None:
    container = running(world)
    clock = world.outside.clock

    def silent(_container: ContainerId) -> tuple[int, str]:
        clock.advance(world.outside.guests.script_limits[-1])
        raise DeadlineExceeded("the agent does not answer")

    world.outside.guests.script_result = silent

    def slow(self: Any, domain: Any, path: str, timeout: float, *_: Any) -> None:
        clock.advance(timeout)
        raise DeadlineExceeded("the memory was not written")

    world.outside.vms.save_memory = slow.__get__(world.outside.vms)  # type: ignore[method-assign]
    world.outside.vms.shuts_down_after = 0.1
    began = clock.monotonic()
    world.stop(container, grace)
    ended = world.container(container).exit
    assert ended is not None
    assert clock.monotonic() - began <= grace
    assert ended.code == 143, "the rest of the grace period is for the guest's shutdown"


def test_a_pause_by_an_operator_is_not_undone_by_a_save_that_fails(world: World) -> None:
    container = running(world)
    reached, go = threading.Event(), threading.Event()

    def sync(_container: ContainerId) -> tuple[int, str]:
        reached.set()
        go.wait(30)
        return 0, ""

    world.outside.guests.script_result = sync
    saving = Background(lambda: save(world, container))
    reached.wait(30)
    assert actions(world).pause(world.container(container)).changed
    go.set()
    with pytest.raises(ShimError):
        saving.done()
    assert state_of(world, container) == (ContainerPhase.RUNNING, Power.PAUSED)
    assert world.container(container).status.paused


@pytest.mark.parametrize("how", [save, renew])
def test_a_vm_that_is_being_saved_is_not_resized(world: World, how: Callable[[World, ContainerId], Any]) -> None:
    annotations = {"virtshim.io/vm": "db", "virtshim.io/max-vcpus": "4"}
    start = Resources(cpu_shares=512, cpu_quota=100_000, cpu_period=100_000)
    sandbox = world.do.run_sandbox.run(
        pod_key("db-0"), sandbox_config(annotations=annotations, resources=start), world.deadline()
    )
    container = world.create(sandbox, config=container_config(resources=start))
    world.start(container)
    gate = world.journal.hold("saved_vms.flush")  # the memory is written
    saving = Background(lambda: how(world, container))
    gate.wait()
    try:
        with pytest.raises(ShimError):
            world.do.update_container_resources.resize(world.container(container), Resources(cpu_quota=300_000))
    finally:
        gate.open()
        saving.done()


def test_a_used_up_state_of_a_removed_container_goes_at_once(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    second = world.create(pod(world, 2))
    world.journal.fail("vms.resume", InternalError("QEMU is gone"))
    with pytest.raises(InternalError):
        world.start(second)
    assert vm(world).saved is not None
    assert vm(world).saved.taken_by == second  # type: ignore[union-attr]
    world.remove_sandbox(world.container(second).sandbox_id)
    world.app.watch.look()
    assert vm(world).saved is None
    assert not memory(world).exists()


def test_a_command_does_not_miss_its_agents_time_because_of_a_save(world: World) -> None:
    world.outside.clock.held = True
    own = sandbox_config(annotations={"virtshim.io/vm": "db"})
    world.outside.guests.begin_error = DeadlineExceeded("no agent answers yet")
    container = world.create(
        world.do.run_sandbox.run(pod_key("db-0"), own, world.deadline()), config=container_config(command=("run",))
    )
    world.start(container)
    gate = world.journal.hold("saved_vms.flush")
    renewing = Background(lambda: renew(world, container))
    gate.wait()
    ending = None
    for _ in range(80):  # minutes of writing
        world.outside.clock.until_waiting()
        world.outside.clock.advance(10)
        ending = world.container(container).status.ending
        if ending is not None:
            break
    gate.open()
    with contextlib.suppress(ShimError):
        renewing.done()
    world.outside.guests.begin_error = None
    world.outside.clock.held = False
    world.outside.clock.advance(1)
    assert ending is None


def test_a_save_that_is_aborted_after_the_pause_sets_the_clock(world: World) -> None:
    container = running(world)
    world.journal.fail("vms.save_memory", Aborted("VM was being stopped"))
    with pytest.raises(Aborted):
        save(world, container)
    assert state_of(world, container) == RUNS
    world.app.freezer.close()
    assert container in world.outside.guests.clocks_set


def test_a_state_that_no_guest_has_used_is_kept_if_the_node_has_no_room(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    sandbox = pod(world, 2)
    second = world.create(sandbox)

    def full(name: str) -> None:
        if name == "saved_vms.put":
            world.journal.fail("records.containers.replace", ResourceExhausted("the disk is full"))

    world.journal.on_call = full
    with pytest.raises(ResourceExhausted):
        world.start(second)
    world.journal.on_call = lambda _: None
    world.journal.heal()
    assert world.outside.vms.power(world.domain(second)).power is Power.OFF
    third = world.create(sandbox, attempt=1)
    world.start(third)
    assert len(world.outside.vms.restored) == 2, "docs: if the node has no room, virtshim keeps the state"


def test_the_next_pod_is_refused_while_the_old_one_is_being_saved(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("saved_vms.flush")
    first = Background(lambda: world.stop(container, 30))
    gate.wait()
    sandbox = pod(world, 2)
    with pytest.raises(ShimError, match="runs in one pod at a time"):
        world.create(sandbox)
    gate.open()
    first.done()
    second = world.create(sandbox)
    world.start(second)
    assert world.outside.vms.restored == [world.domain(second)]


def test_a_pod_that_is_removed_during_the_flush_leaves_no_file(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("saved_vms.flush")
    first = Background(lambda: world.stop(container, 30))
    gate.wait()
    removing = Background(lambda: world.remove_sandbox(world.container(container).sandbox_id))
    removing.ended_within(1)
    gate.open()
    with contextlib.suppress(ShimError):
        first.done()
    removing.done()
    world.app.watch.look()
    assert vm(world).saved is None
    assert sorted(path.name for path in memory(world).parent.iterdir() if "memory" in path.name) == []
    second = running(world, 2)
    assert world.outside.vms.restored == []
    assert state_of(world, second) == RUNS


def test_a_saved_vms_room_is_not_reserved_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (started(world, name) for name in ("a", "b"))
    need = world.container(first).status.size.memory_bytes
    world.app.live.saved.now = dataclasses.replace(world.app.live.saved.now, most=2 * need + (1 << 20))
    finish = SavedVmFiles.finish

    def finished(self: SavedVmFiles, disk: str) -> int:
        finish(self, disk)
        return need

    monkeypatch.setattr(SavedVmFiles, "finish", finished)
    gate = world.journal.hold("vms.destroy")
    saving = Background(lambda: save(world, first))
    gate.wait()
    try:
        save(world, second)
    finally:
        gate.open()
        saving.done()


def test_lapsed_memory_frees_a_full_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    container = running(world)
    world.stop(container, 30)
    world.remove_sandbox(world.container(container).sandbox_id)
    put, there = SavedVmFiles.put, memory(world)

    def put_with_room(self: SavedVmFiles, record: VmRecord) -> None:
        if there.exists():
            raise ResourceExhausted("No space left on device")
        put(self, record)

    monkeypatch.setattr(SavedVmFiles, "put", put_with_room)
    world.outside.clock.advance(86401)
    world.app.watch.look()
    assert not there.exists()
    assert vm(world).saved is None
