"""Hostile and mistaken files do not become disks, and the refusal says what to do."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.images.confined.header import Unusable, judge_bytes
from virtshim.images.confinement import ConfinedChild, account
from virtshim.images.verify import FIRST_BYTES, DiskInfo, judge_info, judged_before, parse_info, verify
from virtshim.model.errors import InternalError, InvalidRequest, ShimError
from virtshim.model.image import DiskFormat

LIMIT = 1 << 40
PARSER = ConfinedChild(account())


def seen_by_qemu_img(path: Path) -> DiskInfo:
    """Its findings alone: neither line of defence leans on the other."""
    return parse_info(
        subprocess.run(["qemu-img", "info", "--output=json", path], check=True, capture_output=True).stdout
    )


def refused(path: Path, why: str) -> None:
    """By the whole check."""
    with pytest.raises(InvalidRequest, match=why) as caught:
        verify(str(path), "host/img:1", LIMIT, PARSER)
    assert "'host/img:1'" in str(caught.value)


@pytest.mark.parametrize("options", [("-o", "compat=0.10"), ("-o", "compat=1.1"), ("-o", "cluster_size=2M")])
def test_a_sound_qcow2_is_accepted(tmp_path: Path, qemu_img: Callable[..., None], options: tuple[str, ...]) -> None:
    disk = tmp_path / "disk"
    qemu_img("create", "-f", "qcow2", *options, str(disk), "10M")
    assert verify(str(disk), "x", LIMIT, PARSER) == (DiskFormat.QCOW2, 10 << 20)


def test_a_sound_raw_disk_is_accepted(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(510) + b"\x55\xaa" + bytes(512))
    assert verify(str(disk), "x", LIMIT, PARSER) == (DiskFormat.RAW, 1024)


@pytest.mark.parametrize(
    "options", [("-b", "/etc/passwd", "-F", "raw", "-u"), ("-b", "nbd://host/x", "-F", "raw", "-u")]
)
def test_a_backing_file_is_refused(tmp_path: Path, qemu_img: Callable[..., None], options: tuple[str, ...]) -> None:
    disk = tmp_path / "disk"
    qemu_img("create", "-f", "qcow2", *options, str(disk), "1M")
    refused(disk, "backing file.*qemu-img convert")


def test_qemu_img_finds_a_backing_file_too(tmp_path: Path, qemu_img: Callable[..., None]) -> None:
    disk = tmp_path / "disk"
    qemu_img("create", "-f", "raw", str(tmp_path / "base"), "1M")
    qemu_img("create", "-f", "qcow2", "-b", str(tmp_path / "base"), "-F", "raw", str(disk))
    assert seen_by_qemu_img(disk).has_backing


def test_a_data_file_is_refused_before_qemu_img_could_open_it(tmp_path: Path, qemu_img: Callable[..., None]) -> None:
    disk, data = tmp_path / "disk", tmp_path / "data"
    qemu_img("create", "-f", "qcow2", "-o", f"data_file={data}", str(disk), "1M")
    assert seen_by_qemu_img(disk).has_data_file
    refused(disk, "keeps its data in another file")
    data.unlink()
    refused(disk, "keeps its data in another file")


def test_an_encrypted_disk_is_refused(tmp_path: Path, qemu_img: Callable[..., None]) -> None:
    disk = tmp_path / "disk"
    # The old AES scheme: LUKS in qcow2 sets the same header field, but takes seconds to make.
    options = ("--object", "secret,id=s,data=x", "-o", "encrypt.format=aes,encrypt.key-secret=s")
    qemu_img("create", "-f", "qcow2", *options, str(disk), "1M")
    assert seen_by_qemu_img(disk).encrypted
    refused(disk, "encrypted")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("vmdk", "VMDK"),
        ("vdi", "VDI"),
        ("vpc", "VHD"),
        ("vhdx", "VHDX"),
        ("qed", "QED"),
        ("qcow", "QCOW version 1"),
        ("parallels", "Parallels"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, qemu_img: Callable[..., None], kind: str, why: str) -> None:
    disk = tmp_path / "disk"
    qemu_img("create", "-f", kind, str(disk), "8M")
    refused(disk, f"{why}.*qemu-img convert")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"x" * 511, "512-byte sectors"),
        (b"QFI\xfb" + bytes(508), "QCOW version 0"),
        (b"QFI\xfb" + struct.pack(">I", 2) + bytes(504), "qemu-img"),
        (b"QFI\xfb\0\0\0\3", "cut short"),
        (b"QFI\xfb" + b"\xff" * 508, "QCOW version"),
        (b"KDMV" + bytes(508), "VMDK"),
        (b"COWD" + bytes(508), "VMDK"),
        (b"LUKS\xba\xbe\0\1" + bytes(504), "LUKS.*unencrypted"),
        (b"# Disk DescriptorFile\nversion=1\n".ljust(512), "VMDK"),
        (b"#anything\nversion=1\n".ljust(512, b"\n"), "VMDK"),
        (b"version=1\n".ljust(512, b"\n"), "VMDK"),
        (b"  \n#x\nversion=1\n".ljust(512, b"\n"), "a text"),
        (bytes(512) + b"conectix" + bytes(504), "VHD"),
        (bytes(512) + b"koly" + bytes(508), "DMG"),
        (b"<!DOCTYPE html>".ljust(512), "web page.*check that the URL"),
        (b"\x1f\x8b" + bytes(510), "gzip.*unpack it"),
        (b"\xfd7zXZ\0" + bytes(506), "xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(508), "zstd"),
        (b"BZh9" + bytes(508), "bzip2"),
        (b"PK\3\4" + bytes(508), "ZIP"),
        (bytes(257) + b"ustar" + bytes(250), "tar archive"),
    ],
)
def test_files_that_are_no_disks_are_refused(tmp_path: Path, data: bytes, why: str) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(data)
    refused(disk, why)


def test_a_huge_disk_is_refused(tmp_path: Path, qemu_img: Callable[..., None]) -> None:
    disk = tmp_path / "disk"
    qemu_img("create", "-f", "qcow2", str(disk), "3T")
    with pytest.raises(InvalidRequest, match=r"3298534883328 bytes.*images\.max_bytes"):
        verify(str(disk), "x", 2 << 40, PARSER)


def test_a_corrupt_mark_is_refused(tmp_path: Path, qcow2: bytes) -> None:
    disk = tmp_path / "disk"
    marked = bytearray(qcow2)
    marked[79] |= 2
    disk.write_bytes(marked)
    refused(disk, "marked corrupt; repair it")


def test_a_damaged_qcow2_is_refused_with_qemu_imgs_message_without_the_path(tmp_path: Path, qcow2: bytes) -> None:
    disk = tmp_path / "disk"
    damaged = bytearray(qcow2)
    damaged[20:24] = b"\xff\xff\xff\xff"
    disk.write_bytes(damaged)
    with pytest.raises(InvalidRequest, match=r"cannot be read by qemu-img: .*luster") as caught:
        verify(str(disk), "x", LIMIT, PARSER)
    assert str(tmp_path) not in str(caught.value)


def test_the_format_of_a_checked_disk_is_known_by_its_first_bytes(
    tmp_path: Path, qemu_img: Callable[..., None]
) -> None:
    disk = tmp_path / "disk"
    qemu_img("create", "-f", "qcow2", str(disk), "10M")
    assert judged_before(disk.read_bytes()[:FIRST_BYTES], 1) == (DiskFormat.QCOW2, 10 << 20)
    assert judged_before(bytes(FIRST_BYTES), 1024) == (DiskFormat.RAW, 1024)
    with pytest.raises(InternalError, match="pull it again"):
        judged_before(disk.read_bytes()[:20], 20)


SOUND = DiskInfo("qcow2", 512, has_backing=False, has_data_file=False, encrypted=False, corrupt=False)


@pytest.mark.parametrize(
    "info",
    [
        DiskInfo("vmdk", 512, has_backing=False, has_data_file=False, encrypted=False, corrupt=False),
        DiskInfo("raw", 512, has_backing=False, has_data_file=False, encrypted=False, corrupt=False),
        DiskInfo("qcow2", 0, has_backing=False, has_data_file=False, encrypted=False, corrupt=False),
        DiskInfo("qcow2", LIMIT + 1, has_backing=False, has_data_file=False, encrypted=False, corrupt=False),
        DiskInfo("qcow2", 512, has_backing=True, has_data_file=False, encrypted=False, corrupt=False),
        DiskInfo("qcow2", 512, has_backing=False, has_data_file=True, encrypted=False, corrupt=False),
        DiskInfo("qcow2", 512, has_backing=False, has_data_file=False, encrypted=True, corrupt=False),
        DiskInfo("qcow2", 512, has_backing=False, has_data_file=False, encrypted=False, corrupt=True),
    ],
)
def test_qemu_imgs_check_is_a_second_line_of_defence(info: DiskInfo) -> None:
    judge_info(SOUND, DiskFormat.QCOW2, LIMIT, "x")
    with pytest.raises(InvalidRequest):
        judge_info(info, DiskFormat.QCOW2, LIMIT, "x")


@pytest.mark.parametrize("output", [b"", b"[]", b"{}", b"null", b'{"format": "raw", "virtual-size": "x"}', b"\xff"])
def test_an_unexpected_answer_of_qemu_img_is_an_internal_error(output: bytes) -> None:
    with pytest.raises(InternalError):
        parse_info(output)


@given(st.binary(max_size=600), st.binary(max_size=512), st.integers(0, 1 << 50))
def test_any_bytes_are_judged(head: bytes, tail: bytes, size: int) -> None:
    for begin in (b"", b"QFI\xfb"):
        with contextlib.suppress(Unusable):
            judge_bytes(begin + head, tail, size)


def test_a_cancelled_check_ends(tmp_path: Path, qcow2: bytes) -> None:
    disk, cancelled = tmp_path / "disk", threading.Event()
    disk.write_bytes(qcow2)
    cancelled.set()
    with pytest.raises(ShimError, match="gave up"):
        verify(str(disk), "x", LIMIT, PARSER, cancelled)
