"""Nobody can write to the files of a finished template, and none of them has a name."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from virtshim.model.errors import Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.templates.files import TemplateFileStore
from virtshim.templates.values import Template

TEMPLATE, CONTAINER = ContainerId("e" * 64), ContainerId("c" * 64)
SIZE = 1 << 20
HEAD = b"QFI\xfb".ljust(24, b"\0") + (1 << 30).to_bytes(8, "big")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(f"{tmp_path}/state", f"{tmp_path}/run")
    Path(made.container_dir(CONTAINER)).mkdir(parents=True)
    Path(made.root_disk(CONTAINER)).write_bytes(HEAD + b"of the container")
    return made


@pytest.fixture
def files(layout: Layout) -> TemplateFileStore:
    return TemplateFileStore(layout)


def made(files: TemplateFileStore, content: bytes = b"of a guest") -> Template:
    disk, _ = files.open_disk(CONTAINER)
    path = files.begin(TEMPLATE, disk)
    os.close(disk)
    with open(path, "ab") as file:
        file.write(b", used")
    memory, devices = files.memory(SIZE), files.devices()
    with mmap.mmap(memory, SIZE) as shared:
        shared[: len(content)] = content
    template = files.seal(TEMPLATE, memory, devices)
    files.remove(TEMPLATE)
    return template


def test_a_finished_template_has_no_names(files: TemplateFileStore, layout: Layout) -> None:
    template = made(files)
    assert os.listdir(layout.templates) == []
    assert os.listdir(layout.sockets) == []
    assert os.pread(template.disk, 1000, len(HEAD)) == b"of the container, used"
    assert template.bytes >= 4096


def test_nobody_can_write_to_the_memory_of_a_finished_template_not_even_root(files: TemplateFileStore) -> None:
    template = made(files)
    again = os.open(f"/proc/self/fd/{template.memory}", os.O_RDWR)
    for descriptor in (template.memory, again):
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"poison", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, SIZE)
        # Punching a hole would give all later guests zeros.
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(4096)) == -1
    with mmap.mmap(again, SIZE, mmap.MAP_PRIVATE) as own:
        own[:2] = b"is"
        assert own[:10] == b"is a guest"
    assert os.pread(template.memory, 10, 0) == b"of a guest"


def test_memory_that_somebody_may_still_write_to_is_no_template_yet(files: TemplateFileStore) -> None:
    disk, _ = files.open_disk(CONTAINER)
    files.begin(TEMPLATE, disk)
    memory, devices = files.memory(SIZE), files.devices()
    with mmap.mmap(memory, SIZE), pytest.raises(Unavailable):
        files.seal(TEMPLATE, memory, devices)
    files.seal(TEMPLATE, memory, devices)


def test_the_size_that_the_guest_sees_is_that_of_the_disks_header(files: TemplateFileStore) -> None:
    assert files.open_disk(CONTAINER)[1] == 1 << 30


def test_a_container_keeps_its_own_disk_until_the_copy_of_a_templates_is_for_good(
    files: TemplateFileStore, layout: Layout
) -> None:
    template = made(files)
    own = Path(layout.root_disk(CONTAINER))
    own.chmod(0o600)
    before = own.stat()
    assert not files.has_own_disk_aside(CONTAINER)
    files.put_disk(CONTAINER, template)
    assert files.has_own_disk_aside(CONTAINER)
    assert own.read_bytes() == HEAD + b"of the container, used"
    assert (own.stat().st_mode, own.stat().st_uid) == (before.st_mode, before.st_uid)
    assert files.take_back(CONTAINER)
    assert own.read_bytes() == HEAD + b"of the container"
    assert not files.take_back(CONTAINER)

    files.put_disk(CONTAINER, template)
    files.keep_disk(CONTAINER)
    assert not files.has_own_disk_aside(CONTAINER)
    assert os.listdir(own.parent) == [own.name]
    assert own.read_bytes() == HEAD + b"of the container, used"


def test_unfinished_files_of_a_killed_process_are_removed(files: TemplateFileStore, layout: Layout) -> None:
    disk, _ = files.open_disk(CONTAINER)
    files.begin(TEMPLATE, disk)
    assert os.listdir(layout.templates) == [TEMPLATE.value]
    TemplateFileStore(layout).remove_leftovers()
    assert os.listdir(layout.templates) == []
    assert os.listdir(layout.sockets) == []
