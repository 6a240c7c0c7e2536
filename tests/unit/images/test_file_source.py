"""Files of the node can be images."""

import gzip
import hashlib
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from virtshim.images.filestore import ImageFileStore
from virtshim.images.names import FileLocation, resolve
from virtshim.images.policy import Rule
from virtshim.images.ports import SentDisk
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, NotFound, PermissionRefused, ResourceExhausted
from virtshim.model.image_name import ImageName

NEVER = threading.Event()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "vms"
    (directory / "below").mkdir(parents=True)
    return directory


@pytest.fixture
def files(make_store: Callable[..., ImageFileStore], directory: Path) -> ImageFileStore:
    return make_store(file_dirs=(str(directory),))


def pull(store: ImageFileStore, path: Path, digest: str = "") -> Any:
    return store.fetch(f"file://{path}{digest}", None, NEVER)


def digest_of(data: bytes) -> str:
    return f"@sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_file_below_a_listed_directory_is_an_image(files: ImageFileStore, directory: Path, qcow2: bytes) -> None:
    disk = directory / "below" / "disk.qcow2"
    disk.write_bytes(qcow2)
    found = pull(files, disk)
    assert Path(files.path(found.digest)).read_bytes() == qcow2
    assert (found.tag, found.virtual_size) == (f"file://{disk}:latest", 16 << 20)
    disk.unlink()
    assert Path(files.path(found.digest)).read_bytes() == qcow2


def test_a_file_is_copied_again_only_after_it_has_changed(
    files: ImageFileStore, directory: Path, qcow2: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = directory / "disk.qcow2"
    disk.write_bytes(qcow2)
    first = pull(files, disk)
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", lambda *_: pytest.fail("it is read again"))
        assert pull(files, disk).digest == first.digest
    disk.write_bytes(qcow2 + bytes(512))
    assert pull(files, disk).digest != first.digest


def test_a_packed_file_is_unpacked(files: ImageFileStore, directory: Path, qcow2: bytes) -> None:
    packed = gzip.compress(qcow2)
    disk = directory / "disk.qcow2.gz"
    disk.write_bytes(packed)
    assert Path(files.path(pull(files, disk, digest_of(packed)).digest)).read_bytes() == qcow2


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstd.compress])
def test_a_packed_disk_that_is_sent_is_unpacked(
    store: ImageFileStore, qcow2: bytes, pack: Callable[[bytes], bytes]
) -> None:
    packed = pack(qcow2)
    found = store.load(f"vm{digest_of(packed)}", SentDisk(len(packed), iter((packed[:50], packed[50:]))), NEVER)
    assert Path(store.path(found.digest)).read_bytes() == qcow2


@pytest.mark.parametrize("name", ["disk.qcow2", "disk.qcow2.gz"])
def test_a_digest_must_match_even_for_a_known_file(
    files: ImageFileStore, directory: Path, qcow2: bytes, name: str
) -> None:
    disk = directory / name
    disk.write_bytes(gzip.compress(qcow2) if name.endswith(".gz") else qcow2)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="has the digest sha256:"):
            pull(files, disk, digest_of(b"other"))
        pull(files, disk)


def test_a_translation_may_name_a_file(
    make_store: Callable[..., ImageFileStore], directory: Path, tmp_path: Path, qcow2: bytes
) -> None:
    (directory / "disk.qcow2").write_bytes(qcow2)
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "a.yaml").write_text(f"translations: [{{name: mine, url: 'file://{directory}/disk.qcow2'}}]\n")
    store = make_store(file_dirs=(str(directory),), translations_dir=str(rules))
    assert store.fetch("virtlet.cloud/mine", None, NEVER).tag == "virtlet.cloud/mine:latest"


def test_without_listed_directories_no_file_is_an_image(store: ImageFileStore, directory: Path, qcow2: bytes) -> None:
    (directory / "disk.qcow2").write_bytes(qcow2)
    with pytest.raises(PermissionRefused, match=r"images\.file_dirs.*virtshim load FILE NAME"):
        pull(store, directory / "disk.qcow2")


def test_a_directory_that_only_begins_like_a_listed_one_is_not_listed(
    files: ImageFileStore, directory: Path, qcow2: bytes
) -> None:
    other = Path(f"{directory}-of-others")
    other.mkdir()
    (other / "disk.qcow2").write_bytes(qcow2)
    with pytest.raises(PermissionRefused, match=r"images\.file_dirs"):
        pull(files, other / "disk.qcow2")


def test_no_link_leads_out_of_a_listed_directory(
    files: ImageFileStore, directory: Path, tmp_path: Path, qcow2: bytes
) -> None:
    (tmp_path / "secret.qcow2").write_bytes(qcow2)
    (directory / "link.qcow2").symlink_to(tmp_path / "secret.qcow2")
    (directory / "out").symlink_to(tmp_path)
    for path in (directory / "link.qcow2", directory / "out" / "secret.qcow2"):
        with pytest.raises(InvalidRequest, match="symbolic link"):
            pull(files, path)


@pytest.mark.parametrize(
    "path", ["file://x/a.img", "file:///a/../b.img", "file:///a//b.img", "file:///a/./b.img", "file://"]
)
def test_a_path_is_written_as_it_is(path: str) -> None:
    with pytest.raises(InvalidRequest, match="malformed image reference"):
        ImageName.parse(path)


def test_a_file_that_is_not_regular_is_refused_without_blocking(files: ImageFileStore, directory: Path) -> None:
    os.mkfifo(directory / "pipe.img")
    for path in (directory / "pipe.img", directory / "below"):
        with pytest.raises(InvalidRequest, match="not a regular file"):
            pull(files, path)
    with pytest.raises(NotFound, match="does not exist on this node"):
        pull(files, directory / "gone.img")


def test_a_pull_of_a_file_can_be_cancelled(files: ImageFileStore, directory: Path, qcow2: bytes) -> None:
    (directory / "disk.qcow2").write_bytes(qcow2)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(DeadlineExceeded):
        files.fetch(f"file://{directory}/disk.qcow2", None, given_up)
    assert files.stored() == frozenset()


def test_a_file_without_space_for_the_copy_is_refused(
    files: ImageFileStore, directory: Path, qcow2: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "disk.qcow2").write_bytes(qcow2)
    monkeypatch.setattr("virtshim.images.disk_writer.free_bytes", lambda _: 10)
    with pytest.raises(ResourceExhausted, match="does not fit"):
        pull(files, directory / "disk.qcow2")


def test_image_policies_apply_to_files_too(make_store: Callable[..., ImageFileStore], directory: Path) -> None:
    store = make_store(file_dirs=(str(directory),), policy=(Rule(f"file:{directory}", "refuse"),))
    with pytest.raises(PermissionRefused, match="is not allowed on this node"):
        pull(store, directory / "disk.qcow2")


def test_the_origin_of_a_file_is_its_path() -> None:
    found = resolve(ImageName.parse("file:///var/lib/vms/a.img.xz"), [], "https")
    assert isinstance(found, FileLocation)
    assert (found.path, found.is_packed) == ("/var/lib/vms/a.img.xz", True)


def test_a_sparse_file_stays_sparse(files: ImageFileStore, directory: Path) -> None:
    disk = directory / "disk.img"
    with disk.open("wb") as file:
        file.write(b"\xeb\x3c" + bytes(510))
        file.truncate(64 << 20)
    found = pull(files, disk)
    assert Path(files.path(found.digest)).stat().st_blocks * 512 < 1 << 20
