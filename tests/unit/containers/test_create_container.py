"""CreateContainer makes disk, seed and definition in the right sizes, and a failed step leaves nothing."""

import dataclasses
import uuid

import pytest
from fakes.background import Background
from fakes.journal import Journal
from fakes.world import IMAGE, LOG_DIRECTORY, World, container_config, sandbox_config

from virtshim.containers.creation_steps import Draft
from virtshim.metrics import observed
from virtshim.model.container import Container, ContainerName, ContainerPhase, Resources
from virtshim.model.deadline import Deadline
from virtshim.model.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox
from virtshim.model.vm import DiskBus, Power, VmSpec

GIB = 1 << 30
SYSTEM_UUID = "12345678-9abc-4def-8123-456789abcdef"


def spec_of(world: World, **config: object) -> VmSpec:
    """The VM that a container with that config becomes."""
    container = world.create(world.run(), config=container_config(**config))
    return world.outside.vms.spec(world.domain(container))


def test_a_new_container_is_created_and_does_not_run(world: World) -> None:
    container = world.create(world.run())
    assert world.container(container).phase is ContainerPhase.CREATED
    assert world.outside.vms.power(world.domain(container)).power is Power.OFF
    assert world.outside.disks.directories[container] == {"root.qcow2", "seed.iso", "record.json"}


def test_the_row_is_written_first_and_changed_last(world: World) -> None:
    sandbox = world.run()
    world.journal.calls.clear()
    world.create(sandbox)
    assert world.journal.calls == [
        "devices.own_containers",
        "devices.resolve",
        "records.containers.add",
        "disks.create",
        "seeds.create",
        "copies.keep",
        "vms.define",
        "records.containers.replace",
    ]


def test_a_repeated_call_returns_the_first_container(world: World) -> None:
    sandbox = world.run()
    assert world.create(sandbox) == world.create(sandbox)
    assert world.journal.count("vms.define") == 1


def test_a_taken_name_with_a_different_config_is_refused(world: World) -> None:
    sandbox = world.run()
    first = world.create(sandbox)
    with pytest.raises(AlreadyExists, match=first.value):
        world.create(sandbox, config=container_config(args=("x",)))


def test_the_name_of_a_started_container_is_taken(world: World) -> None:
    sandbox, _ = world.running()
    with pytest.raises(AlreadyExists, match="running"):
        world.create(sandbox)


def test_the_next_attempt_is_another_container(world: World) -> None:
    sandbox = world.run()
    assert world.create(sandbox, attempt=0) != world.create(sandbox, attempt=1)


def test_a_missing_sandbox_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        world.create(SandboxId("0" * 64))


def test_an_image_that_was_not_pulled_is_not_found(world: World) -> None:
    sandbox = world.run()
    with pytest.raises(NotFound, match="pull it first"):
        world.create(sandbox, config=container_config(image="registry.test/other:2"))
    assert world.records.containers.all() == []


def test_the_image_may_be_named_by_id(world: World) -> None:
    (image,) = world.images.all()
    container = world.create(world.run(), config=container_config(image=image.digest.value))
    assert world.container(container).image == image.digest


def test_the_repo_digest_is_shown_as_image_ref(world: World) -> None:
    (image,) = world.images.all()
    assert world.container(world.create(world.run())).spec.image_ref == f"registry.test/vm/guest@{image.digest}"


def test_nothing_is_made_after_the_deadline(world: World) -> None:
    sandbox = world.run()
    late = Deadline.after(world.outside.clock.monotonic(), 0)
    with pytest.raises(DeadlineExceeded):
        world.do.create_container.create(sandbox, ContainerName("vm", 0), container_config(), late)
    assert world.records.containers.all() == []


# --- sizes


def test_without_a_memory_limit_the_guest_gets_the_nodes_default(world: World) -> None:
    assert spec_of(world).size.memory_bytes == GIB


def test_the_memory_limit_is_the_guests_memory(world: World) -> None:
    assert spec_of(world, resources=Resources(memory_limit_bytes=3 * GIB)).size.memory_bytes == 3 * GIB


