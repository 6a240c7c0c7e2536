"""A root disk is an overlay of the right size on the right base, and its removal touches nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from virtshim.disks import root_disks
from virtshim.disks.root_disks import RootDiskStore
from virtshim.model.errors import InternalError, InvalidRequest, NotFound, ResourceExhausted
from virtshim.model.ids import ContainerId, ImageDigest, ImageId
from virtshim.model.image import DiskFormat, Image
from virtshim.model.layout import Layout, vnc_socket
from virtshim.model.vm import Disk
from virtshim.system.process import Finished, run

ID = ContainerId("ab" * 32)
OTHER = ContainerId("cd" * 32)
MIB = 1 << 20


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "state"), str(tmp_path / "run"))


@pytest.fixture
def disks(layout: Layout) -> RootDiskStore:
    return RootDiskStore(layout)


@pytest.fixture(params=list(DiskFormat))
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Image, str]:
    path = tmp_path / "base"
    subprocess.run(["qemu-img", "create", "-q", "-f", request.param.value, path, "16M"], check=True)
    digest = ImageDigest(f"sha256:{'0' * 64}")
    return Image(ImageId(digest.value), digest, (), (), path.stat().st_size, 16 * MIB, request.param, 0), str(path)


def info(path: str) -> Any:
    return json.loads(
        subprocess.run(["qemu-img", "info", "--output=json", path], check=True, capture_output=True).stdout
    )


@pytest.mark.parametrize(
    ("wanted", "size"), [(0, 16 * MIB), (MIB, 16 * MIB), (32 * MIB, 32 * MIB), (16 * MIB + 1, 16 * MIB + 512)]
)
def test_a_disk_is_an_overlay_that_only_grows(disks, layout, base, wanted: int, size: int) -> None:
    image, path = base
    disk = disks.create(ID, image, path, wanted)
    assert disk == Disk(layout.root_disk(ID), DiskFormat.QCOW2, "root")
    found = info(disk.path)
    assert found["virtual-size"] == size
    assert found["format"] == "qcow2"
    assert found["full-backing-filename"] == path
    assert found["backing-filename-format"] == image.format.value


def test_creating_a_disk_does_not_open_the_image(disks, base) -> None:
    """A stranger wrote it, and qemu-img runs as root here: size and format are known."""
    image, path = base
    Path(path).write_bytes(b"QFI\xfb" + b"\xff" * 60)
    found = info(disks.create(ID, image, path, 0).path)
    assert (found["virtual-size"], found["full-backing-filename"]) == (image.virtual_size, path)


def test_the_second_disk_of_an_image_is_like_the_first_without_qemu_img(layout, base) -> None:
    runs: list[list[str]] = []
    disks = RootDiskStore(layout, run=lambda argv, **limits: (runs.append(argv), run(argv, **limits))[1])
    first, second = disks.create(ID, *base, 0), disks.create(OTHER, *base, 0)
    assert len(runs) == 1
    assert Path(second.path).read_bytes() == Path(first.path).read_bytes()
    assert os.stat(second.path).st_mode & 0o777 == 0o600
    assert os.stat(second.path).st_blocks <= os.stat(first.path).st_blocks
    subprocess.run(["qemu-img", "check", "-q", second.path], check=True)


def test_a_disk_of_another_size_or_base_is_not_a_copy(disks, base, tmp_path: Path) -> None:
    image, path = base
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(path, elsewhere)
    disks.create(ID, image, path, 0)
    assert info(disks.create(OTHER, image, path, 32 * MIB).path)["virtual-size"] == 32 * MIB
    assert info(disks.create(OTHER, image, str(elsewhere), 0).path)["full-backing-filename"] == str(elsewhere)


def test_a_copy_without_space_is_removed_and_reported(disks, layout, base, monkeypatch) -> None:
    """A small file system to fill would need a mount."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    disks.create(ID, *base, 0)
    monkeypatch.setattr(root_disks.os, "pwrite", full)
    monkeypatch.setattr(disks, "free_bytes", lambda: 0)
    with pytest.raises(ResourceExhausted, match="no space for its root disk"):
        disks.create(OTHER, *base, 0)
    assert not Path(layout.root_disk(OTHER)).exists()


