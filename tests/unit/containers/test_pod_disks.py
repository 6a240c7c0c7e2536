"""A root disk can stay for the pod's life, and all attempts of a pod share its UUID."""

import contextlib
import dataclasses

import pytest
from fakes.journal import Crash, When
from fakes.world import IMAGE, World, container_config, sandbox_config

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import AlreadyExists, InternalError, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Backing, DiskBus, OffReason, Power

KEEP = sandbox_config(annotations={"virtshim.io/root-disk": "pod"})
UUID = "12345678-9abc-4def-8123-456789abcdef"
NAMED = sandbox_config(annotations={"VirtletSystemUUID": UUID})


def root_of(world: World, container: ContainerId) -> str:
    return world.outside.vms.spec(world.domain(container)).disks[0].path


def ran(world: World, sandbox: SandboxId, attempt: int = 0, name: str = "vm") -> ContainerId:
    """A container that ran and has ended."""
    container = world.create(sandbox, name, attempt)
    world.start(container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    return container


def test_by_default_each_attempt_has_a_fresh_disk(world: World) -> None:
    sandbox = world.run()
    first, second = (root_of(world, ran(world, sandbox, attempt)) for attempt in (0, 1))
    assert first != second


def test_libvirt_has_released_a_kept_disk_before_the_end_is_recorded(world: World) -> None:
    for config, waits in ((KEEP, True), (sandbox_config(), False)):
        container = world.create(world.run(str(waits), config=config))
        world.start(container)
        world.journal.calls.clear()
        world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
        world.deliver()
        told = max(at for at, call in enumerate(world.journal.calls) if call == "records.containers.replace")
        assert ("vms.destroy" in world.journal.calls[:told]) is waits


def test_a_guest_on_a_kept_disk_stays_the_same_cloud_init_instance(world: World) -> None:
    """What cloud-init calls an instance."""
    first, other = world.run(config=KEEP), world.run("other", config=KEEP)
    made = [ran(world, first), ran(world, first, 1), ran(world, other), ran(world, world.run("fresh"))]
    kept = [world.outside.seeds.requests[container].kept_disk for container in made]
    assert kept[0] == kept[1]
    assert len(set(kept)) == 3
    assert kept[3] == ""
    assert [len(word) for word in kept[:3]] == [20, 20, 20]


def test_a_kept_disk_serves_every_attempt_and_every_sandbox_of_the_pod(world: World) -> None:
    first = world.run(config=KEEP)
    disks = {root_of(world, ran(world, first, attempt)) for attempt in (0, 1)}
    for container in world.records.containers.all():
        world.remove(container.id)
    world.stop_sandbox(first)
    second = world.run(attempt=1, config=KEEP)
    world.remove_sandbox(first)
    disks.add(root_of(world, ran(world, second, 2)))
    assert len(disks) == 1
    assert world.journal.count("disks.create_pod_disk") == 1


def test_a_pod_of_an_earlier_version_keeps_the_disk_bus_of_its_kept_disk(world: World) -> None:
    first = world.run(config=KEEP)
    made = world.records.sandboxes.get(first)
    assert made is not None
    world.records.sandboxes.replace(dataclasses.replace(made, disk_bus=DiskBus.SCSI))
    attempts = [ran(world, first), ran(world, world.run(attempt=1, config=KEEP), 1)]
    other = ran(world, world.run("other", config=KEEP))
    buses = [world.outside.vms.spec(world.domain(container)).disk_bus for container in (*attempts, other)]
    assert buses == [DiskBus.SCSI, DiskBus.SCSI, DiskBus.VIRTIO]


def test_a_kept_disks_space_counts_for_the_container_that_runs_on_it(world: World) -> None:
    sandbox = world.run(config=KEEP)
    before = ran(world, sandbox)
    now = world.create(sandbox, attempt=1)
    world.start(now)
    sizes = {use.container.id: use.disk for use in world.do.usage.containers(world.records.containers.all())}
    old, new = sizes[before], sizes[now]
    assert old is not None
    assert new is not None
    assert new.used_bytes == old.used_bytes + (1 << 20)


def test_containers_of_one_pod_and_pods_of_one_name_have_disks_of_their_own(world: World) -> None:
    sandbox = world.run(config=KEEP)
    other = world.run("other", config=KEEP)
    roots = [root_of(world, ran(world, pod, 0, name)) for pod in (sandbox, other) for name in ("init", "main")]
    assert len(set(roots)) == 4


def test_a_kept_disk_goes_with_the_last_sandbox_of_its_pod(world: World) -> None:
    first = world.run(config=KEEP)
    ran(world, first)
    world.stop_sandbox(first)
    second = world.run(attempt=1, config=KEEP)
    world.remove_sandbox(first)
    assert world.outside.disks.pod_disks
    world.remove_sandbox(second)
    assert world.everything() == []
    assert world.leftovers() == []


def test_a_kept_disk_outlives_a_reboot_of_the_node(world: World) -> None:
    sandbox = world.run(config=KEEP)
    root = root_of(world, ran(world, sandbox))
    world = world.recovered(rebooted=True)
    again = world.run(attempt=1, config=KEEP)
    assert root_of(world, ran(world, again, 1)) == root
    world.close()


def test_the_image_under_a_kept_disk_stays_when_the_pod_changes_its_image(world: World) -> None:
    sandbox = world.run(config=KEEP)
    old = world.container(first := ran(world, sandbox)).image
    world.images.remove(IMAGE)
    world.outside.files.publish(IMAGE, b"a newer disk")
    new = world.pull()
    assert new != old
    world.remove(first)
    second = ran(world, sandbox, 1)
    assert world.container(second).image == new
    assert old in world.outside.files.stored(), "the disk is a copy-on-write of it"
    below = world.outside.vms.spec(world.domain(second)).disks[0].backing
    assert below == Backing(world.outside.files.path(old), DiskFormat.QCOW2), "the record says so, not the disk"
    world.remove_sandbox(sandbox)
    assert old not in world.outside.files.stored()


def test_a_failed_creation_leaves_a_kept_disk_for_the_next_attempt(world: World) -> None:
    sandbox = world.run(config=KEEP)
    world.journal.fail("vms.define", InternalError("libvirt says no"))
    with pytest.raises(InternalError):
        world.create(sandbox)
    assert world.records.containers.all() == []
    ran(world, sandbox)
    assert world.journal.count("disks.create_pod_disk") == 1
    world.remove_sandbox(sandbox)
    assert world.everything() == []


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("step", range(1, 12))
def test_after_a_crash_at_any_step_a_kept_disk_is_made_once_and_goes_with_its_pod(
    world: World, step: int, when: When
) -> None:
    sandbox = world.run(config=KEEP)
    world.journal.calls.clear()
    world.journal.crash(step, when)
    with contextlib.suppress(Crash):
        world.create(sandbox)
    world = world.recovered()
    ran(world, sandbox, 7)
    assert len(world.outside.disks.pod_disks) == 1
    assert world.leftovers() == []
    world.remove_sandbox(sandbox)
    assert world.everything() == []
    assert world.leftovers() == []
    world.close()


def test_disks_of_a_pod_that_no_record_knows_are_removed_at_start(world: World) -> None:
    kept = world.run(config=KEEP)
    ran(world, kept)
    world.outside.disks.pod_disks["f" * 64 + "/" + "e" * 64] = world.images.find(IMAGE).digest
    world = world.recovered()
    assert len(world.outside.disks.pod_disks) == 1
    world.close()


def test_two_vms_never_run_on_one_disk(world: World) -> None:
    """Two sandboxes of one pod overlap, if the first one's network went."""
    first = world.run(config=KEEP)
    old = world.create(first)
    world.start(old)
    world.outside.networks.broken[first] = "the tap"
    world.app.watch.look()
    second = world.run(attempt=1, config=KEEP)
    new = world.create(second)
    with pytest.raises(WrongState, match="of another sandbox, still runs on the same disk"):
        world.start(new)
    world.stop_sandbox(first)
    world.start(new)
    assert [spec.container_id for spec in world.outside.vms.running()] == [new]


def test_no_container_is_made_while_another_runs(world: World) -> None:
    sandbox, first = world.running()
    with pytest.raises(WrongState, match="stop it first"):
        world.create(sandbox, attempt=1)
    world.stop(first)
    world.create(sandbox, attempt=1)


# --- a UUID of the pod's choice


def test_attempts_share_the_uuid_and_late_clean_up_of_the_old_one_leaves_the_new_one_alone(world: World) -> None:
    sandbox = world.run(config=NAMED)
    old = ran(world, sandbox)
    new = world.create(sandbox, attempt=1)
    world.start(new)
    assert world.domain(old) == world.domain(new)
    world.remove(old)
    assert world.outside.vms.power(world.domain(new)).power is Power.RUNNING
    world.outside.vms.deliver()
    assert world.container(new).phase is ContainerPhase.RUNNING
    world.remove(new)
    assert world.outside.vms.domains == {}


@pytest.mark.parametrize("other", ["another pod", "running"])
def test_a_uuid_is_not_taken_from_a_vm_that_may_still_run(world: World, other: str) -> None:
    sandbox = world.run(config=NAMED)
    first = world.create(sandbox)
    if other == "running":
        world.start(first)
    sandbox = world.run("thief", config=NAMED)
    with pytest.raises(AlreadyExists, match="names one VM on a node"):
        world.create(sandbox, "vm", 1, dataclasses.replace(container_config(), log_path="vm/1.log"))
    assert [d.name for d in world.outside.vms.domains.values()] == [world.outside.vms.domains[world.domain(first)].name]


@pytest.mark.parametrize(
    "annotations", [NAMED.annotations, {"virtshim.io/tpm": "true", "virtshim.io/root-disk": "pod"}]
)
@pytest.mark.parametrize("clean", [True, False])
def test_the_attempt_after_a_failed_start_has_the_uuid(world: World, annotations: dict[str, str], clean: bool) -> None:
    """kubelet keeps the record of the failed one until there is a newer one."""
    sandbox = world.run(config=sandbox_config(annotations=annotations))
    failed = world.create(sandbox)
    world.journal.fail("vms.start", InternalError("no"), after=True)
    if not clean:
        world.journal.fail("vms.destroy", InternalError("libvirt is gone"))
    with pytest.raises(InternalError):
        world.start(failed)
    again = world.create(sandbox, attempt=1)
    assert world.domain(again) == world.domain(failed)
    world.start(again)
    world.remove(failed)
    assert [spec.container_id for spec in world.outside.vms.running()] == [again]


def test_the_uuid_of_an_attempt_that_never_started_goes_to_the_next_attempt(world: World) -> None:
    """kubelet was restarted in between, and begins anew."""
    sandbox = world.run(config=NAMED)
    left = world.create(sandbox)
    again = world.create(sandbox, attempt=1)
    with pytest.raises(WrongState, match="went to a later container of its pod"):
        world.start(left)
    world.start(again)
    assert world.container(left).phase is ContainerPhase.CREATED
    world.remove(left)
    assert [spec.container_id for spec in world.outside.vms.running()] == [again]


# --- the room of ended containers


def files(world: World, container: ContainerId) -> set[str]:
    return world.outside.disks.directories[container]


def test_an_ended_containers_disk_space_is_freed_at_once(world: World) -> None:
    """kubelet keeps ended containers until its garbage collection; the log and the records are what it wants of them."""
    container = ran(world, world.run())
    assert world.container(container).phase is ContainerPhase.EXITED
    assert files(world, container) == {"seed.iso", "record.json"}
    assert world.do.node.container_facts(world.container(container))["rootDisk"] == ""


def test_a_kept_disk_stays_when_its_container_ends(world: World) -> None:
    container = ran(world, world.run(config=KEEP))
    assert len(world.outside.disks.pod_disks) == 1
    assert world.do.node.container_facts(world.container(container))["rootDisk"] != ""


def test_an_end_is_recorded_even_if_the_disk_is_only_removed_by_the_next_start(world: World) -> None:
    world.journal.fail("disks.delete", InternalError("read-only file system"))
    container = ran(world, world.run())
    assert world.container(container).phase is ContainerPhase.EXITED
    assert "root.qcow2" in files(world, container)
    after = world.recovered()
    assert "root.qcow2" not in files(after, container)
    after.close()


def test_a_vm_undefined_by_somebody_else_keeps_its_disk(world: World) -> None:
    sandbox, container = world.running()
    del world.outside.vms.domains[world.domain(container)]
    world.app.events.exits.record_if_ended(container)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert "root.qcow2" in files(world, container)
    world.remove(container)
    world.remove_sandbox(sandbox)
    assert world.everything() == []


@pytest.mark.parametrize("clean", [True, False])
def test_the_disk_of_a_failed_start_is_removed_if_its_vm_is_certainly_off(world: World, clean: bool) -> None:
    container = world.create(world.run())
    world.journal.fail("vms.start", InternalError("no"))
    if not clean:
        world.journal.fail("vms.destroy", InternalError("libvirt is gone"))
    with pytest.raises(InternalError):
        world.start(container)
    assert ("root.qcow2" in files(world, container)) is not clean