def test_a_memory_limit_in_which_no_guest_boots_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match=r"vm\.min_memory"):
        spec_of(world, resources=Resources(memory_limit_bytes=1 << 20))


@pytest.mark.parametrize(
    ("quota", "period", "vcpus"), [(0, 0, 1), (100_000, 100_000, 1), (100_001, 100_000, 2), (250_000, 0, 3), (1, 0, 1)]
)
def test_the_cpu_limit_rounded_up_is_the_number_of_vcpus(world: World, quota: int, period: int, vcpus: int) -> None:
    spec = spec_of(world, resources=Resources(cpu_quota=quota, cpu_period=period, cpu_shares=512))
    assert spec.size.vcpus == vcpus
    assert (spec.limits.cpu_shares, spec.limits.cpu_quota) == (512, quota)


def test_huge_pages_that_the_node_does_not_have_are_refused_and_nothing_is_made(world: World) -> None:
    with pytest.raises(ResourceExhausted, match=r"resources\.limits\.hugepages.* this node has 0 free"):
        spec_of(world, resources=Resources(memory_limit_bytes=GIB, hugepage_limits={"4MB": 1 << 40}))
    assert world.records.containers.all() == []


def test_more_vcpus_than_the_node_allows_are_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match=r"vm\.max_vcpus"):
        spec_of(world, resources=Resources(cpu_quota=6_500_000, cpu_period=100_000))


def test_the_vcpu_annotation_wins_over_the_cpu_limit(world: World) -> None:
    sandbox = world.run(config=sandbox_config(annotations={"VirtletVCPUCount": "4"}))
    container = world.create(sandbox, config=container_config(resources=Resources(cpu_quota=100_000)))
    assert world.outside.vms.spec(world.domain(container)).size.vcpus == 4


def test_annotations_shape_the_vm(world: World) -> None:
    sandbox = world.run(
        config=sandbox_config(
            annotations={
                "VirtletDiskDriver": "scsi",
                "VirtletRootVolumeSize": "2Gi",
                "VirtletSystemUUID": SYSTEM_UUID,
                "VirtletForceDHCPNetworkConfig": "true",
            }
        )
    )
    container = world.create(sandbox)
    spec = world.outside.vms.spec(uuid.UUID(SYSTEM_UUID))
    assert (spec.disk_bus, spec.smbios_uuid) == (DiskBus.SCSI, True)
    assert world.outside.disks.sizes[container] == 2 * GIB
    assert world.outside.seeds.requests[container].options.force_dhcp


# --- what the VM is told


def test_only_a_guest_that_may_come_from_a_template_is_told_that_its_memory_is_a_copy(world: World) -> None:
    wanted = ({}, {"virtshim.io/warm-start": "true"}, {"virtshim.io/warm-start": "true", "virtshim.io/vm": "db"})
    pods = [world.run(f"pod{number}", config=sandbox_config(annotations=one)) for number, one in enumerate(wanted)]
    specs = [world.outside.vms.spec(world.domain(world.create(pod))) for pod in pods]
    assert [spec.generation_id for spec in specs] == [False, True, False]


def test_the_vm_gets_its_pods_network_and_disks_in_boot_order(world: World) -> None:
    spec = spec_of(world)
    assert spec.disk_bus is DiskBus.VIRTIO
    assert [disk.serial for disk in spec.disks] == ["root", "seed"]
    assert spec.fetch_key.startswith("key-of-")
    assert spec.tapmanager_socket == world.settings.tapmanager.socket
    assert spec.title == "default/web/vm"


def test_the_name_of_the_vm_is_readable_and_safe(world: World) -> None:
    container = world.create(world.run(), name="../$(reboot) ünïcode" + "x" * 100)
    name = world.outside.vms.spec(world.domain(container)).name
    assert name.startswith(f"virtshim-{container.value[:12]}-..-")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    assert len(name) < 60


