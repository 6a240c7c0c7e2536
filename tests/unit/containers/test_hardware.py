"""The state of firmware and TPM is kept and removed with the root disk."""

from __future__ import annotations

import re
import uuid

import pytest
from fakes.world import World, container_config, sandbox_config

from virtshim.annotations.options import VmOptions
from virtshim.annotations.profiles import Profile, of_pod
from virtshim.devices.values import CriDevice
from virtshim.model.container import Resources
from virtshim.model.errors import AlreadyExists, InvalidRequest
from virtshim.model.hardware import Clock, Firmware, FirmwareFiles, HardwareOptions, NicModel
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sizing import may_want_queues, nic_queues
from virtshim.model.vm import DiskBus, OffReason, VmSize, VmSpec

SECURE = {"virtshim.io/firmware": "uefi-secure", "virtshim.io/tpm": "true"}
KEEP = {"virtshim.io/root-disk": "pod"}
CHOSEN = "12345678-9abc-4def-8123-456789abcdef"


def ended(world: World, sandbox: SandboxId, attempt: int = 0) -> VmSpec:
    container = world.create(sandbox, attempt=attempt)
    spec = spec_of(world, container)
    world.start(container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    return spec


def spec_of(world: World, container: ContainerId) -> VmSpec:
    return world.outside.vms.spec(world.domain(container))


def test_a_vm_has_a_bios_and_no_tpm_by_default(world: World) -> None:
    spec = spec_of(world, world.create(world.run()))
    assert (spec.hardware, spec.nvram) == (HardwareOptions(), "")


def test_a_guest_sees_the_numa_nodes_of_its_exclusive_cpus(world: World) -> None:
    world.outside.vms.host_nodes = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    resources = Resources(cpu_quota=-1, cpuset_cpus="1-2", cpuset_mems="0-1", memory_limit_bytes=512 << 20)
    spec = spec_of(world, world.create(world.run(), config=container_config(resources=resources)))
    assert [(cell.node, cell.cpus, cell.vcpus[0]) for cell in spec.cells] == [(0, {1}, 0), (1, {2}, 1)]
    world.outside.vms.host_nodes = {0: frozenset(range(4))}
    spec = spec_of(world, world.create(world.run("one-node"), config=container_config(resources=resources)))
    assert spec.cells == ()


def test_each_attempt_on_a_fresh_disk_has_new_firmware_variables_and_a_new_tpm(world: World) -> None:
    sandbox = world.run(config=sandbox_config(annotations=SECURE))
    first, second = ended(world, sandbox), ended(world, sandbox, 1)
    assert first.hardware == HardwareOptions(Firmware.SECURE, tpm=True)
    assert first.nvram.endswith(f"/containers/{first.container_id}/root.nvram")
    assert (first.nvram != second.nvram, first.uuid != second.uuid, second.keeps_tpm) == (True, True, False)


def test_on_a_kept_disk_firmware_variables_and_tpm_are_kept_for_the_next_sandbox_too(world: World) -> None:
    config = sandbox_config(annotations=SECURE | KEEP)
    sandbox = world.run(config=config)
    specs = [ended(world, sandbox), ended(world, sandbox, 1)]
    world.stop_sandbox(sandbox)
    later = world.run(attempt=1, config=config)
    world.remove_sandbox(sandbox)
    specs.append(ended(world, later, 2))
    assert len({(spec.nvram, spec.uuid, spec.keeps_tpm) for spec in specs}) == 1
    assert re.fullmatch(r".*/pods/[0-9a-f]{64}/[0-9a-f]{64}\.secure\.nvram", specs[0].nvram)
    assert specs[0].keeps_tpm
    assert list(world.outside.disks.tpms.values()) == [{specs[0].uuid}]
    world.remove_sandbox(later)
    assert world.outside.disks.tpms == {}


def test_a_foreign_vms_tpm_is_not_removed_with_a_pod_that_asked_for_its_uuid(world: World) -> None:
    world.outside.vms.add_foreign(uuid.UUID(CHOSEN), "theirs")
    sandbox = world.run(config=sandbox_config(annotations=SECURE | KEEP | {"VirtletSystemUUID": CHOSEN}))
    with pytest.raises(AlreadyExists, match="foreign domain"):
        world.create(sandbox)
    assert world.outside.disks.tpms == {}


@pytest.mark.parametrize("kept", [KEEP, {}])
def test_a_kept_disks_tpm_is_refused_to_other_pods_even_without_a_container(world: World, kept: dict[str, str]) -> None:
    chosen = SECURE | {"VirtletSystemUUID": CHOSEN}
    owner = world.run(config=sandbox_config(annotations=chosen | KEEP))
    world.remove(ended(world, owner).container_id)
    thief = world.run("thief", config=sandbox_config(annotations=chosen | kept))
    with pytest.raises(AlreadyExists, match="belongs to the disk of another pod"):
        world.create(thief)
    assert world.outside.vms.domains == {}
    ended(world, owner, 1)
    world.remove_sandbox(owner)
    ended(world, thief)


@pytest.mark.parametrize("kept", [KEEP, {}])
def test_a_tpm_that_an_operator_kept_of_an_earlier_vm_is_given_to_no_pod(world: World, kept: dict[str, str]) -> None:
    world.outside.vms.left_tpms.add(uuid.UUID(CHOSEN))
    thief = world.run(config=sandbox_config(annotations=SECURE | kept | {"VirtletSystemUUID": CHOSEN}))
    with pytest.raises(AlreadyExists, match="an earlier VM's TPM is there"):
        world.create(thief)
    assert world.outside.disks.tpms == {}, "nor is it removed with the pod"


def test_a_kept_disks_tpm_stays_the_pods_after_its_definition_is_gone(world: World) -> None:
    sandbox = world.run(config=sandbox_config(annotations=SECURE | KEEP | {"VirtletSystemUUID": CHOSEN}))
    first = ended(world, sandbox)
    assert not first.owns_tpm
    world.outside.vms.left_tpms.add(first.uuid)
    world.remove(first.container_id)
    assert ended(world, sandbox, 1).owns_tpm


def test_switching_to_secure_boot_does_not_reuse_the_variables_of_plain_uefi(world: World) -> None:
    first = world.run(config=sandbox_config(annotations=KEEP | {"virtshim.io/firmware": "uefi"}))
    without = ended(world, first)
    world.stop_sandbox(first)
    later = ended(world, world.run(attempt=1, config=sandbox_config(annotations=SECURE | KEEP)), 1)
    assert without.disks[0].path == later.disks[0].path
    assert without.nvram != later.nvram


def test_a_kept_disk_keeps_the_firmware_of_its_first_start_after_a_package_upgrade(world: World) -> None:
    sandbox = world.run(config=sandbox_config(annotations=SECURE | KEEP))
    first = ended(world, sandbox)
    before = first.firmware_files
    assert before == world.outside.vms.firmware[Firmware.SECURE]
    world.outside.vms.firmware = {kind: FirmwareFiles("/new/code", "/new/vars") for kind in Firmware}
    assert ended(world, sandbox, 1).firmware_files == before
    world.stop_sandbox(sandbox)
    without = world.run(attempt=1, config=sandbox_config(annotations=KEEP | {"virtshim.io/firmware": "uefi"}))
    assert ended(world, without, 2).firmware_files == FirmwareFiles("/new/code", "/new/vars"), "other variables"
    world.remove_sandbox(sandbox)
    world.remove_sandbox(without)
    assert world.outside.disks.firmware == {}


def test_a_kept_disk_that_was_never_started_gets_the_nodes_current_firmware(world: World) -> None:
    """The note is there before the variables: it alone must not keep a disk to files that have gone."""
    sandbox = world.run(config=sandbox_config(annotations=SECURE | KEEP))
    world.remove(world.create(sandbox))
    world.outside.vms.firmware = {kind: FirmwareFiles("/new/code", "/new/vars") for kind in Firmware}
    second = ended(world, sandbox, 1)
    assert second.firmware_files == FirmwareFiles("/new/code", "/new/vars")
    world.outside.vms.firmware = {kind: FirmwareFiles("/newer/code", "/newer/vars") for kind in Firmware}
    assert ended(world, sandbox, 2).firmware_files == second.firmware_files, "its variables are there now"


def test_libvirt_chooses_the_firmware_unless_a_kept_disk_needs_a_fixed_one(
    world: World,
) -> None:
    assert ended(world, world.run(config=sandbox_config(annotations=SECURE))).firmware_files is None
    assert ended(world, world.run("bios", config=sandbox_config(annotations=KEEP))).firmware_files is None
    world.outside.vms.firmware.clear()
    assert ended(world, world.run("kept", config=sandbox_config(annotations=SECURE | KEEP))).firmware_files is None
    assert world.outside.disks.firmware == {}


def test_vms_of_two_pods_have_different_uuids(world: World) -> None:
    config = sandbox_config(annotations=SECURE | KEEP)
    assert ended(world, world.run(config=config)).uuid != ended(world, world.run("other", config=config)).uuid


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"virtshim.io/firmware": "uefi"}, "annotation virtshim.io/firmware: a volume at devicePath / has no place"),
        ({"virtshim.io/tpm": "true"}, "annotation virtshim.io/tpm: a volume at devicePath / has no place"),
    ],
)
def test_a_root_disk_on_a_volume_cannot_have_uefi_or_a_tpm(
    world: World, annotations: dict[str, str], words: str
) -> None:
    sandbox = world.run(config=sandbox_config(annotations=annotations))
    with pytest.raises(InvalidRequest, match=words):
        world.create(sandbox, config=container_config(devices=(CriDevice("/dev/block/pv", "/"),)))


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (
            {"virtshim.io/firmware": "efi"},
            "virtshim.io/firmware: 'efi' is none of bios, uefi, uefi-secure; write one of them",
        ),
        ({"virtshim.io/tpm": "yes"}, "virtshim.io/tpm: 'yes' is neither true nor false"),
        (
            {"virtshim.io/disk-cache": "unsafe"},
            "disk-cache: 'unsafe' is none of writeback, none, writethrough, directsync",
        ),
        (
            {"virtshim.io/watchdog": "poweroff"},
            "virtshim.io/watchdog: 'poweroff' is not a watchdog action; write reset",
        ),
        ({"virtshim.io/cpu-topology": "2x2"}, "cpu-topology: '2x2' is not SOCKETSxCORESxTHREADS; write one like 1x2x2"),
        ({"virtshim.io/cpu-topology": "9x9x9"}, "at most 255 in all"),
    ],
)
def test_an_unknown_hardware_value_is_refused_by_name(world: World, annotations: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        world.run(config=sandbox_config(annotations=annotations))


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (
            {"virtshim.io/disk-io": "native"},
            "virtshim.io/disk-io: native needs virtshim.io/disk-cache none or directsync",
        ),
        (
            {"virtshim.io/cpu-topology": "1x2x2"},
            "cpu-topology: it has 4 vCPUs, but the VM can have 1; make the product",
        ),
        ({"virtshim.io/video": "virtio"}, "virtshim.io/video: a video card needs a screen; write virtshim.io/vnc"),
        (
            {"virtshim.io/nic-model": "e1000", "virtshim.io/nic-queues": "2"},
            "nic-queues: a NIC of virtshim.io/nic-model e1000 has one queue; remove one of the two",
        ),
    ],
)
def test_conflicting_hardware_options_are_refused(world: World, annotations: dict[str, str], words: str) -> None:
    sandbox = world.run(config=sandbox_config(annotations=annotations))
    with pytest.raises(InvalidRequest, match=words):
        world.create(sandbox)


def test_each_node_has_a_windows_profile_and_a_pod_may_override_it(world: World) -> None:
    annotations = {"virtshim.io/profile": "windows", "virtshim.io/tablet": "false"}
    spec = spec_of(world, world.create(world.run(config=sandbox_config(annotations=annotations))))
    assert spec.disk_bus is DiskBus.SATA
    assert spec.hardware == HardwareOptions(nic_model=NicModel.E1000E, hyperv=True, clock=Clock.LOCALTIME)


def test_an_operators_windows_profile_replaces_the_built_in_one() -> None:
    own = Profile("windows", {"VirtletVCPUCount": "2"})
    assert of_pod([own], {"virtshim.io/profile": "windows"}, "") == {"VirtletVCPUCount": "2"}


def test_a_nic_of_another_model_than_virtio_has_one_queue() -> None:
    options = VmOptions(vcpus=4, hardware=HardwareOptions(nic_model=NicModel.E1000E))
    assert nic_queues(options, VmSize(vcpus=4)) == 1
    assert not may_want_queues(options, Resources())
