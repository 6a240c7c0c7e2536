"""The fake and the real store with qemu-img fulfil the contract of RootDisks."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.disks import FakeContainersRoom, FakeDiskPlaces, FakeRootDisks

from virtshim.disks import container_files, root_disks
from virtshim.disks.disk_places import DiskPlacesFiles
from virtshim.disks.ports import ContainersRoom, DiskPlaces, RootDisks
from virtshim.disks.root_disks import RootDiskStore
from virtshim.model.errors import InternalError
from virtshim.model.hardware import Firmware, FirmwareFiles, Places
from virtshim.model.ids import ContainerId, ImageDigest, ImageId
from virtshim.model.image import DiskFormat, Image
from virtshim.model.layout import KERNELS, NVRAM, Layout, kept_variables
from virtshim.model.sandbox import PodKey, disk_name, pod_hash
from virtshim.model.vm import Disk
from virtshim.system.files import remove_tree

A = ContainerId("a" * 64)
B = ContainerId("b" * 64)
WEB = PodKey("default", "web", "uid-1", 0)
OTHER = PodKey("default", "other", "uid-2", 0)
POD_DISK = disk_name(WEB, "vm")
MIB = 1 << 20


class World:
    """`base` is an image of 16 MiB in the file `base_path`."""

    disks: RootDisks
    room: ContainersRoom
    places: DiskPlaces

    def __init__(self, base_path: Path) -> None:
        self.base_path = str(base_path)
        self.base = Image(
            ImageId(f"sha256:{'0' * 64}"), ImageDigest(f"sha256:{'0' * 64}"), (), (), 1, 16 * MIB, DiskFormat.QCOW2, 0
        )

    def size(self, disk: Disk) -> int:
        """The size that a guest sees."""
        raise NotImplementedError

    def start(self, kind: Firmware) -> None:
        """Starts a VM of that kind on the pod's disk, which creates its UEFI variables."""
        raise NotImplementedError

    def create(self, container: ContainerId, size: int = 0) -> Disk:
        return self.disks.create(container, self.base, self.base_path, size)

    def create_pod_disk(self, name: str = POD_DISK, size: int = 0) -> Disk:
        return self.disks.create_pod_disk(name, self.base, self.base_path, size)


class InMemory(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "base.qcow2")
        self.disks = self._fake = FakeRootDisks()
        self.room = FakeContainersRoom(self._fake)
        self.places = FakeDiskPlaces(self._fake)

    def start(self, kind: Firmware) -> None:
        self._fake.variables.add(f"/pods/{POD_DISK}{'.secure' if kind is Firmware.SECURE else ''}.nvram")

    def size(self, disk: Disk) -> int:
        name = disk.path.split("/")
        name_of_pods = "/".join(name[-2:]).removesuffix(".qcow2")
        return self._fake.pod_sizes[name_of_pods] if name[1] == "pods" else self._fake.sizes[ContainerId(name[-2])]


class OnDisk(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "base.qcow2")
        self.layout = layout = Layout(str(directory / "state"), str(directory / "run"))
        os.makedirs(layout.containers)
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", self.base_path, "16M"], check=True)
        self.disks = RootDiskStore(layout)
        self.room = container_files.ContainersRoom(layout)
        self.places = DiskPlacesFiles(layout)

    def start(self, kind: Firmware) -> None:
        Path(kept_variables(self.layout, POD_DISK, kind)).touch()

    def size(self, disk: Disk) -> int:
        command = ["qemu-img", "info", "--output=json", disk.path]
        size: int = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["virtual-size"]
        return size


@pytest.fixture(params=[InMemory, OnDisk])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    made: World = request.param(tmp_path)
    return made


# --- a container's own


@pytest.mark.parametrize(("wanted", "size"), [(0, 16 * MIB), (MIB, 16 * MIB), (32 * MIB, 32 * MIB)])
def test_a_disk_is_as_large_as_its_image_or_larger(world: World, wanted: int, size: int) -> None:
    disk = world.create(A, wanted)
    assert (disk.format, disk.serial, disk.readonly) == (DiskFormat.QCOW2, "root", False)
    assert world.size(disk) == size


def test_creating_a_disk_again_replaces_it(world: World) -> None:
    first = world.create(A, 64 * MIB)
    second = world.create(A)
    assert second == first
    assert world.size(second) == 16 * MIB


def test_containers_are_listed_by_their_directory_whatever_it_contains(world: World) -> None:
    assert world.disks.existing() == frozenset()
    world.create(A)
    world.disks.make_directory(B)
    assert world.disks.existing() == {A, B}