@pytest.mark.parametrize(("hostname", "told"), [("db-0", "db-0"), ("", "web")])
def test_the_guest_gets_the_hostname_or_else_the_pods_name(world: World, hostname: str, told: str) -> None:
    container = world.create(world.run(config=sandbox_config(hostname=hostname)))
    assert world.outside.seeds.requests[container].hostname == told


@pytest.mark.parametrize(
    ("directory", "path", "file"),
    [
        (LOG_DIRECTORY, "vm/0.log", f"{LOG_DIRECTORY}/vm/0.log"),
        (LOG_DIRECTORY, "./vm//0.log", f"{LOG_DIRECTORY}/vm/0.log"),
        ("", "vm/0.log", ""),
        (LOG_DIRECTORY, "", ""),
    ],
)
def test_the_log_file_lies_below_the_log_directory(world: World, directory: str, path: str, file: str) -> None:
    sandbox = world.run(config=sandbox_config(log_directory=directory))
    assert world.container(world.create(sandbox, config=container_config(log_path=path))).spec.log_file == file


@pytest.mark.parametrize("path", ["../0.log", "/etc/passwd", "vm/../../0.log", "vm/\0.log", ".", "./", "vm/.."])
def test_a_log_path_that_is_not_a_file_in_the_log_directory_is_refused(world: World, path: str) -> None:
    sandbox = world.run()
    with pytest.raises(InvalidRequest, match="log_path"):
        world.create(sandbox, config=container_config(log_path=path))


def test_a_relative_log_directory_is_refused(world: World) -> None:
    sandbox = world.run(config=sandbox_config(log_directory="logs"))
    with pytest.raises(InvalidRequest, match="absolute"):
        world.create(sandbox)


# --- one UUID, one VM


def with_uuid(world: World, pod: str) -> SandboxId:
    return world.run(pod, config=sandbox_config(annotations={"VirtletSystemUUID": SYSTEM_UUID}))


def test_a_system_uuid_names_one_vm_on_a_node(world: World) -> None:
    first = world.create(with_uuid(world, "one"))
    second = with_uuid(world, "two")
    with pytest.raises(AlreadyExists, match=first.value):
        world.create(second)
    assert world.outside.vms.spec(uuid.UUID(SYSTEM_UUID)).container_id == first


def test_a_system_uuid_is_free_again_after_removal(world: World) -> None:
    world.remove(world.create(with_uuid(world, "one")))
    world.create(with_uuid(world, "two"))


def test_the_vm_of_a_foreign_owner_is_never_replaced(world: World) -> None:
    world.outside.vms.add_foreign(uuid.UUID(SYSTEM_UUID), "theirs")
    sandbox = with_uuid(world, "one")
    with pytest.raises(AlreadyExists, match="foreign domain"):
        world.create(sandbox)
    assert world.records.containers.all() == []
    assert world.outside.disks.directories == {}


# --- failures


STEPS = ["disks.create", "seeds.create", "vms.define", "records.containers.replace"]


def after_pod(world: World) -> tuple[SandboxId, list[str]]:
    sandbox = world.run()
    return sandbox, world.everything()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_failed_step_leaves_nothing(world: World, step: str, after: bool) -> None:
    sandbox, before = after_pod(world)
    world.journal.fail(step, InternalError("it broke"), after=after)
    with pytest.raises(InternalError, match="it broke"):
        world.create(sandbox)
    assert world.everything() == before
    world.create(sandbox)


@pytest.mark.parametrize("undo", ["disks.delete", "vms.undefine"])
def test_if_undo_fails_too_the_row_stays_until_removal_finishes_the_undo(world: World, undo: str) -> None:
    sandbox, before = after_pod(world)
    world.journal.fail("records.containers.replace", ResourceExhausted("disk full"))
    world.journal.fail(undo, Unavailable("gone"))
    with pytest.raises(ResourceExhausted):
        world.create(sandbox)
    (row,) = world.records.containers.all()
    assert row.phase is ContainerPhase.REMOVING
    world.remove(row.id)
    assert world.everything() == before


