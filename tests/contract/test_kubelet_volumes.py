"""The fake and the real reader on disk fulfil the contract of KubeletVolumes."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from fakes.kubelet_volumes import FakeKubeletVolumes
from fakes.kubelet_writer import WrittenVolume

from virtshim.model.errors import InternalError, InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.volumes.copies import MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, CopiedVolume, Entry, EntryKind
from virtshim.volumes.kubelet_volumes import KubeletVolumeFiles
from virtshim.volumes.memory_volumes import Tmpfs
from virtshim.volumes.ports import KubeletVolumes

pytestmark = pytest.mark.volumes

UID = "0f3a"
SECONDS = 60.0


EMPTY_DIR = f"/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/cache"
TMPFS = Tmpfs(1 << 20, 0o2777, 0, 1234)


class Node:
    """One volume of one pod."""

    volumes: KubeletVolumes
    path: str

    def write(self, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    def put(self, content: bytes) -> str:
        """Writes a file of the pod; returns its path."""
        raise NotImplementedError

    def empty_dir(self, *, tmpfs: bool, filled: bool = False) -> str:
        """Creates an emptyDir owned by a group; returns its path. The one in memory has 1 MiB."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops watching the volumes."""


class InMemory(Node):
    def __init__(self, directory: Path) -> None:
        self.path = f"{directory}/pods/{UID}/volumes/kubernetes.io~secret/s"
        self.volumes = self._fake = FakeKubeletVolumes()
        self._fake.parts.add(f"{directory}/pods/{UID}/volume-subpaths/s/vm/0")
        self._versions = iter("123456789")

    def write(self, files: Mapping[str, bytes]) -> None:
        self._fake.write(self.path, files, next(self._versions))

    def put(self, content: bytes) -> str:
        self._fake.put(f"{self.path}-hosts", content)
        return f"{self.path}-hosts"

    def empty_dir(self, *, tmpfs: bool, filled: bool = False) -> str:
        if tmpfs:
            self._fake.tmpfs[EMPTY_DIR] = TMPFS
        if filled:
            self._fake.filled.add(EMPTY_DIR)
        return EMPTY_DIR


class OnDisk(Node):
    def __init__(self, directory: Path) -> None:
        self._written = WrittenVolume(directory, UID, "secret", "s")
        self.path = str(self._written.path)
        self.volumes = self._files = KubeletVolumeFiles()
        self._mounted: list[Path] = []

    def write(self, files: Mapping[str, bytes]) -> None:
        self._written.write(files)

    def put(self, content: bytes) -> str:
        path = Path(self.path).parents[2] / "etc-hosts"
        path.write_bytes(content)
        return str(path)

    def empty_dir(self, *, tmpfs: bool, filled: bool = False) -> str:
        made = Path(self.path).parents[1] / "kubernetes.io~empty-dir" / "cache"
        made.mkdir(parents=True)
        if tmpfs:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", made], check=True)
            self._mounted.append(made)
        os.chown(made, 0, TMPFS.gid)
        made.chmod(TMPFS.mode)
        if filled:
            (made / "of-an-init-container").touch()
        return str(made)

    def close(self) -> None:
        self._files.close()
        for made in self._mounted:
            subprocess.run(["umount", made], check=True)


@pytest.fixture(params=[InMemory, OnDisk])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made: Node = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def files() -> Iterator[KubeletVolumeFiles]:
    made = KubeletVolumeFiles()
    yield made
    made.close()


def seen(entries: tuple[Entry, ...]) -> dict[str, bytes]:
    """The file as a container sees it, through `..data`."""
    by_path = {entry.path: entry for entry in entries}
    data = by_path["..data"].target
    return {
        entry.path: by_path[f"{data}/{entry.path}"].content
        for entry in entries
        if entry.kind is EntryKind.LINK and entry.path != "..data"
    }


