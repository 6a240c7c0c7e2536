"""Operators can list, save and remove VMs that outlive their pods."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.lasting import vm
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.containers.operate import VmActions
from virtshim.disks.disk_places import DiskPlacesFiles
from virtshim.disks.root_disks import RootDiskStore
from virtshim.guest.operation import Action, Outcome
from virtshim.model.container import ContainerPhase, ExitReason, Mount
from virtshim.model.errors import Aborted, InternalError, NotFound, ResourceExhausted, WrongState
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.layout import Layout
from virtshim.model.sandbox import owner_of, vm_disk_name
from virtshim.model.usage import BlockUsage
from virtshim.model.vm import Power
from virtshim.moves.files import SavedVmFiles
from virtshim.moves.keeping import KnownVm, LastingVms
from virtshim.moves.values import VmRecord
from virtshim.system.locks import PodLocks

SAVING = {"virtshim.io/vm": "db", "virtshim.io/on-stop": "save"}
DISK = vm_disk_name("default", "db", "vm")


def pod(world: World, name: str = "db-0", **annotations: str) -> SandboxId:
    if not world.records.images.all():
        world.pull()
    config = sandbox_config(annotations=annotations or SAVING)
    return world.do.run_sandbox.run(pod_key(name), config, world.deadline())


def running(world: World, name: str = "db-0", **annotations: str) -> ContainerId:
    container = world.create(pod(world, name, **annotations))
    world.start(container)
    return container


def kept(world: World) -> None:
    """A VM that was saved, and whose pod is gone."""
    container = running(world)
    world.stop(container, 30)
    world.remove_sandbox(world.container(container).sandbox_id)


def lasting(world: World) -> LastingVms:
    return world.app.operator.services.vms


def actions(world: World) -> VmActions:
    return world.app.operator.services.actions


def locks(world: World) -> PodLocks:
    return world.do.create_container.locks


def only(world: World) -> KnownVm:
    (found,) = lasting(world).all()
    return found


def remove(world: World) -> Outcome:
    return lasting(world).remove("default", "db", "vm")


def left(world: World) -> list[str]:
    """Of the VM."""
    directory = Path(world.settings.layout().vms)
    return [*world.outside.disks.pod_disks, *(str(path) for path in directory.iterdir())]


# --- listed


def test_a_vm_is_listed_with_its_pod_and_without(world: World) -> None:
    container = running(world)
    known = only(world)
    assert known.record.readable == "default/db/vm"
    assert (known.container and known.container.id, known.pod and known.pod.key.name) == (container, "db-0")
    assert (known.record.saved, known.lapses_at) == (None, 0)
    world.stop(container, 30)
    known = only(world)
    assert (known.container, known.pod) == (None, None)
    assert known.record.saved is not None
    assert known.lapses_at == known.record.saved.saved_at + 86400 * 10**9


# --- saved


def save(world: World, container: ContainerId) -> Outcome:
    return actions(world).save(world.container(container))


@pytest.mark.parametrize("annotations", [SAVING, {"virtshim.io/vm": "db"}])
def test_a_guest_that_an_operator_saves_continues_in_the_same_pod(world: World, annotations: dict[str, str]) -> None:
    first = running(world, **annotations)
    assert save(world, first).changed
    ended = world.container(first).exit
    assert ended is not None
    assert (ended.code, ended.reason) == (143, ExitReason.SAVED)
    assert [taken.action for taken in actions(world).log.since(0)] == [Action.SAVE]
    again = world.create(world.container(first).sandbox_id, attempt=1)
    world.start(again)
    assert world.outside.vms.restored == [world.domain(again)]
    assert world.container(again).status.known_as == first
    assert only(world).record.saved is None


def test_a_state_of_an_operators_that_cannot_be_restored_is_tried_once(world: World) -> None:
    first = running(world)
    save(world, first)
    sandbox = world.container(first).sandbox_id
    world.journal.fail("vms.restore", InternalError("QEMU cannot read it"))
    with pytest.raises(InternalError):
        world.start(world.create(sandbox, attempt=1))
    third = world.create(sandbox, attempt=2)
    world.start(third)
    assert world.outside.vms.restored == []


def test_a_vm_that_goes_with_its_pod_is_not_saved(world: World) -> None:
    _, container = world.running()
    with pytest.raises(WrongState, match=r"annotation virtshim\.io/vm can be saved"):
        save(world, container)


def test_a_vm_with_a_part_that_cannot_be_saved_is_refused_with_the_remedy(world: World) -> None:
    volume = Mount("/data", "/var/lib/kubelet/pods/uid-of-db-0/volumes/kubernetes.io~csi/pv/mount")
    sandbox = pod(world, **{"virtshim.io/vm": "db"})
    container = world.create(sandbox, config=container_config(mounts=(volume,)))
    world.start(container)
    with pytest.raises(WrongState, match=r"the shared volume /data.*use the root disk"):
        save(world, container)
    assert world.container(container).is_running


@pytest.mark.parametrize(
    ("before", "says"), [("pause", "virtshim resume"), ("freeze", "virtshim thaw"), ("boot", "nothing to save")]
)
def test_a_vm_in_a_state_that_must_not_be_saved_is_refused(world: World, before: str, says: str) -> None:
    world.outside.clock.held = True
    container = running(world)
    if before == "boot":
        world.outside.boot_output.before_kernel.add(container)
        world.outside.readings.blocks = (BlockUsage("sdb", reads=2, writes=0),)
    else:
        getattr(actions(world), before)(world.container(container))
    with pytest.raises(WrongState, match=says):
        save(world, container)
    assert world.container(container).is_running
    assert only(world).record.saved is None


def test_a_guest_that_cannot_be_saved_runs_on_with_its_clock_set(world: World) -> None:
    container = running(world)
    world.app.live.saved.now = dataclasses.replace(world.app.live.saved.now, most=1)
    with pytest.raises(ResourceExhausted, match=r"saved\.max_bytes"):
        save(world, container)
    world.app.live.saved.now = dataclasses.replace(world.app.live.saved.now, most=0)
    world.journal.fail("vms.save_memory", ResourceExhausted("the disk is full"))
    with pytest.raises(ResourceExhausted, match="the disk is full"):
        save(world, container)
    assert world.outside.vms.power(world.domain(container)).power is Power.RUNNING
    assert (world.container(container).is_running, world.container(container).status.saving) == (True, False)
    world.app.freezer.close()
    assert container in world.outside.guests.clocks_set
    assert actions(world).log.since(0) == []


def checkpoint(world: World, container: ContainerId) -> None:
    world.do.checkpoint_container.checkpoint(world.container(container), "/checkpoints/one.tar", world.deadline())


def save_at_stop(world: World, container: ContainerId) -> None:
    world.app.watch.states.saving.save(world.container(container), 10.0)


def test_a_guest_that_is_being_saved_takes_no_command_and_no_checkpoint(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("vms.save_memory")
    saving = Background(lambda: save(world, container))
    gate.wait()
    with pytest.raises(WrongState, match="is being saved or moved"):
        world.do.exec_command.run(world.container(container), ("true",), 1.0, threading.Event())
    with pytest.raises(Aborted, match="is being saved"):
        checkpoint(world, container)
    gate.open()
    saving.done()


def test_a_guest_of_which_a_checkpoint_is_written_is_not_saved(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("archives.copy")
    writing = Background(lambda: checkpoint(world, container))
    gate.wait()
    for attempt in (save, save_at_stop):
        with pytest.raises(Aborted, match="a checkpoint of container"):
            attempt(world, container)
    gate.open()
    writing.done()
    assert save(world, container).changed


def test_a_stop_waits_for_the_save_that_is_under_way(world: World) -> None:
    world.outside.clock.held = True
    container = running(world)
    gate = world.journal.hold("vms.save_memory")
    saving = Background(lambda: save(world, container))
    gate.wait()
    with pytest.raises(Aborted, match="is being saved already"):
        world.app.watch.states.saving.save(world.container(container), 1.0)
    stopping = Background(lambda: world.stop(container, 30))
    world.outside.clock.until_waiting()
    gate.open()
    saving.done()
    world.outside.clock.advance(30)
    stopping.done()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.SAVED


def test_a_stop_whose_save_by_an_operator_fails_goes_its_own_way(world: World) -> None:
    world.outside.clock.held = True
    container = running(world)
    gate = world.journal.hold("vms.save_memory")
    world.journal.fail("vms.save_memory", ResourceExhausted("the disk is full"))
    saving = Background(lambda: save(world, container))
    gate.wait()
    stopping = Background(lambda: world.stop(container, 30))
    world.outside.clock.until_waiting()
    gate.open()
    with pytest.raises(ResourceExhausted):
        saving.done()
    world.outside.clock.advance(1)
    world.outside.clock.held = False
    stopping.done()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.SAVED, "the stop saves, too"


def test_a_stop_without_a_grace_period_ends_the_save(world: World) -> None:
    container = running(world)
    gate = world.journal.hold("vms.save_memory")
    world.journal.fail("vms.save_memory", InternalError("QEMU is gone"))
    saving = Background(lambda: save(world, container))
    gate.wait()
    stopping = Background(lambda: world.stop(container, 0))
    assert not stopping.ended_within(0.05)
    gate.open()
    with pytest.raises(InternalError):
        saving.done()
    stopping.done()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.reason is ExitReason.ERROR
    assert only(world).record.saved is None


# --- removed


def test_a_vm_that_nobody_uses_goes_with_all_that_is_its(world: World) -> None:
    kept(world)
    image = only(world).record.image
    world.images.remove(world.records.images.all()[0].id.value)
    assert image in world.outside.files.stored()
    assert remove(world).changed
    assert left(world) == []
    assert lasting(world).all() == []
    assert image not in world.outside.files.stored()


def test_an_unknown_vm_is_named_with_the_list_of_those_there_are(world: World) -> None:
    kept(world)
    remove(world)
    with pytest.raises(NotFound, match="default/db/vm is kept on this node; `virtshim vms`"):
        remove(world)


def test_a_vm_that_a_container_refers_to_stays_until_that_has_ended(world: World) -> None:
    container = world.create(pod(world))
    with pytest.raises(WrongState, match=r"default/db/vm is used by pod default/db-0 .* is created"):
        remove(world)
    world.start(container)
    with pytest.raises(WrongState, match="is running"):
        remove(world)
    assert DISK in world.outside.disks.pod_disks
    world.stop(container, 30)
    remove(world)
    assert left(world) == []
    again = world.create(world.container(container).sandbox_id, attempt=1)
    world.start(again)
    assert world.outside.vms.restored == []
    assert only(world).container is not None
    assert DISK in world.outside.disks.pod_disks


def test_a_vm_that_runs_although_its_container_has_ended_stays(world: World) -> None:
    container = running(world)
    world.stop(container, 30)
    world.outside.vms.power_on(world.domain(container))
    assert world.container(container).phase is ContainerPhase.EXITED
    with pytest.raises(WrongState, match="still runs in libvirt"):
        remove(world)
    assert DISK in world.outside.disks.pod_disks


def test_nothing_is_removed_while_a_container_cannot_be_read(world: World) -> None:
    kept(world)
    _, other = world.running("web")
    unreadable = dataclasses.replace(
        world.container(other).status, phase=ContainerPhase.UNKNOWN, trouble="it is no JSON"
    )
    found = dataclasses.replace(world.container(other), status=unreadable)
    world.records.containers.replace(found)
    with pytest.raises(WrongState, match="cannot be read: the container may use"):
        remove(world)
    assert only(world).record.saved is not None


def test_a_container_is_not_created_on_a_vm_that_is_being_removed(world: World) -> None:
    kept(world)
    sandbox = pod(world, "db-1")
    gate = world.journal.hold("disks.delete_pod_disks")
    removing = Background(lambda: remove(world))
    gate.wait()
    creating = Background(lambda: world.create(sandbox))
    assert not creating.ended_within(0.1)
    gate.open()
    removing.done()
    creating.done()
    assert DISK in world.outside.disks.pod_disks
    assert only(world).container is not None


def test_a_vm_whose_container_is_being_recorded_is_not_removed(world: World) -> None:
    kept(world)
    sandbox = pod(world, "db-1")
    gate = world.journal.hold("records.containers.add")
    creating = Background(lambda: world.create(sandbox))
    gate.wait()
    removing = Background(lambda: remove(world))
    assert not removing.ended_within(0.1)
    gate.open()
    creating.done()
    with pytest.raises(WrongState, match="is used by pod default/db-1"):
        removing.done()
    assert DISK in world.outside.disks.pod_disks


def test_a_state_that_lapses_while_another_call_works_on_its_vm_is_discarded_later(world: World) -> None:
    kept(world)
    world.outside.clock.advance(86401)
    with locks(world).held_for_all(owner_of(DISK)):
        Background(world.app.watch.states.saving.expire).done()
        assert vm(world).saved is not None
    world.app.watch.states.saving.expire()
    assert vm(world).saved is None


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_kill_at_any_step_of_a_removal_leaves_what_a_repeat_removes(
    make_world: Callable[[], World], when: When
) -> None:
    world: World = make_world()
    kept(world)
    world.journal.forget()
    remove(world)
    calls = len(world.journal.calls)
    world.close()
    assert calls >= 3
    for at in range(1, calls + 1):
        for repeated in (True, False):
            world = make_world()
            kept(world)
            world.journal.forget()
            world.journal.crash(at, when)
            with contextlib.suppress(Crash):
                remove(world)
            world = world.recovered()
            if repeated:
                with contextlib.suppress(NotFound):
                    remove(world)
                assert left(world) == [], f"at {at}"
            container = running(world, "db-1")
            world.stop(container, 30)
            assert world.outside.disks.pod_disks[DISK] == only(world).record.image, f"at {at}"
            world.close()


# --- its files


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "state"), str(tmp_path / "run"))


def a_record() -> VmRecord:
    return VmRecord(DISK, "default", "db", "vm", ImageDigest(f"sha256:{'a' * 64}"), 1)


def test_the_record_goes_last_and_tpm_and_memory_before_it(layout: Layout, tmp_path: Path) -> None:
    states, tpm = tmp_path / "swtpm", uuid.uuid5(uuid.NAMESPACE_DNS, "db")
    (states / str(tpm)).mkdir(parents=True)
    vms, disks = SavedVmFiles(layout), RootDiskStore(layout, str(states))
    vms.put(a_record())
    directory = Path(layout.vms) / DISK.split("/")[1]
    DiskPlacesFiles(layout).keep_tpm(DISK, tpm)
    for name in ("root.qcow2", "root.nvram", "memory.save"):
        (directory / name).write_bytes(b"x" * 5000)
    assert vms.disk_bytes(DISK) >= 5000
    for _ in range(2):
        disks.delete_pod_disks(owner_of(DISK))
        assert [path.name for path in directory.iterdir()] == ["vm.json"]
        assert vms.get(DISK) == a_record()
    assert list(states.iterdir()) == []
    assert vms.disk_bytes(DISK) == 0
    for _ in range(2):
        vms.forget(DISK)
        assert list(Path(layout.vms).iterdir()) == []