def test_making_a_directory_again_keeps_its_contents(world: World) -> None:
    disk = world.create(A, 32 * MIB)
    world.disks.make_directory(A)
    assert world.size(disk) == 32 * MIB


def test_a_deleted_container_is_gone_and_may_be_deleted_again(world: World) -> None:
    world.create(A)
    world.create(B)
    for _ in range(2):
        world.disks.delete(A)
        assert world.disks.existing() == {B}


def test_deleting_only_the_disk_frees_its_space_and_keeps_other_files(world: World) -> None:
    world.create(A)
    disk = world.create_pod_disk()
    before = world.disks.use(A)
    for _ in range(2):
        world.disks.delete(A, disk_alone=True)
    after = world.disks.use(A)
    assert before is not None
    assert after is not None
    assert after.used_bytes < before.used_bytes
    assert world.disks.existing() == {A}
    assert world.disks.pod_disk(POD_DISK) == disk
    world.disks.delete(B, disk_alone=True)


# --- a pod's


def test_a_pods_disk_is_found_by_its_name(world: World) -> None:
    assert world.disks.pod_disk(POD_DISK) is None
    disk = world.create_pod_disk(size=32 * MIB)
    assert world.disks.pod_disk(POD_DISK) == disk
    assert world.size(disk) == 32 * MIB
    assert world.disks.pod_disk(disk_name(WEB, "other")) is None


def test_a_pods_disk_is_never_replaced(world: World) -> None:
    disk = world.create_pod_disk(size=32 * MIB)
    with pytest.raises(InternalError):
        world.create_pod_disk(size=64 * MIB)
    assert world.size(disk) == 32 * MIB


def test_a_pods_disk_outlives_the_containers(world: World) -> None:
    disk = world.create_pod_disk()
    world.disks.make_directory(A)
    world.disks.delete(A)
    assert world.disks.existing() == frozenset()
    assert world.disks.pod_disk(POD_DISK) == disk


def test_all_disks_of_a_pod_go_together_and_no_others(world: World) -> None:
    elsewhere = disk_name(OTHER, "vm")
    for name in (POD_DISK, disk_name(WEB, "second"), elsewhere):
        world.create_pod_disk(name)
    world.create(A)
    assert world.disks.pods_with_disks() == {pod_hash(WEB), pod_hash(OTHER)}
    for _ in range(2):
        world.disks.delete_pod_disks(pod_hash(WEB))
        assert world.disks.pods_with_disks() == {pod_hash(OTHER)}
    assert world.disks.pod_disk(POD_DISK) is None
    assert world.disks.pod_disk(elsewhere) is not None
    assert world.disks.existing() == {A}


# --- numbers


def test_the_space_of_all_containers_and_pods_is_counted(world: World) -> None:
    before = world.room.filesystem_usage()
    world.create(A)
    after_one = world.room.filesystem_usage()
    world.create_pod_disk()
    after_both = world.room.filesystem_usage()
    assert before.used_bytes < after_one.used_bytes < after_both.used_bytes
    assert before.inodes_used < after_one.inodes_used < after_both.inodes_used
    assert os.path.isabs(before.mountpoint)
    world.disks.delete(A)
    world.disks.delete_pod_disks(pod_hash(WEB))
    assert world.room.filesystem_usage().used_bytes < after_one.used_bytes


def test_a_container_without_a_directory_uses_nothing(world: World) -> None:
    world.create_pod_disk()
    assert world.disks.use(A, POD_DISK) is None


def test_a_pods_disk_is_counted_with_the_container_that_runs_on_it(world: World) -> None:
    world.disks.make_directory(A)
    empty = world.disks.use(A)
    world.create_pod_disk()
    with_pods = world.disks.use(A, POD_DISK)
    world.create(A)
    with_own = world.disks.use(A)
    assert empty is not None
    assert with_pods is not None
    assert with_own is not None
    assert empty.inodes_used < with_pods.inodes_used
    assert empty.used_bytes < with_pods.used_bytes
    assert empty.used_bytes < with_own.used_bytes
    assert empty.filesystem_bytes == with_own.filesystem_bytes > with_own.used_bytes


def test_there_is_room_for_disks_to_grow(world: World) -> None:
    assert world.disks.free_bytes() > 0


def test_the_guest_addresses_of_devices_are_kept_and_deleted_with_the_pods_disk(world: World) -> None:
    world.disks.create_pod_disk(POD_DISK, world.base, world.base_path, 0)
    assert world.places.read(POD_DISK) == Places()
    places = Places("pc-q35-7.2", {b"v123": 3})
    world.places.keep(POD_DISK, places)
    assert world.places.read(POD_DISK) == places
    world.disks.delete_pod_disks(pod_hash(WEB))
    assert world.places.read(POD_DISK) == Places()