def test_a_volume_is_read_with_its_links_unchanged(node: Node) -> None:
    node.write({"a": b"1", "b": b"2"})
    entries = node.volumes.read(CopiedVolume("/s", node.path))
    assert seen(entries) == {"a": b"1", "b": b"2"}
    assert {entry.path: entry.target for entry in entries if entry.path == "a"} == {"a": "..data/a"}
    assert {entry.mode for entry in entries if entry.path == ""} == {0o1777}
    node.write({"a": b"3"})
    assert seen(node.volumes.read(CopiedVolume("/s", node.path))) == {"a": b"3"}


def test_a_missing_volume_is_reported(node: Node) -> None:
    with pytest.raises(NotFound, match=r"the volume at .*/none does not exist"):
        node.volumes.read(CopiedVolume("/s", f"{node.path}/none"))


def test_a_new_volume_is_reported_once_and_then_each_change(node: Node) -> None:
    node.write({"a": b"1"})
    assert set(node.volumes.changed({node.path}, SECONDS)) == {node.path}
    while node.volumes.changed({node.path}, 0.0):
        pass
    node.write({"a": b"2"})
    assert set(node.volumes.changed({node.path}, SECONDS)) == {node.path}
    assert not node.volumes.changed(set(), 0.0)
    assert set(node.volumes.changed({node.path}, SECONDS)) == {node.path}


def test_a_file_that_kubelet_rewrites_in_place_is_reported_when_it_changes(node: Node) -> None:
    path = node.put(b"1")
    assert set(node.volumes.changed({path}, SECONDS)) == {path}
    while node.volumes.changed({path}, 0.0):
        pass
    node.put(b"2")
    assert set(node.volumes.changed({path}, SECONDS)) == {path}
    assert [one.content for one in node.volumes.read(CopiedVolume("/etc/hosts", path, written=True))] == [b"2"]


def test_a_subpath_is_recognised_by_its_volume(node: Node, tmp_path: Path) -> None:
    node.write({"a": b"1"})
    assert node.volumes.is_part(f"{tmp_path}/pods/{UID}/volume-subpaths/s/vm/0", UID)
    assert not node.volumes.is_part(f"{tmp_path}/pods/{UID}/volume-subpaths/claim/vm/0", UID)


# --- what is only on disk


