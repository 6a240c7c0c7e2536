"""The fake and the real store with qemu-img fulfil the contract of EmptyDiskFiles."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from fakes.disks import FakeEmptyDisks, FakeRootDisks

from virtshim.disks.container_files import EmptyDiskStore
from virtshim.disks.ports import EmptyDiskFiles, RootDisks
from virtshim.disks.root_disks import RootDiskStore
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.layout import Layout
from virtshim.volumes.empty_disks import parse

pytestmark = pytest.mark.volumes

A = ContainerId("a" * 64)
MIB = 1 << 20
WANTED = parse("a: {size: 32Mi}\nb: {size: 16Mi, format: raw}")


def real(directory: Path) -> tuple[RootDiskStore, EmptyDiskStore]:
    layout = Layout(str(directory), str(directory / "run"))
    disks = RootDiskStore(layout)
    disks.make_directory(A)
    return disks, EmptyDiskStore(layout)


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_an_empty_disk_has_its_name_as_serial_and_is_deleted_with_the_root_disk(kind: str, tmp_path: Path) -> None:
    disks: RootDisks = (fake := FakeRootDisks())
    empty: EmptyDiskFiles = FakeEmptyDisks(fake)
    if kind == "real":
        disks, empty = real(tmp_path)
    disks.make_directory(A)
    made = [empty.create(A, disk) for disk in WANTED]
    assert [(disk.format, disk.serial) for disk in made] == [(DiskFormat.QCOW2, "a"), (DiskFormat.RAW, "b")]
    disks.delete(A, disk_alone=True)
    assert not [disk for disk in made if os.path.exists(disk.path)]
    assert fake.directories.get(A, set()) == set()
    assert A in disks.existing()


def test_an_empty_disk_has_the_size_asked_for_is_sparse_and_can_be_recreated(tmp_path: Path) -> None:
    _, empty = real(tmp_path)
    for wanted in WANTED:
        path = Path(empty.create(A, wanted).path)
        argv = ["qemu-img", "info", "--output=json", "-f", wanted.format.value, str(path)]
        found = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
        assert found["virtual-size"] == wanted.size_bytes
        assert found["actual-size"] < MIB
        path.write_bytes(b"an earlier call's")
        empty.create(A, wanted)
        assert path.read_bytes()[:2] != b"an"