def test_a_disk_that_a_guest_has_written_to_is_not_copied_for_others(disks, base) -> None:
    written = disks.create(ID, *base, 0)
    subprocess.run(["qemu-io", "-c", "write -P 7 0 64k", written.path], check=True, capture_output=True)
    assert b"\7" * 512 not in Path(disks.create(OTHER, *base, 0).path).read_bytes()


def test_the_directory_can_be_entered_and_the_disk_is_private(disks, layout, base) -> None:
    disk = disks.create(ID, *base, 0)
    assert os.stat(disk.path).st_mode & 0o777 == 0o600
    assert os.stat(layout.container_dir(ID)).st_mode & 0o777 == 0o711
    assert os.stat(layout.containers).st_mode & 0o777 == 0o711


def test_a_half_made_disk_is_replaced(disks, layout, base) -> None:
    Path(layout.container_dir(ID)).mkdir(parents=True)
    Path(layout.root_disk(ID)).write_text("half")
    assert info(disks.create(ID, *base, 0).path)["virtual-size"] == 16 * MIB


def test_a_raw_base_that_looks_like_something_else_is_not_probed(disks, tmp_path: Path) -> None:
    path = tmp_path / "disguised"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "64M"], check=True)
    size = path.stat().st_size // 512 * 512
    os.truncate(path, size)
    image = Image(
        ImageId(f"sha256:{'0' * 64}"), ImageDigest(f"sha256:{'0' * 64}"), (), (), size, size, DiskFormat.RAW, 0
    )
    assert info(disks.create(ID, image, str(path), 0).path)["virtual-size"] == size


def test_a_missing_base_says_what_to_do(disks, base, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="pull the image again"):
        disks.create(ID, base[0], str(tmp_path / "gone"), 0)


def test_an_impossible_size_is_refused(disks, base) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        disks.create(ID, *base, 1 << 60)


def test_a_disk_that_qemu_img_cannot_make_is_not_left_half_made(layout, base) -> None:
    def fails(argv: list[str], **_: object) -> Finished:
        Path(argv[-2]).write_bytes(b"half")
        return Finished(1, b"", b"no luck")

    with pytest.raises(InternalError, match="cannot be created: no luck"):
        RootDiskStore(layout, run=fails).create(ID, *base, 0)
    assert not Path(layout.root_disk(ID)).exists()


def test_delete_takes_disk_and_sockets_and_may_be_repeated(disks, layout, base) -> None:
    disks.create(ID, *base, 0)
    disks.create(OTHER, *base, 0)
    Path(layout.container_dir(ID), "sub").mkdir()
    assert Path(layout.socket_dir(ID)).is_dir()
    Path(layout.agent_socket(ID)).write_text("")
    screen = Path(vnc_socket(layout, ID))
    screen.parent.mkdir(parents=True)
    screen.write_text("")
    for _ in range(2):
        disks.delete(ID)
        assert not Path(layout.container_dir(ID)).exists()
        assert not Path(layout.socket_dir(ID)).exists()
        assert not screen.parent.exists()
    assert disks.existing() == {OTHER}
    assert Path(base[1]).exists()