def test_kubelet_has_a_pod_as_long_as_its_log_directory_is_there(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    logs = tmp_path / "default_web_uid"
    logs.mkdir()
    assert files.has_pod(str(logs))
    logs.rmdir()
    assert not files.has_pod(str(logs))
    assert not files.has_pod("")


def test_modes_owners_and_directories_are_read(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    volume = WrittenVolume(tmp_path, UID, "configmap", "c")
    volume.write({"deep/er/a": b"1"}, mode=0o440, group=2000 if os.geteuid() == 0 else -1)
    (found,) = [one for one in files.read(CopiedVolume("/c", str(volume.path))) if one.kind is EntryKind.FILE]
    assert found.path.endswith("/deep/er/a")
    assert (found.mode, found.gid) == (0o440, 2000 if os.geteuid() == 0 else os.getegid())


def test_a_single_file_is_a_volume_too(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (found,) = files.read(CopiedVolume("/a", f"{tmp_path}/a"))
    assert (found.path, found.content) == ("", b"1")


def test_a_link_out_of_the_volume_is_copied_and_not_followed(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "out").symlink_to("/etc/shadow")
    (tmp_path / "v" / "..data").symlink_to("/etc")
    found = files.read(CopiedVolume("/v", f"{tmp_path}/v"))
    assert {one.path: one.target for one in found if one.path} == {"out": "/etc/shadow", "..data": "/etc"}
    with pytest.raises(InvalidRequest, match="a link"):
        files.read(CopiedVolume("/v", f"{tmp_path}/v/out"))


def test_a_pods_directory_that_is_a_link_is_not_followed(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "pods" / UID).mkdir(parents=True)
    (tmp_path / "pods" / UID / "volumes").symlink_to(tmp_path)
    with pytest.raises(InternalError, match="Not a directory"):
        files.read(CopiedVolume("/v", f"{tmp_path}/pods/{UID}/volumes/secret"))


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device"])
def test_a_special_file_is_refused_by_path_without_blocking(
    files: KubeletVolumeFiles, tmp_path: Path, kind: str
) -> None:
    odd = tmp_path / "v" / "new\nline"
    odd.parent.mkdir()
    if kind == "a FIFO":
        os.mkfifo(odd)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(odd))
    elif os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can make a device")
    else:
        os.mknod(odd, 0o020600, os.makedev(1, 3))
    with pytest.raises(InvalidRequest, match=rf"config.mounts\[/v\]\.host_path: .*/v/new\\nline is {kind}.*remove it"):
        files.read(CopiedVolume("/v", f"{tmp_path}/v"))


def _one_large_file(volume: Path) -> None:
    with (volume / "a").open("wb") as file:
        file.truncate(1 << 40)


def _too_much_in_two(volume: Path) -> None:
    for name in "ab":
        (volume / name).write_bytes(bytes(MAX_BYTES // 2 + 1))


def _many(volume: Path) -> None:
    for number in range(MAX_ENTRIES + 1):
        (volume / str(number)).symlink_to("x")


def _deep(volume: Path) -> None:
    volume.joinpath(*"d" * (MAX_DEPTH + 1)).mkdir(parents=True)


@pytest.mark.parametrize(
    ("fill", "what"),
    [
        (_one_large_file, f"{MAX_BYTES} bytes"),
        (_too_much_in_two, f"{MAX_BYTES} bytes"),
        (_many, f"{MAX_ENTRIES} files"),
        (_deep, f"{MAX_DEPTH} levels"),
    ],
)
def test_a_volume_beyond_its_limits_is_refused(
    files: KubeletVolumeFiles, tmp_path: Path, fill: Callable[[Path], None], what: str
) -> None:
    fill(tmp_path)
    with pytest.raises(InvalidRequest, match=rf"config.mounts\[/v\]: the volume has more than {what}"):
        files.read(CopiedVolume("/v", str(tmp_path)))


def test_a_volume_at_its_limits_is_read(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(MAX_BYTES))
    assert len(files.read(CopiedVolume("/v", str(tmp_path)))) == 2


def test_a_read_while_kubelet_swaps_the_volume_sees_one_version(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    """A read may fail because the volume changes all the time, but it never returns half of each version."""
    volume = WrittenVolume(tmp_path, UID, "configmap", "c")
    names = [f"{number:02}" for number in range(20)]
    volume.write(dict.fromkeys(names, b"0"))
    over = threading.Event()

    def swap() -> None:
        for number in range(1, 100):
            volume.write(dict.fromkeys(names, str(number).encode()))
        over.set()

    writer = threading.Thread(target=swap)
    writer.start()
    reads = 0
    try:
        while not over.is_set() or not reads:
            try:
                found = files.read(CopiedVolume("/c", str(volume.path)))
            except Unavailable:
                continue
            reads += 1
            assert len({one.content for one in found if one.kind is EntryKind.FILE}) == 1
            assert len(seen(found)) == len(names)
    finally:
        writer.join()


def test_a_removed_volume_is_looked_for_again(files: KubeletVolumeFiles, tmp_path: Path) -> None:
    """A missing volume cannot be watched, so it is reported now and then."""
    host = f"{tmp_path}/late"
    assert set(files.changed({host}, SECONDS)) == {host}
    assert set(files.changed({host}, SECONDS)) == {host}


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount")
def test_an_empty_dir_in_memory_is_recognised_with_size_mode_and_group(node: Node) -> None:
    assert node.volumes.empty_tmpfs(node.empty_dir(tmpfs=True)) == TMPFS


def test_an_empty_dir_of_another_medium_is_refused(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="does not have medium: Memory"):
        node.volumes.empty_tmpfs(node.empty_dir(tmpfs=False))


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount")
def test_an_empty_dir_in_memory_with_files_is_refused(node: Node) -> None:
    with pytest.raises(WrongState, match=r"already has files \(from an init container\?\)"):
        node.volumes.empty_tmpfs(node.empty_dir(tmpfs=True, filled=True))
