"""The fake, and the real store on a loop device where the machine has them, fulfil the contract of RootVolumes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.disks import FakeRootVolumes
from fakes.loop import loop_device, no_loop_devices

from virtshim.disks.ports import RootVolumes
from virtshim.disks.root_volumes import RootVolumeStore
from virtshim.images.verify import qemu_img_copy_to_device
from virtshim.model.errors import InternalError, WrongState
from virtshim.model.hardware import Places
from virtshim.model.ids import ContainerId, ImageDigest, ImageId
from virtshim.model.image import DiskFormat, Image
from virtshim.volumes.root_volume import Content

pytestmark = pytest.mark.volumes

A = ContainerId("a" * 64)
B = ContainerId("b" * 64)
DISK = ImageDigest(f"sha256:{'1' * 64}")
MIB = 1 << 20
TEXT = b"the image's own first sector".ljust(512, b".")


class World:
    """`image` has 4 MiB and is in the file `path`; the volume has 16 MiB."""

    volumes: RootVolumes
    device: str

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "image.raw")
        self.image = Image(ImageId(DISK.value), DISK, (), (), 1, 4 * MIB, DiskFormat.RAW, 0)

    def make(self, container: ContainerId = A) -> None:
        self.volumes.begin(self.device, container)
        self.volumes.copy(self.device, container, self.image, self.path)
        self.volumes.seal(self.device, container, self.image.digest)

    def content(self) -> Content:
        return self.volumes.look(self.device).content


class InMemory(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.volumes, self.device = FakeRootVolumes(16 * MIB), "/dev/volume"


class OnDisk(World):
    def __init__(self, directory: Path, device: Path) -> None:
        super().__init__(directory)
        Path(self.path).write_bytes(TEXT + os.urandom(4 * MIB - 512))
        self.volumes, self.device = RootVolumeStore(qemu_img_copy_to_device), str(device)

    def read(self, at: int, size: int) -> bytes:
        with open(self.device, "rb") as file:
            file.seek(at)
            return file.read(size)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[OnDisk]:
    if no_loop_devices()["condition"]:
        pytest.skip(no_loop_devices()["reason"])
    file = tmp_path / "volume"
    with file.open("wb") as made:
        made.truncate(16 * MIB)
    with loop_device(file) as device:
        yield OnDisk(tmp_path, device)


@pytest.fixture(params=["fake", "real"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "fake":
        return InMemory(tmp_path)
    real: OnDisk = request.getfixturevalue("real")
    return real


def test_a_new_volume_is_blank_and_has_a_size(world: World) -> None:
    found = world.volumes.look(world.device)
    assert (found.content, found.size_bytes, found.image) == (Content.BLANK, 16 * MIB, None)


def test_a_volume_is_a_root_disk_only_after_it_is_sealed(world: World) -> None:
    seen = []
    world.volumes.begin(world.device, A)
    seen.append(world.content())
    world.volumes.copy(world.device, A, world.image, world.path)
    seen.append(world.content())
    world.volumes.seal(world.device, A, world.image.digest)
    found = world.volumes.look(world.device)
    assert seen == [Content.HALF, Content.HALF]
    assert (found.content, found.image, found.identity) == (Content.ROOT_DISK, world.image.digest, A.short)


def test_a_root_volume_is_attached_without_its_header(world: World) -> None:
    world.make()
    disk = world.volumes.disk(world.device)
    assert (disk.path, disk.format, disk.serial, disk.is_device) == (world.device, DiskFormat.RAW, "root", True)
    assert (disk.data_at, disk.data_bytes) == (512, 16 * MIB - 512)


def test_beginning_again_makes_the_disk_half_made_again(world: World) -> None:
    world.make()
    world.volumes.begin(world.device, B)
    assert world.content() is Content.HALF


def test_only_the_last_container_that_began_may_copy_and_seal(world: World) -> None:
    world.volumes.begin(world.device, A)
    world.volumes.begin(world.device, B)
    with pytest.raises(WrongState, match="something else"):
        world.volumes.copy(world.device, A, world.image, world.path)
    with pytest.raises(WrongState, match="something else"):
        world.volumes.seal(world.device, A, world.image.digest)
    assert world.content() is Content.HALF


def test_the_volume_has_virtlets_header_and_the_image_behind_it(real: OnDisk) -> None:
    real.make()
    magic, version, digest = struct.unpack(">QH32s", real.read(0, 42))
    assert (magic, version, digest.hex()) == (0x263DBE52BA576702, 1, real.image.digest.hex)
    assert real.read(512, 4 * MIB) == Path(real.path).read_bytes()


def test_old_contents_do_not_show_through_the_image(real: OnDisk, tmp_path: Path) -> None:
    with open(real.device, "r+b") as file:
        file.write(b"old" * MIB)
    real.path = str(tmp_path / "image.qcow2")
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", real.path, "4M"], check=True)
    real.image = Image(ImageId(DISK.value), DISK, (), (), 1, 4 * MIB, DiskFormat.QCOW2, 0)
    real.make()
    assert real.read(512, 4 * MIB) == bytes(4 * MIB)


def test_an_image_copies_no_files_of_the_node(real: OnDisk, tmp_path: Path) -> None:
    """Whatever backing file its header names."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0".ljust(MIB, b"#"))
    real.path = str(tmp_path / "image.qcow2")
    words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(secret), real.path, "4M"]
    subprocess.run(words, check=True)
    real.image = Image(ImageId(DISK.value), DISK, (), (), 1, 4 * MIB, DiskFormat.QCOW2, 0)
    real.make()
    assert real.read(512, MIB) == bytes(MIB)


