"""Saved memory is used only with the disks that it was saved with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.lasting import LASTING, logged, pod, running, vm
from fakes.loop import loop_device, no_loop_devices
from fakes.world import World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Unavailable, WrongState
from virtshim.model.sandbox import PodKey
from virtshim.moves.fingerprints import Fingerprint, difference, fingerprint, samples

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    path.write_bytes(os.urandom(64 * MIB))
    return path


@pytest.mark.parametrize("size", [0, 1, MIB, 6 * MIB, 6 * MIB + 1, 64 * MIB, 1 << 40])
def test_samples_lie_on_the_disk_and_include_both_its_ends(size: int) -> None:
    taken = list(samples(size))
    assert all(at >= 0 and at + length <= size for at, length in taken)
    assert taken[0][0] == 0
    assert sum(taken[-1]) == size
    assert sum(length for _, length in taken) <= 6 * MIB
    assert taken == sorted(taken)


def _overwrite(disk: Path) -> None:
    with disk.open("r+b") as file:
        file.write(b"changed")


def _change_between_samples(disk: Path) -> None:
    with disk.open("r+b") as file:
        file.seek(MIB + (64 << 10) + 1)
        file.write(b"changed")


def _replace(disk: Path) -> None:
    """Restores a backup, with the times of the file."""
    before = disk.stat()
    copy = disk.with_name("copy")
    copy.write_bytes(disk.read_bytes())
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.rename(disk)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_overwrite, "was written to, or restored from a backup"),
        (_change_between_samples, "was written to, or restored from a backup"),
        (_replace, "is another one"),
        (lambda disk: os.truncate(disk, 32 * MIB), "had 67108864 bytes and has 33554432"),
    ],
)
def test_a_file_that_was_changed_is_seen(disk: Path, change: Callable[[Path], None], what: str) -> None:
    before = fingerprint(str(disk), is_file=True)
    assert difference({"/data": before}, {"/data": fingerprint(str(disk), is_file=True)}) == ""
    change(disk)
    assert (
        difference({"/data": before}, {"/data": fingerprint(str(disk), is_file=True)}) == f"the volume at /data {what}"
    )


def test_a_disk_that_only_one_of_the_pods_has_is_named() -> None:
    one = Fingerprint(1, "", 0, "")
    assert difference({"": one, "/data": one}, {"": one}) == "the volume at /data is only there in the saved VM"
    assert difference({"": one}, {"": one, "/data": one}) == "the volume at /data is only there now"


def test_a_link_in_a_volume_is_not_followed(disk: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(disk)
    with pytest.raises(Unavailable, match="cannot be read"):
        fingerprint(str(link), is_file=True)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_disk_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "disk.img")
    with pytest.raises(Unavailable, match="is no regular file"):
        fingerprint(str(tmp_path / "disk.img"), is_file=True)


@pytest.mark.skipif(**no_loop_devices())
def test_a_block_device_that_was_changed_at_its_beginning_is_seen(disk: Path, tmp_path: Path) -> None:
    with loop_device(disk) as device:
        link = tmp_path / "as kubelet names it"
        link.symlink_to(device)
        before = fingerprint(str(link), is_file=False)
        assert before.size == 64 * MIB
        assert difference({"/dev/data": before}, {"/dev/data": fingerprint(str(device), is_file=False)}) == ""
        _overwrite(device)
        now = fingerprint(str(link), is_file=False)
        assert "was written to" in difference({"/dev/data": before}, {"/dev/data": now})


def test_a_file_in_the_place_of_a_device_is_refused(disk: Path) -> None:
    with pytest.raises(Unavailable, match="is no block device"):
        fingerprint(str(disk), is_file=False)


# --- saved VMs


def with_data(world: World, number: int) -> str:
    """The next container of a VM with a disk of its own and a writable volume."""
    if not world.records.images.all():
        world.pull()
    own = sandbox_config(annotations=LASTING.annotations)
    sandbox = world.do.run_sandbox.run(PodKey("default", "db-0", f"uid-{number}", 0), own, world.deadline())
    return world.create(sandbox, config=container_config(devices=(CriDevice("/dev/block/pv", "/dev/data", "rw"),)))


def test_a_vm_with_a_writable_block_volume_is_saved_and_continues(world: World) -> None:
    first = with_data(world, 1)
    world.start(first)
    world.stop(first, 30)
    saved = vm(world).saved
    assert saved is not None
    assert set(saved.disks) == {"", "/dev/data"}
    world.remove_sandbox(world.container(first).sandbox_id)
    second = with_data(world, 2)
    world.start(second)
    assert world.outside.vms.restored == [world.domain(second)]


@pytest.mark.parametrize("path", ["", "/dev/data"])
def test_memory_whose_disk_has_changed_is_not_used(world: World, path: str) -> None:
    first = with_data(world, 1)
    world.start(first)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    world.outside.written[path] = 1
    second = with_data(world, 2)
    with pytest.raises(WrongState, match=r"was written to, or restored from a backup; the next attempt boots"):
        world.start(second)
    assert world.outside.vms.restored == []
    third = world.create(world.container(second).sandbox_id, attempt=1, config=world.container(second).config)
    world.start(third)
    assert world.container(third).phase is ContainerPhase.RUNNING
    assert any("its saved memory is discarded" in line for line in logged(world))


def test_a_disk_that_cannot_be_read_keeps_the_memory_for_the_next_attempt(world: World) -> None:
    first = running(world)
    world.stop(first, 30)
    world.remove_sandbox(world.container(first).sandbox_id)
    second = world.create(pod(world, 2))
    world.journal.fail("saved_vms.fingerprints", Unavailable("the disk cannot be read"))
    with pytest.raises(Unavailable):
        world.start(second)
    third = world.create(world.container(second).sandbox_id, attempt=1)
    world.start(third)
    assert world.outside.vms.restored == [world.domain(third)]


def test_a_guest_whose_disk_cannot_be_read_is_not_saved(world: World) -> None:
    first = running(world)
    world.journal.fail("saved_vms.fingerprints", Unavailable("the disk cannot be read"))
    world.stop(first, 30)
    ended = world.container(first).exit
    assert ended is not None
    assert "the guest's memory was not saved: the disk cannot be read" in ended.message
    assert vm(world).saved is None
