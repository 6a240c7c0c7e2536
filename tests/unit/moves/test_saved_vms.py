"""A VM that outlives its pods is saved at a stop and restored once, whatever fails in between."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.lasting import LASTING, logged, memory, pod, running, state_of, steps_of, vm
from fakes.world import World, container_config, sandbox_config

from virtshim.model.container import Container, ContainerPhase, ExitReason, Mount
from virtshim.model.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    ShimError,
)
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.network import Dns
from virtshim.model.sandbox import PodKey
from virtshim.model.usage import BlockUsage
from virtshim.model.vm import OffReason, Power
from virtshim.pods.ports import AttachRequest


def test_a_stop_saves_the_guest_and_its_next_pod_continues(world: World) -> None:
    first = running(world)
    nic = world.sandbox(world.container(first).sandbox_id).network.interfaces[0]
    world.stop(first, 30)
    ended = world.container(first)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (143, ExitReason.SAVED)
    assert memory(world).exists()
    world.remove_sandbox(ended.sandbox_id)

    second = world.create(pod(world, 2))
    world.start(second)
    assert world.domain(second) in world.outside.vms.restored
    assert world.outside.vms.power(world.domain(second)).power is Power.RUNNING
    assert world.container(second).status.known_as == first
    assert not world.container(second).status.arriving
    assert world.outside.vms.links == []
    assert vm(world).saved is None
    assert not memory(world).exists()
    assert world.sandbox(world.container(second).sandbox_id).network.interfaces[0].mac == nic.mac
    assert world.outside.networks.requests[-1].addresses == {"eth0": nic.addresses}


def take_address(world: World) -> None:
    """The address that the next pod would have is another pod's."""
    networks = world.outside.networks
    networks.half_attach(AttachRequest(SandboxId("f" * 64), PodKey("other", "pod", "uid-f", 0), Dns()), 1.0)


