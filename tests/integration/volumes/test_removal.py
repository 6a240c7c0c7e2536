"""Removal stops at mounts of other file systems, and at bind mounts of the same file system, which have its device
number."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.shares.daemons import Place, ShareDaemons
from virtshim.cli.node_dir import remove_part
from virtshim.disks.root_disks import RootDiskStore
from virtshim.model.errors import InternalError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.files import remove_tree

pytestmark = [
    pytest.mark.volumes,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount"),
]
ID = ContainerId("ab" * 32)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume on the file system of everything else here."""
    directory = tmp_path / "volume"
    directory.mkdir()
    (directory / "precious").write_text("data")
    return directory


@pytest.fixture(params=["bind of a directory", "bind of a file", "another file system"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path, volume: Path) -> Iterator[Path]:
    """The mounts below the directory `tree`."""
    place = tmp_path / "tree" / "deep" / "mounted"
    place.parent.mkdir(parents=True)
    if request.param == "bind of a file":
        place.touch()
        words = ["--bind", volume / "precious", place]
    else:
        place.mkdir()
        words = ["--bind", volume, place] if "bind" in request.param else ["-t", "tmpfs", "virtshim-test", place]
    subprocess.run(["mount", *words], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_removal_stops_at_mounts(tmp_path: Path, volume: Path, mounted: Path) -> None:
    if mounted.is_dir():
        (mounted / "more").write_text("data")
    with pytest.raises(OSError, match=r"(?i)mount point|busy"):
        remove_tree(str(tmp_path), "tree")
    assert (volume / "precious").read_text() == "data"
    assert not mounted.is_dir() or (mounted / "more").exists()


def test_without_mounts_below_it_a_whole_tree_is_removed_even_on_its_own_mount(tmp_path: Path) -> None:
    tree = tmp_path / "own" / "tree"
    tree.parent.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "virtshim-test", tree.parent], check=True)
    try:
        (tree / "deep").mkdir(parents=True)
        (tree / "deep" / "file").touch()
        remove_tree(str(tree.parent), "tree")
        assert os.listdir(tree.parent) == []
    finally:
        subprocess.run(["umount", tree.parent], check=True)


@pytest.fixture
def bound(tmp_path: Path, volume: Path) -> Iterator[Path]:
    """A bind mount of the volume at the directory that the test makes."""
    place = tmp_path / "place"
    yield place
    if place.is_symlink():
        subprocess.run(["umount", place.resolve()], check=True)


def bind(volume: Path, place: Path, at: Path) -> None:
    at.mkdir(parents=True)
    subprocess.run(["mount", "--bind", volume, at], check=True)
    place.symlink_to(at)


def test_a_container_is_not_removed_with_a_volume_in_its_directory(tmp_path: Path, volume: Path, bound: Path) -> None:
    layout = Layout(f"{tmp_path}/state", f"{tmp_path}/run")
    bind(volume, bound, Path(layout.container_dir(ID), "mounted"))
    with pytest.raises(InternalError, match="mounted is a mount point; unmount it"):
        RootDiskStore(layout).delete(ID)
    assert (volume / "precious").exists()


def test_down_leaves_a_mounted_volume_below_its_directory_alone(tmp_path: Path, volume: Path, bound: Path) -> None:
    bind(volume, bound, tmp_path / "node" / "kubelet")
    with pytest.raises(WrongState, match="kubelet is a mount point; unmount it"):
        remove_part(f"{tmp_path}/node")
    assert (volume / "precious").exists()


def test_a_share_is_not_removed_while_a_volume_is_mounted_in_it(tmp_path: Path, volume: Path, bound: Path) -> None:
    place = Place(f"{tmp_path}/shares/0123456789abcdef0123")
    bind(volume, bound, Path(place.root))
    with pytest.raises(OSError, match=r"(?i)busy"):
        ShareDaemons(VmCgroups(hierarchies())).end(place, until=time.monotonic() + 60)
    assert (volume / "precious").exists()
