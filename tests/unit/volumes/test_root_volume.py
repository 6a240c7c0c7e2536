"""The first sector of a root volume decides whether the image is copied to it."""

from __future__ import annotations

import struct

import pytest

from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.hardware import Places
from virtshim.model.ids import ContainerId, ImageDigest, ImageId
from virtshim.model.image import DiskFormat, Image
from virtshim.volumes.root_volume import (
    HEAD_BYTES,
    Content,
    RootVolume,
    copying,
    header,
    must_be_written,
    parse,
    with_places,
)

pytestmark = pytest.mark.volumes

MIB = 1 << 20
OURS = ContainerId("0123456789abcdef" * 4)
OLD, NEW = (ImageDigest(f"sha256:{digit * 64}") for digit in "12")


def image(digest: ImageDigest = NEW, size: int = 8 * MIB) -> Image:
    return Image(ImageId(digest.value), digest, (), (), 1, size, DiskFormat.QCOW2, 0)


def virtlets(digest: ImageDigest, version: int = 1, rest: bytes = b"what was there before") -> bytes:
    """As Virtlet writes it, over the beginning of a sector."""
    return struct.pack(">QH32s", 0x263DBE52BA576702, version, bytes.fromhex(digest.hex)) + rest.ljust(470, b"!")


@pytest.mark.parametrize(
    ("head", "content"),
    [
        (bytes(HEAD_BYTES), Content.BLANK),
        (b"", Content.BLANK),
        (virtlets(OLD), Content.ROOT_DISK),
        (virtlets(OLD, version=2), Content.NEWER),
        (header(OLD, OURS), Content.ROOT_DISK),
        (copying(OURS), Content.HALF),
        (copying(OURS) + b"half an image" * 1000, Content.HALF),
        (b"XFSB".ljust(512, b"\0"), Content.OTHER),
        (bytes(1080) + b"\x53\xef" + bytes(512), Content.OTHER),  # ext4's first KiB is empty
        (bytes(512) + b"LABELONE".ljust(512, b"\0"), Content.OTHER),
    ],
)
def test_the_first_sector_says_what_is_on_a_volume(head: bytes, content: Content) -> None:
    assert parse(head, 64 * MIB).content is content


def test_virtlets_header_names_the_image_and_ours_also_the_disk() -> None:
    theirs, ours = parse(virtlets(OLD), 64 * MIB), parse(header(OLD, OURS), 64 * MIB)
    assert (theirs.image, theirs.identity) == (OLD, OLD.hex[:20])
    assert (ours.image, ours.identity) == (OLD, OURS.short)
    assert header(OLD, OURS)[:42] == virtlets(OLD)[:42]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("head", [virtlets(NEW), header(NEW, OURS)])
def test_a_root_disk_of_the_image_is_kept(head: bytes, replace: bool) -> None:
    assert not must_be_written(parse(head, MIB), image(), replace=replace)


@pytest.mark.parametrize("content", [Content.BLANK, Content.HALF])
def test_the_image_is_written_to_a_blank_or_half_written_volume(content: Content) -> None:
    assert must_be_written(RootVolume(content, 64 * MIB), image(), replace=False)


@pytest.mark.parametrize(
    ("head", "told"), [(header(OLD, OURS), f"{OLD}, but the pod asks for {NEW}"), (b"XFSB".ljust(512, b"\0"), "data")]
)
def test_existing_data_is_overwritten_only_if_the_pod_says_so(head: bytes, told: str) -> None:
    found = parse(head, 64 * MIB)
    with pytest.raises(WrongState, match=r"virtshim\.io/root-disk-on-image-change: replace") as refused:
        must_be_written(found, image(), replace=False)
    assert told in str(refused.value)
    assert must_be_written(found, image(), replace=True)


@pytest.mark.parametrize("replace", [False, True])
def test_a_volume_of_a_newer_version_is_never_overwritten(replace: bool) -> None:
    with pytest.raises(WrongState, match="version 2"):
        must_be_written(parse(virtlets(OLD, version=2), 64 * MIB), image(), replace=replace)


@pytest.mark.parametrize("content", [Content.BLANK, Content.HALF])
def test_the_error_for_a_volume_that_is_too_small_gives_the_required_size(content: Content) -> None:
    with pytest.raises(
        InvalidRequest, match=f"has {8 * MIB} bytes, but the image's disk needs {8 * MIB + 512}; use a larger"
    ):
        must_be_written(RootVolume(content, 8 * MIB), image(), replace=False)
    assert must_be_written(RootVolume(content, 8 * MIB + 512), image(), replace=False)


def test_the_sector_also_stores_the_device_places_of_the_guest() -> None:
    places = Places("pc-q35-7.2", {b"v123": 4})
    found = parse(with_places(header(OLD, OURS), places), 8 * MIB)
    assert (found.content, found.image, found.places) == (Content.ROOT_DISK, OLD, places)
    assert parse(header(OLD, OURS), 8 * MIB).places == Places()


def test_virtlets_sector_is_left_unchanged() -> None:
    assert with_places(virtlets(OLD).ljust(512), Places("pc-q35-7.2")) == virtlets(OLD).ljust(512)
