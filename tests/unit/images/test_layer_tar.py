"""Whatever the bytes, the tar reader only gives entries or raises BadTar, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import tarfile
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.images.confined.layer_tar import BadTar, EntryKind, TarEntry, TarStream
from virtshim.images.confined.layers import Inflation, unpacked
from virtshim.model.errors import InvalidRequest


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def entries(data: bytes, size: int = 700) -> list[tuple[TarEntry, bytes]]:
    stream, found = TarStream(pieces(data, size)), []
    while (entry := stream.next()) is not None:
        found.append((entry, b"".join(stream.data())))
    return found


def archive(*members: tuple[str, bytes], kind: int = tarfile.PAX_FORMAT, **pax: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind, pax_headers=pax) as writer:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            writer.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


_NAMES = st.text(st.characters(blacklist_characters="\0/", blacklist_categories=["Cs"]), min_size=1, max_size=120)


@given(
    st.lists(st.tuples(_NAMES, st.binary(max_size=1500)), max_size=5),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.integers(1, 2000),
)
def test_archives_of_pythons_tarfile_are_read_back(members: list[tuple[str, bytes]], kind: int, size: int) -> None:
    read = entries(archive(*members, kind=kind), size)
    assert [(entry.name, data) for entry, data in read] == members
    assert all(entry.kind is EntryKind.FILE and entry.size == len(data) for entry, data in read)


@given(st.binary(max_size=3000), st.integers(1, 1000))
def test_any_bytes_give_entries_or_bad_tar(data: bytes, size: int) -> None:
    with contextlib.suppress(BadTar):
        entries(data, size)


@given(st.data())
def test_a_flipped_byte_gives_entries_or_bad_tar(data: st.DataObject) -> None:
    sound = bytearray(archive(("a/" + "b" * 150, b"x" * 700), ("c", b"y"), comment="z" * 300))
    sound[data.draw(st.integers(0, len(sound) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadTar):
        entries(bytes(sound))


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[124 : 124 + len(size)] = size
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (header(b"x", b"77777777777"), "cut short"),
        (header(b"x", b"\x80" + b"\xff" * 11), "cut short"),
        (header(b"x", b"\xff" * 12), "number"),
        (header(b"x", b"-0000000001"), "number"),
        (header(b"x", b"99999999999"), "number"),
        (header(b"x", b"0")[:300], "cut short"),
        (header(b"x", b"77777777777", b"x"), "more than 1 MiB"),
        (header(b"x", b"77777777777", b"L"), "more than 1 MiB"),
        (header(b"x", b"77777777777", b"g"), "more than 1 MiB"),
        (header(b"x", b"0", b"S"), "sparse"),
        (b"x" * 512, "not a tar|number"),
        (header(b"p", b"24", b"x") + b"20 GNU.sparse.major=1\n".ljust(512, b"\0"), "pax|sparse"),
        (header(b"p", b"26", b"x") + b"22 GNU.sparse.major=1\n".ljust(512, b"\0") + header(b"x", b"0"), "sparse"),
        (header(b"p", b"24", b"x") + b"999999999 path=abc\n".ljust(512, b"\0"), "pax"),
        (header(b"p", b"24", b"x") + b"0 path=abc\n".ljust(512, b"\0"), "pax"),
        (header(b"p", b"13", b"x") + b"11 size=-1\n".ljust(512, b"\0"), "pax"),
    ],
)
def test_hostile_headers_are_bad(data: bytes, why: str) -> None:
    with pytest.raises(BadTar, match=why):
        entries(data + bytes(1024) if "cut" not in why else data)


def test_endless_extensions_end_with_the_stream() -> None:
    forever = itertools.repeat(header(b"x", b"0", b"x"), 5000)
    stream = TarStream(itertools.chain(forever, [b"\1"]))
    with pytest.raises(BadTar, match="cut short"):
        stream.next()


def test_a_links_size_is_no_data() -> None:
    data = header(b"l", b"1000", b"1") + header(b"x", b"1") + b"y".ljust(512, b"\0") + bytes(1024)
    assert [(entry.name, content) for entry, content in entries(data)] == [("l", b""), ("x", b"y")]


@given(st.binary(max_size=5000), st.integers(1, 600), st.integers(0, 9))
def test_gzip_in_any_pieces_is_unpacked(data: bytes, size: int, level: int) -> None:
    packer = zlib.compressobj(level, wbits=31)
    packed = packer.compress(data) + packer.flush()
    assert b"".join(unpacked(pieces(packed, size), "x", Inflation())) == data


def test_a_gzip_bomb_comes_in_small_pieces() -> None:
    packer = zlib.compressobj(9, wbits=31)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    sizes = [len(piece) for piece in unpacked(iter([packed]), "x", Inflation())]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 1 << 20


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_unpack_or_are_refused(data: bytes, size: int) -> None:
    for begin in (b"", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"):
        try:
            assert begin or b"".join(unpacked(pieces(data, size), "x", Inflation())) == data
            b"".join(unpacked(pieces(begin + data, size), "x", Inflation()))
        except InvalidRequest:
            pass