def test_delete_never_follows_a_link(disks, layout, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    Path(layout.container_dir(OTHER)).mkdir(parents=True)
    Path(layout.container_dir(OTHER), "link").symlink_to(precious)
    Path(layout.container_dir(ID)).symlink_to(precious)
    for container in (ID, OTHER):
        disks.delete(container)
        assert not os.path.lexists(layout.container_dir(container))
    assert (precious / "file").read_text() == "x"


def test_delete_tolerates_files_that_disappear_meanwhile(disks, layout) -> None:
    directory = Path(layout.container_dir(ID))
    directory.mkdir(parents=True)
    names = [directory / str(number) for number in range(500)]
    for name in names:
        name.write_text("")
    other = threading.Thread(target=lambda: [name.unlink(missing_ok=True) for name in reversed(names)])
    other.start()
    disks.delete(ID)
    other.join()
    assert not directory.exists()


def test_existing_lists_directories_with_ids_only(disks, layout, base) -> None:
    assert disks.existing() == frozenset()
    disks.create(ID, *base, 0)
    containers = Path(layout.containers)
    (containers / "notes").mkdir()
    (containers / OTHER.value).write_text("a file")
    assert disks.existing() == {ID}


def test_a_containers_disk_use_does_not_count_holes(disks: RootDiskStore, layout: Layout) -> None:
    assert disks.use(ID) is None
    directory = Path(layout.container_dir(ID))
    directory.mkdir(parents=True)
    empty = disks.use(ID)
    assert empty is not None
    with (directory / "root.qcow2").open("wb") as disk:
        disk.truncate(1 << 30)
        disk.write(bytes(1 << 20))
    written = disks.use(ID)
    assert written is not None
    assert 1 << 20 <= written.used_bytes - empty.used_bytes < 2 << 20
    assert written.inodes_used - empty.inodes_used == 1
    assert written.taken_at > empty.taken_at
    assert written.directory == layout.containers
    assert written.filesystem_bytes > written.used_bytes
    assert written.filesystem_inodes >= written.filesystem_inodes_free


# --- disks that stay for a pod's life

NAME = f"{'a' * 64}/{'b' * 64}"


def test_a_kept_disk_is_made_once_and_found_again(disks, base) -> None:
    assert disks.pod_disk(NAME) is None
    made = disks.create_pod_disk(NAME, *base, 32 * MIB)
    assert disks.pod_disk(NAME) == made
    assert info(made.path)["virtual-size"] == 32 * MIB
    with pytest.raises(InternalError):
        disks.create_pod_disk(NAME, *base, 32 * MIB)
    assert disks.pod_disk(NAME) == made
    assert disks.pods_with_disks() == {"a" * 64}
    assert [path.name for path in Path(made.path).parent.iterdir()] == [Path(made.path).name]


def test_a_containers_disk_use_includes_its_kept_disk(disks, base) -> None:
    disks.make_directory(ID)
    disk = disks.create_pod_disk(NAME, *base, 0)
    with open(disk.path, "ab") as file:
        file.write(bytes(range(256)) * 4096)
    own, all_of_it = disks.use(ID), disks.use(ID, NAME)
    assert all_of_it.used_bytes - own.used_bytes == os.stat(disk.path).st_blocks * 512 > 1 << 20
    assert all_of_it.inodes_used == own.inodes_used + 1
    assert disks.use(ID, f"{'c' * 64}/{'d' * 64}").used_bytes == own.used_bytes, "one that has just been removed"


def test_a_half_made_disk_is_never_taken_for_a_complete_one(disks, layout, base) -> None:
    def dies(argv: list[str], **limits: float) -> Finished:
        run(argv, **limits)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RootDiskStore(layout, run=dies).create_pod_disk(NAME, *base, 0)
    assert disks.pod_disk(NAME) is None
    assert disks.pods_with_disks() == {"a" * 64}
    assert disks.pod_disk(NAME) != disks.create_pod_disk(NAME, *base, 0)


def test_the_disks_of_a_pod_are_deleted_together_and_repeating_is_no_error(disks, base) -> None:
    for container in "cd":
        disks.create_pod_disk(f"{'a' * 64}/{container * 64}", *base, 0)
    disks.create_pod_disk(f"{'f' * 64}/{'c' * 64}", *base, 0)
    for _ in range(2):
        disks.delete_pod_disks("a" * 64)
    assert disks.pods_with_disks() == {"f" * 64}


def test_deleting_a_container_deletes_no_kept_disk_of_its_pod(disks, base) -> None:
    disks.create_pod_disk(NAME, *base, 0)
    disks.create(ID, *base, 0)
    disks.delete(ID)
    assert disks.pod_disk(NAME) is not None


def test_a_container_on_a_disk_of_its_pod_has_the_same_directories_as_any(disks, layout, base) -> None:
    disks.create(ID, *base, 0)
    disks.make_directory(OTHER)
    for place in (layout.container_dir, layout.socket_dir):
        assert Path(place(OTHER)).stat().st_mode == Path(place(ID)).stat().st_mode
