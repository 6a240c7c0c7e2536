"""virtshim reads what a qcow2's header says of other files, and trusts none of it."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.vm.disk_chains import HEAD_BYTES, BadHeader, Qcow2Header, move_images, parse

NONE = Qcow2Header(backing="", backing_format="", has_data_file=False, encrypted=False)


def created(path: Path, *options: str, size: str = "16M") -> bytes:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, path, size], check=True)
    return path.read_bytes()[:HEAD_BYTES]


@pytest.mark.parametrize("version", ["v2", "v3"])
@pytest.mark.parametrize("below", ["raw", "qcow2"])
def test_the_backing_file_is_read(tmp_path: Path, version: str, below: str) -> None:
    image = tmp_path / "image"
    subprocess.run(["qemu-img", "create", "-q", "-f", below, image, "16M"], check=True)
    head = created(tmp_path / "disk", "-o", f"compat={version}", "-F", below, "-b", str(image))
    assert parse(head) == Qcow2Header(str(image), below, has_data_file=False, encrypted=False)


@pytest.mark.parametrize("now", ["short", "a directory with a much longer name than before/" * 4])
def test_a_disk_of_another_node_names_the_image_of_this_node(tmp_path: Path, now: str) -> None:
    base, disk = tmp_path / "images" / "x", tmp_path / "disk"
    base.parent.mkdir()
    subprocess.run(["qemu-img", "create", "-q", "-f", "raw", base, "16M"], check=True)
    created(disk, "-F", "raw", "-b", str(base))
    there = (tmp_path / now).resolve()
    there.mkdir(parents=True)
    base.rename(there / "x")
    move_images(str(disk), str(base.parent), str(there))
    assert parse(disk.read_bytes()[:HEAD_BYTES]) == Qcow2Header(
        str(there / "x"), "raw", has_data_file=False, encrypted=False
    )
    subprocess.run(["qemu-img", "check", "-q", disk], check=True)
    subprocess.run(["qemu-img", "convert", "-q", "-O", "raw", disk, tmp_path / "whole"], check=True)


def test_a_header_that_names_another_file_stays_as_it_is(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    before = created(disk, "-u", "-F", "raw", "-b", "/etc/shadow")
    move_images(str(disk), "/var/lib/virtshim/images", "/elsewhere")
    assert disk.read_bytes()[:HEAD_BYTES] == before
    disk.write_bytes(b"no qcow2")
    move_images(str(disk), "/var/lib/virtshim/images", "/elsewhere")
    assert disk.read_bytes() == b"no qcow2"


@pytest.mark.parametrize("clusters", ["512", "65536", "2M"])
def test_an_image_without_a_backing_file_says_so(tmp_path: Path, clusters: str) -> None:
    assert parse(created(tmp_path / "disk", "-o", f"cluster_size={clusters}")) == NONE


def test_an_external_data_file_is_found_by_the_bit_and_by_the_name(tmp_path: Path) -> None:
    head = created(tmp_path / "disk", "-o", f"data_file={tmp_path}/data")
    assert parse(head).has_data_file
    (features,) = struct.unpack_from(">Q", head, 72)
    without_bit = head[:72] + struct.pack(">Q", features & ~4) + head[80:]
    assert parse(without_bit).has_data_file, "the name alone"
    bit_alone = bytearray(created(tmp_path / "other"))
    struct.pack_into(">Q", bit_alone, 72, 4)
    assert parse(bytes(bit_alone)).has_data_file


def test_encryption_is_found(tmp_path: Path) -> None:
    head = bytearray(created(tmp_path / "disk"))
    struct.pack_into(">I", head, 32, 2)
    assert parse(bytes(head)).encrypted


@pytest.mark.parametrize(
    ("at", "kind", "value", "why"),
    [
        (0, ">I", 0, "not a qcow2"),
        (4, ">I", 4, "version is 4"),
        (8, ">Q", 1 << 63, "outside"),
        (8, ">Q", HEAD_BYTES, "outside"),
        (16, ">I", 1024, "outside"),
        (16, ">I", 0, "outside"),
        (100, ">I", 8, "has 8 bytes"),
        (100, ">I", 0xFFFFFFFF, "no end"),
        (116, ">I", 0xFFFFFFFF, "beyond"),
    ],
)
def test_an_impossible_header_is_refused(tmp_path: Path, at: int, kind: str, value: int, why: str) -> None:
    (tmp_path / "image").touch()
    head = bytearray(created(tmp_path / "disk", "-F", "raw", "-b", f"{tmp_path}/image"))
    struct.pack_into(kind, head, at, value)
    with pytest.raises(BadHeader, match=why):
        parse(bytes(head))


def test_endless_header_extensions_are_not_followed() -> None:
    head = bytearray(HEAD_BYTES)
    struct.pack_into(">4sI", head, 0, b"QFI\xfb", 3)
    struct.pack_into(">I", head, 100, 104)
    for at in range(104, HEAD_BYTES - 8, 8):
        struct.pack_into(">II", head, at, 7, 0)
    with pytest.raises(BadHeader, match="too many"):
        parse(bytes(head))


@given(st.binary(max_size=300), st.integers(2, 3))
def test_any_bytes_are_read_or_refused(rest: bytes, version: int) -> None:
    for head in (rest, b"QFI\xfb" + struct.pack(">I", version) + rest):
        with contextlib.suppress(BadHeader):
            assert len(parse(head).backing) <= 4 * 1023