def test_a_guest_with_a_new_address_finds_its_link_unplugged_for_a_moment(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    take_address(world)
    second = world.create(pod(world, 2))
    world.start(second)
    domain = world.domain(second)
    assert world.outside.vms.links == [(domain, False, Power.PAUSED), (domain, True, Power.RUNNING)]


def test_a_guest_runs_although_its_link_cannot_be_unplugged(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    take_address(world)
    second = world.create(pod(world, 2))
    world.journal.fail("vms.set_links", DeadlineExceeded("QEMU does not answer"))
    world.start(second)
    assert state_of(world, second) == (ContainerPhase.RUNNING, Power.RUNNING)
    assert [up for _, up, _ in world.outside.vms.links] == [True]


def test_a_vm_has_one_name_one_uuid_and_one_root_disk_in_all_its_pods(world: World) -> None:
    seen = set()
    for number in (1, 2):
        container = running(world, number)
        spec = world.outside.vms.spec(world.domain(container))
        seen.add((spec.uuid, spec.name, spec.disks[0].path, spec.machine))
        world.stop(container, 30)
        world.remove_sandbox(world.container(container).sandbox_id)
    assert len(seen) == 1


def test_a_restart_in_the_same_sandbox_boots_and_discards_the_state(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    again = world.create(world.container(first).sandbox_id, attempt=1)
    world.start(again)
    assert world.outside.vms.restored == []
    assert vm(world).saved is None
    assert not memory(world).exists()
    assert any("saved memory is discarded" in line for line in logged(world))


def test_without_a_grace_period_nothing_is_saved(world: World) -> None:
    first = running(world)
    world.stop(first, 0)
    assert world.container(first).exit is not None
    assert world.container(first).exit.reason is ExitReason.ERROR
    assert vm(world).saved is None


def test_a_guest_that_has_not_booted_its_kernel_is_not_saved(world: World) -> None:
    container = running(world)
    world.outside.boot_output.before_kernel.add(container)
    world.outside.readings.blocks = (BlockUsage("sdb", reads=2, writes=0),)
    world.stop(container, 30)
    assert vm(world).saved is None


def test_a_second_pod_of_a_running_vm_is_refused(world: World) -> None:
    running(world)
    with pytest.raises(AlreadyExists, match="virtual machine db runs in pod default/db-0"):
        world.create(pod(world, 2))


def test_without_room_the_guest_shuts_down_and_the_exit_says_why(world: World) -> None:
    first = running(world)
    world.app.live.saved.now = dataclasses.replace(world.app.live.saved.now, most=1)
    world.stop(first, 30)
    ended = world.container(first).exit
    assert ended is not None
    assert ended.reason is ExitReason.ERROR
    assert "the guest's memory was not saved" in ended.message
    assert "saved.max_bytes" in ended.message
    assert vm(world).saved is None


@pytest.mark.parametrize("failing", ["vms.save_memory", "saved_vms.finish", "saved_vms.put", "vms.pause"])
def test_a_guest_whose_save_fails_runs_on_and_shuts_down(world: World, failing: str) -> None:
    first = running(world)
    world.journal.fail(failing, ResourceExhausted("the disk is full"))
    world.stop(first, 30)
    ended = world.container(first).exit
    assert ended is not None
    assert "the disk is full" in ended.message
    assert world.outside.vms.power(world.domain(first)).power is Power.OFF
    assert vm(world).saved is None
    assert not memory(world).exists()


def test_a_state_that_may_count_never_runs_again(world: World) -> None:
    """Its record may be on disk although the write failed, and cannot be taken back: the guest stays paused."""
    first = running(world)
    world.journal.fail("saved_vms.put", InternalError("I/O error"), after=True)
    world.journal.fail("saved_vms.put", InternalError("I/O error"))
    with contextlib.suppress(InternalError):
        world.stop(first, 30)
    if world.outside.vms.power(world.domain(first)).power is Power.RUNNING:
        assert vm(world).saved is None


def test_a_restore_that_fails_leaves_the_state_and_the_next_attempt_boots(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    second = world.create(pod(world, 2))
    world.journal.fail("vms.restore", InternalError("QEMU cannot read it"))
    with pytest.raises(InternalError):
        world.start(second)
    failed = world.container(second).exit
    assert failed is not None
    assert failed.reason is ExitReason.START_ERROR
    assert vm(world).saved is not None
    assert memory(world).exists()
    third = world.create(world.container(second).sandbox_id, attempt=1)
    world.start(third)
    assert world.outside.vms.restored == []
    assert any("it could not be restored" in line for line in logged(world))


def test_a_state_lapses_and_the_disk_stays(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    world.outside.clock.advance(86401)
    world.app.watch.look()
    assert vm(world).saved is None
    assert not memory(world).exists()
    assert vm(world).disk in world.outside.disks.pod_disks
    running(world, 2)
    assert [line for line in logged(world) if "its saved memory was discarded at 20" in line]
    lines = len(logged(world))
    world.stop(world.records.containers.all()[-1].id, 0)
    world.remove_sandbox(world.records.sandboxes.all()[-1].id)
    running(world, 3)
    assert not [line for line in logged(world)[lines:] if "discarded" in line], "it is said once"


def test_the_image_under_a_vms_disk_stays_without_any_pod(world: World) -> None:
    first = running(world)
    image = world.container(first).image
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    world.images.remove(world.records.images.all()[0].id.value)
    world.images.collect_all()
    assert image in world.outside.files.stored()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (container_config(mounts=(Mount("/data", "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv/mount"),)), "/data"),
        (sandbox_config(annotations={**LASTING.annotations, "virtshim.io/disks": "a: {size: 1Gi}"}), "virtshim.io/disks"),
    ],
)  # fmt: skip
def test_what_qemu_cannot_save_is_refused_with_the_remedy(world: World, config: object, what: str) -> None:
    world.pull()
    own = config if hasattr(config, "hostname") else LASTING
    sandbox = world.do.run_sandbox.run(PodKey("default", "db-0", "uid-1", 0), own, world.deadline())  # type: ignore[arg-type]
    wanted = container_config() if hasattr(config, "hostname") else config
    with pytest.raises(InvalidRequest, match=f"virtshim.io/on-stop.*{what}"):
        world.create(sandbox, config=wanted)  # type: ignore[arg-type]


# --- others go on while memory is written


def test_a_save_that_outlives_its_container_does_not_count(world: World) -> None:
    """kubelet has given up: the container is killed and removed, and the VM's next pod has booted."""
    first = running(world)
    gate = world.journal.hold("saved_vms.flush")
    saving = Background(lambda: world.stop(first, 30))
    gate.wait()
    world.do.stop_container.kill(world.container(first), "killed")
    world.remove_sandbox(world.container(first).sandbox_id)
    second = running(world, 2)
    gate.open()
    with contextlib.suppress(ShimError, AssertionError):
        saving.done()
    assert vm(world).saved is None
    assert world.outside.vms.power(world.domain(second)).power is Power.RUNNING


def test_two_saves_at_once_share_the_room(world: World) -> None:
    first = running(world)
    size = world.container(first).status.size.memory_bytes
    world.app.live.saved.now = dataclasses.replace(world.app.live.saved.now, most=size + size // 2)
    other = sandbox_config(annotations={"virtshim.io/vm": "other", "virtshim.io/on-stop": "save"})
    sandbox = world.do.run_sandbox.run(PodKey("default", "other", "uid-9", 0), other, world.deadline())
    second = world.create(sandbox)
    world.start(second)
    gate = world.journal.hold("saved_vms.flush")
    saving = Background(lambda: world.stop(first, 30))
    gate.wait()
    world.stop(second, 30)
    gate.open()
    saving.done()
    ends = [world.container(one).exit for one in (first, second)]
    assert [end.reason for end in ends if end is not None] == [ExitReason.SAVED, ExitReason.ERROR]
    assert ends[1] is not None
    assert "saved.max_bytes" in ends[1].message


def test_a_guest_that_was_resumed_while_its_memory_was_written_is_not_saved(world: World) -> None:
    first = running(world)
    gate = world.journal.hold("saved_vms.flush")
    saving = Background(lambda: world.stop(first, 30))
    gate.wait()
    world.outside.vms.resume(world.domain(first))
    gate.open()
    saving.done()
    assert vm(world).saved is None


def test_a_frozen_guest_is_not_saved(world: World) -> None:
    first = running(world)
    found = world.container(first)
    world.records.containers.replace(dataclasses.replace(found, status=dataclasses.replace(found.status, frozen=True)))
    with pytest.raises(Aborted, match="frozen"):
        world.app.watch.states.saving.save(world.container(first), 10)
    assert world.outside.vms.power(world.domain(first)).power is Power.RUNNING


def test_memory_without_its_disk_is_discarded(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    world.outside.disks.pod_disks.clear()
    second = running(world, 2)
    assert world.outside.vms.restored == []
    assert world.container(second).status.known_as is None


def test_memory_that_no_state_describes_is_removed(world: World) -> None:
    running(world)
    half = memory(world).with_name("memory.half")
    for file in (memory(world), half):
        file.write_bytes(b"left")
    world.app.watch.look()
    assert not memory(world).exists()
    assert not half.exists()


def test_another_uuid_does_not_hide_that_the_vm_runs(world: World) -> None:
    running(world)
    named = dict(LASTING.annotations) | {"VirtletSystemUUID": "12345678-9abc-4def-8123-456789abcdef"}
    other = world.do.run_sandbox.run(
        PodKey("default", "db-0", "uid-2", 0), sandbox_config(annotations=named), world.deadline()
    )
    with pytest.raises(AlreadyExists, match="virtual machine db runs in pod"):
        world.create(other)


def test_a_lost_database_does_not_let_a_guest_run_beside_its_saved_state(world: World) -> None:
    first = running(world)
    world.journal.fail("vms.destroy", InternalError("libvirt is busy"), times=9)
    with contextlib.suppress(InternalError):
        world.stop(first, 30)
    assert vm(world).saved is not None
    found = world.container(first)
    world.records.containers.replace(found.with_saving(saving=False))
    world.journal.heal()
    world = world.recovered()
    world.app.watch.look()
    assert world.outside.vms.power(world.domain(first)).power is not Power.RUNNING
    ended = world.container(first).exit
    assert ended is not None
    assert ended.reason is ExitReason.SAVED


# --- virtshim dies at every step


def ends(world: World, container: ContainerId) -> Container:
    """kubelet repeats its call until the container has ended."""
    world.stop(container, 30)
    return world.container(container)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_kill_at_any_step_of_a_save_loses_nothing(make_world: Callable[[], World], when: When) -> None:
    calls = steps_of(make_world, lambda world: world.stop(running(world), 30), running)
    assert calls > 10
    for at in range(1, calls + 1):
        world: World = make_world()
        first = running(world)
        world.journal.forget()
        world.journal.crash(at, when)
        with contextlib.suppress(Crash, Exception):
            world.stop(first, 30)
        world = world.recovered()
        phase, power = state_of(world, first)
        saved = vm(world).saved
        if power is Power.RUNNING:
            assert saved is None, f"at {at}: a guest runs whose state counts"
        if phase is ContainerPhase.RUNNING:
            ended = ends(world, first)
            assert ended.exit is not None
        assert world.outside.vms.power(world.domain(first)).power is not Power.RUNNING
        world.remove_sandbox(world.container(first).sandbox_id)
        second = world.create(pod(world, 2))
        world.start(second)
        assert state_of(world, second) == (ContainerPhase.RUNNING, Power.RUNNING)
        assert vm(world).saved is None
        assert not memory(world).exists()
        world.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("same_address", [True, False])
def test_a_kill_at_any_step_of_a_restore_runs_one_guest_once(
    make_world: Callable[[], World], when: When, *, same_address: bool
) -> None:
    def saved(world: World) -> ContainerId:
        first = running(world)
        world.stop(first, 30)
        world.remove_sandbox(world.container(first).sandbox_id)
        if not same_address:
            take_address(world)
        return world.create(pod(world, 2))

    calls = steps_of(make_world, lambda world: world.start(saved(world)), saved)
    for at in range(1, calls + 1):
        world: World = make_world()
        second = saved(world)
        world.journal.forget()
        world.journal.crash(at, when)
        with contextlib.suppress(Crash, Exception):
            world.start(second)
        world = world.recovered()
        world.app.watch.look()
        phase, power = state_of(world, second)
        if power is Power.RUNNING:
            assert phase is ContainerPhase.RUNNING, f"at {at}: {phase}"
            assert vm(world).saved is None or vm(world).saved.taken_by == second
            assert [up for _, up, _ in world.outside.vms.links][-1:] in ([], [True]), f"at {at}: no link"
        assert power is not Power.PAUSED, f"at {at}: {phase}"
        if phase is not ContainerPhase.RUNNING:  # kubelet makes another attempt
            third = world.create(world.container(second).sandbox_id, attempt=1)
            world.start(third)
            assert len(world.outside.vms.restored) >= 1, f"at {at}: the state is lost"
        world.outside.vms.end(world.domain(second), OffReason.SHUTDOWN)
        world.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
def test_a_state_is_not_used_again_if_qemu_dies_with_virtshim_after_it_was_taken(
    make_world: Callable[[], World],
) -> None:
    def saved(world: World) -> ContainerId:
        first = running(world)
        world.stop(first, 30)
        world.remove_sandbox(world.container(first).sandbox_id)
        return world.create(pod(world, 2))

    calls = steps_of(make_world, lambda world: world.start(saved(world)), saved)
    taken = 0
    for at in range(1, calls + 1):
        world: World = make_world()
        second = saved(world)
        world.journal.forget()
        world.journal.crash(at, When.AFTER)
        with contextlib.suppress(Crash, Exception):
            world.start(second)
        state = vm(world).saved
        was_taken = state is None or state.taken_by is not None
        taken += was_taken
        world.outside.vms.end(world.domain(second), OffReason.CRASHED)
        world = world.recovered()
        world.app.watch.look()
        restored = len(world.outside.vms.restored)
        third = world.create(world.container(second).sandbox_id, attempt=1)
        world.start(third)
        assert len(world.outside.vms.restored) == restored + (not was_taken), f"at {at}"
        world.close()
    assert taken > 1