def test_a_repeat_finishes_an_undo_that_failed_and_makes_the_container(world: World) -> None:
    sandbox, _ = after_pod(world)
    world.journal.fail("vms.define", Unavailable("libvirt is gone"))
    world.journal.fail("vms.undefine", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.create(sandbox)
    (row,) = world.records.containers.all()
    assert row.phase is ContainerPhase.REMOVING
    container = world.create(sandbox)
    assert container != row.id
    assert [c.id for c in world.records.containers.all()] == [container]
    assert set(world.outside.disks.directories) == {container}


def test_a_container_that_is_being_removed_after_it_ran_keeps_its_name(world: World) -> None:
    sandbox, container = world.running()
    world.journal.fail("vms.undefine", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.remove(container)
    with pytest.raises(AlreadyExists, match="removing"):
        world.create(sandbox)


def test_all_undo_steps_run_even_if_one_fails(world: World) -> None:
    sandbox = world.run()
    world.journal.fail("records.containers.replace", ResourceExhausted("disk full"))
    world.journal.fail("vms.undefine", Unavailable("libvirt is gone"))
    with pytest.raises(ResourceExhausted):
        world.create(sandbox)
    assert world.outside.disks.directories == {}


def test_a_row_that_not_even_undo_could_change_does_not_block_the_name_for_ever(world: World) -> None:
    sandbox, before = after_pod(world)
    world.journal.fail("records.containers.replace", ResourceExhausted("disk full"))
    world.journal.fail("records.containers.delete", ResourceExhausted("disk full"))
    with pytest.raises(ResourceExhausted):
        world.create(sandbox)
    world.journal.heal()
    world.remove(world.create(sandbox))
    assert world.everything() == before


def test_the_file_of_an_image_removed_during_a_creation_stays(world: World) -> None:
    sandbox = world.run()
    gate = world.journal.hold("disks.create")

    creation = Background(lambda: world.create(sandbox))
    gate.wait()
    world.images.remove(IMAGE)
    gate.open()
    creation.done()
    (row,) = world.records.containers.all()
    assert row.image in world.outside.files.files
    assert world.images.all() == []
    world.remove(row.id)
    assert world.outside.files.files == {}


def test_the_file_of_an_image_removed_during_a_failed_creation_goes(world: World) -> None:
    sandbox = world.run()
    gate = world.journal.hold("disks.create")
    world.journal.fail("disks.create", ResourceExhausted("disk full"))
    creation = Background(lambda: world.create(sandbox))
    gate.wait()
    world.images.remove(IMAGE)
    gate.open()
    with pytest.raises(ResourceExhausted):
        creation.done()
    assert world.outside.files.files == {}


def test_a_sandbox_without_network_makes_a_vm_without_nics(world: World) -> None:
    """A record that an earlier version may have written."""
    sandbox = world.sandbox(world.run())
    bare = Sandbox(sandbox.id, sandbox.key, sandbox.config, sandbox.created_at, sandbox.phase)
    world.records.sandboxes.replace(bare)
    spec = world.outside.vms.spec(world.domain(world.create(sandbox.id)))
    assert (spec.fetch_key, spec.tapmanager_socket) == ("", "")


class Firmware:
    """One more step, as a later version may have."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    measured_as = observed.Step.DISK

    def make(self, draft: Draft) -> Draft:
        self._journal.calls.append("firmware.make")
        raise InternalError("no firmware")

    def undo(self, container: Container) -> None:
        self._journal.calls.append("firmware.undo")


def test_a_new_creation_step_only_needs_an_entry_in_the_list_of_steps(world: World) -> None:
    sandbox = world.run()
    *before, domain = world.do.create_container.steps
    create = dataclasses.replace(world.do.create_container, steps=(*before, Firmware(world.journal), domain))
    world.journal.calls.clear()
    with pytest.raises(InternalError, match="no firmware"):
        create.create(sandbox, ContainerName("vm", 0), container_config(), world.deadline())
    assert world.journal.calls == [
        "devices.own_containers",
        "devices.resolve",
        "records.containers.add",
        "disks.create",
        "seeds.create",
        "firmware.make",
        "firmware.undo",
        "disks.delete",
        "records.containers.delete",
    ]
