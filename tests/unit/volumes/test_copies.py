"""Archives carry copies of volumes into the guest."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.model.errors import InvalidRequest
from virtshim.volumes.copies import (
    MAX_ALL_BYTES,
    CopiedVolume,
    Entry,
    EntryKind,
    archive,
    check_size,
    is_swapped,
    odd_file,
    packed,
    size_of,
    too_large,
)
from virtshim.volumes.mount_script import Copies, command, digests
from virtshim.volumes.shares import SharedVolume

TOP = Entry("", EntryKind.DIRECTORY, 0o1777, 0, 0)
FILE = Entry("a", EntryKind.FILE, 0o640, 7, 8, changed=9, content=b"text")
NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=200).filter(
    lambda name: name not in (".", "..")
)


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member for member in tar.getmembers()}


@given(NAMES, st.binary(max_size=2000), st.integers(0, 0o7777), st.integers(0, 1 << 21))
def test_an_archive_has_names_contents_modes_and_owners_as_they_are(
    name: str, content: bytes, mode: int, owner: int
) -> None:
    file = Entry(name, EntryKind.FILE, mode, owner, 3, content=content)
    link = Entry(f"{name}l", EntryKind.LINK, 0o777, 1, 2, target=name)
    data = archive([packed("c0", [TOP, file, link])])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = tar.getmember(f"c0/{name}".rstrip("/"))
        assert (found.mode, found.uid, found.gid, found.type) == (mode, owner, 3, tarfile.REGTYPE)
        read = tar.extractfile(found)
        assert read is not None
        assert read.read() == content
        assert tar.getmember(f"c0/{name}l").linkname == name


def test_each_volume_has_its_own_digest() -> None:
    first, second = packed("c0", [TOP, FILE]), packed("c1", [TOP])
    assert list(members(archive([first, second]))) == ["c0", "c0/a", "c0.digest", "c1", "c1.digest"]
    assert first.digest.encode() in archive([first])


@pytest.mark.parametrize(
    "other",
    [
        replace(FILE, content=b"texts"),
        replace(FILE, mode=0o600),
        replace(FILE, uid=1),
        replace(FILE, gid=1),
        replace(FILE, path="b"),
    ],
)
def test_a_digest_changes_with_every_difference_except_order(other: Entry) -> None:
    assert packed("c0", [TOP, FILE]).digest == packed("c0", [FILE, TOP]).digest
    assert packed("c0", [TOP, FILE]).digest != packed("c0", [TOP, other]).digest


def test_the_content_of_a_volume_is_in_no_log() -> None:
    assert "text" not in f"{FILE!r} {packed('c0', [FILE])!r}"


def test_the_copies_of_a_container_are_limited_by_the_guests_memory() -> None:
    assert size_of([TOP, FILE, replace(FILE, content=bytes(4097))]) == 4 * 4096
    check_size(MAX_ALL_BYTES)
    with pytest.raises(InvalidRequest, match=r"8388609 bytes.*mount fewer"):
        check_size(MAX_ALL_BYTES + 1)


def test_an_error_names_the_mount_and_cannot_break_a_line() -> None:
    volume = CopiedVolume("/a\nb", "/srv/c")
    assert "config.mounts[/a\\nb]" in str(too_large(volume, "1 byte"))
    assert "d\\ne is a FIFO" in str(odd_file(volume, "d\ne", "a FIFO"))


def test_only_kubelets_own_link_is_replaced_atomically() -> None:
    assert is_swapped("..2026_11_22_10_00_00.123456789")
    assert not [target for target in ("", "..", "../x", "..a/b", "..data\n", "/..x", "x") if is_swapped(target)]


def test_the_script_mounts_copies_and_shares_by_their_depth_and_says_where_copies_come_from() -> None:
    shared, copied = (
        [SharedVolume("/a/b", "/x")],
        [CopiedVolume("/a", "/y"), CopiedVolume("/a/b/c", "/z", readonly=False)],
    )
    assert command(shared, copied, Copies.SEED)[4:] == (
        *("seed", "1"),
        *("c0", "/a", "ro", "-"),
        *("0", "/a/b", "rw", "c0"),
        *("c1", "/a/b/c", "rw", "0"),
    )
    assert command(shared)[4:] == ("", "1", "0", "/a/b", "rw", "-")
    assert command([], copied)[4:6] == ("there", "")


def test_only_digests_are_read_from_the_scripts_output() -> None:
    digest = "a" * 64
    said = f"c0.digest {digest}\nc1.digest short\n../x.digest {digest}\nhello c2.digest {digest}\n".encode()
    assert digests(said) == {"c0": digest}