def test_an_image_that_cannot_be_read_leaves_no_root_disk(real: OnDisk) -> None:
    real.image = Image(ImageId(DISK.value), DISK, (), (), 1, 4 * MIB, DiskFormat.QCOW2, 0)
    with pytest.raises(InternalError, match="cannot be copied by qemu-img"):
        real.make()
    assert real.content() is Content.HALF


def test_a_copy_that_outlives_virtshim_keeps_the_volume_locked(real: OnDisk) -> None:
    """qemu-img holds the locked descriptor."""
    real.volumes.begin(real.device, A)
    code = f"import fcntl, os, sys; file = os.open({real.device!r}, os.O_RDWR); fcntl.flock(file, fcntl.LOCK_EX)"
    code += "; print('held', flush=True); sys.stdin.read()"
    held = subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdin is not None
    assert held.stdout is not None
    with held.stdin, held.stdout:
        assert held.stdout.readline() == b"held\n"
        steps: tuple[Callable[[], None], ...] = (
            lambda: real.volumes.begin(real.device, B),
            lambda: real.volumes.copy(real.device, A, real.image, real.path),
            lambda: real.volumes.seal(real.device, A, real.image.digest),
        )
        for step in steps:
            with pytest.raises(WrongState, match="being written to"):
                step()
        held.send_signal(signal.SIGKILL)
        held.wait(60)
    real.make()
    assert real.content() is Content.ROOT_DISK


def test_a_volume_in_use_by_a_vm_is_not_overwritten(real: OnDisk) -> None:
    real.make()
    # Opens it as QEMU does, with the same locks.
    held = subprocess.Popen(
        ["qemu-io", "-f", "raw", real.device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdin is not None
    assert held.stdout is not None
    with held, held.stdin, held.stdout:
        held.stdin.write("length\n")
        held.stdin.flush()
        assert "16" in held.stdout.readline()
        with pytest.raises(WrongState, match="a VM runs on the volume"):
            real.volumes.begin(real.device, B)
        assert real.content() is Content.ROOT_DISK
    real.volumes.begin(real.device, B)


def test_a_volume_keeps_the_guest_addresses_of_devices_until_another_image_is_copied(world: World) -> None:
    world.make()
    places = Places("pc-q35-7.2", {b"v123": 3})
    world.volumes.keep_places(world.device, places)
    assert (world.content(), world.volumes.look(world.device).places) == (Content.ROOT_DISK, places)
    world.make(B)
    assert world.volumes.look(world.device).places == Places()