@pytest.mark.parametrize("kind", [Firmware.UEFI, Firmware.SECURE])
def test_the_firmware_of_uefi_variables_is_kept_and_deleted_with_the_pods_disk(world: World, kind: Firmware) -> None:
    world.create_pod_disk()
    other = {Firmware.UEFI: Firmware.SECURE, Firmware.SECURE: Firmware.UEFI}[kind]
    assert world.places.firmware(POD_DISK, kind) is None
    files = FirmwareFiles("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd")
    world.places.keep_firmware(POD_DISK, kind, files)
    world.start(kind)
    assert world.places.firmware(POD_DISK, kind) == files
    assert world.places.firmware(POD_DISK, other) is None
    world.disks.delete_pod_disks(pod_hash(WEB))
    assert world.places.firmware(POD_DISK, kind) is None


@pytest.mark.parametrize("kind", [Firmware.UEFI, Firmware.SECURE])
def test_a_firmware_note_counts_once_the_first_start_has_made_uefi_variables(world: World, kind: Firmware) -> None:
    """A kill before that start, or a package upgrade, leaves a note about variables that do not exist."""
    world.create_pod_disk()
    old, new = FirmwareFiles("/old/code", "/old/vars"), FirmwareFiles("/new/code", "/new/vars")
    world.places.keep_firmware(POD_DISK, kind, old)
    world.start(Firmware.UEFI if kind is Firmware.SECURE else Firmware.SECURE)
    assert world.places.firmware(POD_DISK, kind) is None
    world.places.keep_firmware(POD_DISK, kind, new)
    world.start(kind)
    assert world.places.firmware(POD_DISK, kind) == new


def test_a_tpm_belongs_to_its_pod_until_the_pods_disks_are_deleted(world: World) -> None:
    world.create_pod_disk()
    tpm = uuid.uuid5(uuid.NAMESPACE_DNS, "first")
    assert world.places.tpm_owners(tpm) == frozenset()
    world.places.keep_tpm(POD_DISK, tpm)
    assert world.places.tpm_owners(tpm) == {pod_hash(WEB)}
    assert world.places.tpm_owners(uuid.uuid5(uuid.NAMESPACE_DNS, "second")) == frozenset()
    world.disks.delete_pod_disks(pod_hash(WEB))
    assert world.places.tpm_owners(tpm) == frozenset()


def test_tpm_state_is_deleted_with_the_pods_disk(tmp_path: Path) -> None:
    """The pods' own tests cover the fake."""
    world = OnDisk(tmp_path)
    states = tmp_path / "libvirt" / "swtpm"
    uuids = [uuid.uuid5(uuid.NAMESPACE_DNS, name) for name in ("first", "second", "another's")]
    for one in uuids:
        (states / str(one) / "tpm2").mkdir(parents=True)
    disks = RootDiskStore(world.layout, str(states))
    disks.create_pod_disk(POD_DISK, world.base, world.base_path, 0)
    for one in (uuids[0], uuids[0], uuids[1]):
        world.places.keep_tpm(POD_DISK, one)
    disks.delete_pod_disks(pod_hash(WEB))
    assert [path.name for path in states.iterdir()] == [str(uuids[2])]


def test_an_interrupted_removal_is_remembered_until_a_repeat_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = OnDisk(tmp_path)
    world.create(A)
    made = [world.layout.socket_dir(A), f"{world.layout.vnc_sockets}/{A.short}", world.layout.container_dir(A)]
    os.makedirs(made[1])
    steps: Iterator[str] = iter(())

    def dies(parent: str, name: str) -> None:
        if next(steps, "") == "die":
            raise KeyboardInterrupt
        remove_tree(parent, name)

    monkeypatch.setattr(root_disks, "remove_tree", dies)
    for before in range(3):
        steps = iter([*["go on"] * before, "die"])
        with pytest.raises(KeyboardInterrupt):
            world.disks.delete(A)
        assert world.disks.existing() == {A}
    world.disks.delete(A)
    assert not any(os.path.exists(path) for path in made)


def test_uefi_variables_and_kernel_are_deleted_with_the_containers_disk(tmp_path: Path) -> None:
    world = OnDisk(tmp_path)
    world.create(A)
    beside = [Path(world.layout.container_dir(A), name) for name in (NVRAM, f"{KERNELS}0123")]
    for file in beside:
        file.touch()
    world.disks.delete(A, disk_alone=True)
    assert not any(file.exists() for file in beside)
