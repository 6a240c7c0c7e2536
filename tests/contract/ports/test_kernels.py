"""The store of images' kernels and the store of VMs' own copies fulfil one contract."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from fakes.disks import FakeKernelFiles
from fakes.images import FakeBootFiles

from virtshim.disks.container_files import KernelFileStore
from virtshim.disks.ports import KernelFiles
from virtshim.images.kernels import StoredBoot
from virtshim.images.ports import BootFiles
from virtshim.model.errors import InternalError, NotFound
from virtshim.model.ids import ImageDigest

CONTENTS = (b"one", b"two")
ONE, TWO = (ImageDigest(f"sha256:{hashlib.sha256(content).hexdigest()}") for content in CONTENTS)


@pytest.fixture(params=["fake", "real"])
def boot(request: pytest.FixtureRequest, tmp_path: Path) -> BootFiles:
    """Has both."""
    if request.param == "fake":
        fake = FakeBootFiles()
        fake.files |= {ONE, TWO}
        return fake
    store = StoredBoot(tmp_path / "boot")
    store.make_directory()
    for digest, content in zip((ONE, TWO), CONTENTS, strict=True):
        (tmp_path / "arrived").write_bytes(content)
        store.take(tmp_path / "arrived", digest)
    return store


def test_kernels_without_an_image_are_deleted_and_deleting_may_be_repeated(boot: BootFiles) -> None:
    assert boot.stored() == {ONE, TWO}
    assert boot.path(ONE) != boot.path(TWO)
    for _ in range(2):
        boot.keep_only(frozenset({TWO}))
        assert boot.stored() == {TWO}


@pytest.fixture(params=["fake", "real"])
def kernels(request: pytest.FixtureRequest) -> KernelFiles:
    return FakeKernelFiles() if request.param == "fake" else KernelFileStore()


def test_a_copy_may_be_made_again(kernels: KernelFiles, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"kernel")
    final = str(tmp_path / "kernel")
    assert not kernels.is_there(final)
    for _ in range(2):
        kernels.copy(str(tmp_path / "source"), final)
        assert kernels.is_there(final)


def test_only_root_can_read_a_copy_whatever_an_earlier_copy_left(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"kernel")
    (tmp_path / "kernel.new").write_bytes(b"half a one, and longer")
    KernelFileStore().copy(str(tmp_path / "source"), str(tmp_path / "kernel"))
    assert (tmp_path / "kernel").read_bytes() == b"kernel"
    assert (tmp_path / "kernel").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel", "source"]


def test_copying_a_kernel_of_a_removed_image_is_not_found_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="pull the image again"):
        KernelFileStore().copy(str(tmp_path / "gone"), str(tmp_path / "kernel"))
    (tmp_path / "source").write_bytes(b"kernel")
    with pytest.raises(InternalError, match="cannot be written"):
        KernelFileStore().copy(str(tmp_path / "source"), str(tmp_path / "nowhere" / "kernel"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
