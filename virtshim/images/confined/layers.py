"""The child's part of a pull from a registry: it reads compressed layers and writes the disk and the other files, all as frames.
It opens no file."""

from __future__ import annotations

import hashlib
import lzma
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import cast

from zlib_ng import zlib_ng

from virtshim.images.confined import frames
from virtshim.images.confined.contents import BootSearch, DiskSearch, ImageTree
from virtshim.images.confined.frames import ALWAYS, RATIO
from virtshim.images.confined.layer_tar import BadTar, TarStream
from virtshim.model.errors import InvalidRequest

# Unpacking a layer, within limits. Pure.

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
# Frames that a decoder skips. estargz and zstd:chunked keep their tables of contents in them.
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
_LONGEST_MAGIC = 6
_PIECE = 1 << 20
_XZ_MEMORY = 256 << 20

_BROKEN = (lzma.LZMAError, zstd.ZstdError)
# The stub hides that it is a class.
_BAD_GZIP = cast("type[Exception]", zlib_ng.error)


class Inflation:
    """Packed and unpacked bytes of all layers of an image so far."""

    __slots__ = ("packed", "plain")

    def __init__(self) -> None:
        self.packed = self.plain = 0

    def is_too_much(self) -> bool:
        return self.plain > ALWAYS and self.plain > RATIO * self.packed


def unpacked(chunks: Iterator[bytes], what: str, inflation: Inflation) -> Iterator[bytes]:
    """The unpacked bytes of a layer that is plain, gzip, xz or zstd. The first bytes decide which, as in other runtimes. Raises
    InvalidRequest for a damaged layer, or one that unpacks to far more than real images do."""
    for piece in _unpacked(_counted(chunks, inflation), what):
        inflation.plain += len(piece)
        if inflation.is_too_much():
            raise InvalidRequest(
                f"{what} and the layers above it unpack to more than {RATIO} times their size and {ALWAYS >> 30} GiB; "
                "push the disk as qcow2"
            )
        yield piece


def _counted(chunks: Iterator[bytes], inflation: Inflation) -> Iterator[bytes]:
    for chunk in chunks:
        inflation.packed += len(chunk)
        yield chunk


def _unpacked(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= _LONGEST_MAGIC:
            break
    if head.startswith(_GZIP):
        yield from _gunzip(head, chunks, what)
    elif head.startswith(_XZ):
        yield from _decoded(head, chunks, _xz_decoder, f"{what} is damaged: its xz data")
    elif head.startswith(_ZSTD) or (head[1:4] == _ZSTD_SKIPPED and head[0] & 0xF0 == 0x50):
        yield from _decoded(head, chunks, zstd.ZstdDecompressor, f"{what} is damaged: its zstd data")
    else:
        if head:
            yield head
        yield from chunks


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)


def _decoded(
    head: bytes, chunks: Iterator[bytes], make: Callable[[], lzma.LZMADecompressor | zstd.ZstdDecompressor], data: str
) -> Iterator[bytes]:
    """Unpacks one or more streams, with at most one piece of output in memory."""
    rest: bytes = head
    while rest:
        decoder = make()
        while not decoder.eof:
            try:
                piece = decoder.decompress(rest, _PIECE)
            except _BROKEN as exc:
                raise InvalidRequest(f"{data} cannot be unpacked ({exc}); push the image again") from exc
            rest = b""
            if piece:
                yield piece
            elif decoder.needs_input and not decoder.eof:
                rest = next(chunks, b"")
                if not rest:
                    raise InvalidRequest(f"{data} is cut short; push the image again")
        rest = _padding_left(decoder.unused_data, chunks)


def _padding_left(rest: bytes, chunks: Iterator[bytes]) -> bytes:
    """Skips the zeros that xz and gzip(1) allow after a stream. Returns what was read after them, b"" at the end."""
    while not (rest := rest.lstrip(b"\0")):
        if not (rest := next(chunks, b"")):
            break
    return rest


def limited(chunks: Iterator[bytes], limit: int, what: str) -> Iterator[bytes]:
    """Raises InvalidRequest after more than `limit` bytes, because a small layer may unpack to endless data."""
    seen = 0
    for chunk in chunks:
        seen += len(chunk)
        if seen > limit:
            raise InvalidRequest(f"{what} unpacks to more than {limit} bytes, this node's limit (images.max_bytes)")
        yield chunk


def _gunzip(head: bytes, chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    """Unpacks one or more gzip members, with at most one piece of output in memory."""
    rest: bytes = head
    while rest:
        rest = _padding_left((yield from _gunzip_member(rest, chunks, what)), chunks)


def _gunzip_member(data: bytes, chunks: Iterator[bytes], what: str) -> Generator[bytes, None, bytes]:
    """Yields the content of one member. Returns what was read after it."""
    inflater = zlib_ng.decompressobj(wbits=zlib_ng.MAX_WBITS | 16)
    while True:
        try:
            piece = inflater.decompress(data, _PIECE)
        except _BAD_GZIP as exc:
            raise InvalidRequest(f"{what} is damaged: its gzip data cannot be unpacked; push the image again") from exc
        if piece:
            yield piece
        if inflater.eof:
            return inflater.unused_data
        data = inflater.unconsumed_tail
        # After a full piece the inflater may hold more output, even if it has used all input.
        if not data and len(piece) < _PIECE:
            data = next(chunks, b"")
            if not data:
                raise InvalidRequest(f"{what} is damaged: its gzip data is cut short; push the image again")


_BATCHED_KINDS = (frames.ENTRY, frames.PIECE)
_BATCHED_PAYLOAD, _BATCH_BYTES = 16 << 10, 64 << 10


def serve(source: int, target: int) -> None:
    """Reads frames from `source` and answers on `target` until DONE or REFUSED is written. Raises EOFError if virtshim stops
    sending, OSError if it stops reading."""
    frame_source, answers = _Source(source), _Answers(target)
    image, max_bytes, place = frames.parse_words(frame_source.expect(frames.BEGIN))
    try:
        search, inflation = DiskSearch(image, place), Inflation()
        boot = BootSearch(image, frames.BOOT_PLACE if place else "")
        tree = ImageTree(answers.send)
        while (layer := frame_source.layer()) is not None:
            what, digest, diff, kind = frames.parse_words(layer)
            chunks = limited(unpacked(frame_source.data(), what, inflation), int(max_bytes), what)
            if diff != digest:
                chunks = verified(chunks, diff, what)
            if kind == frames.WHOLE:
                search.found_as(what)
                for _ in _sent(chunks, answers):
                    pass
            else:
                _send_files(TarStream(chunks), what, search, boot, tree, answers)
            search.layer_done()
            boot.layer_done()
            tree.layer_done()
            answers.send(frames.END)
        tree.finish()
        if boot.is_empty and not _has_disk(search, tree, place):  # a kernel needs no disk
            answers.send(frames.NO_DISK)
        answers.send(frames.DONE)
    except InvalidRequest as exc:
        answers.send(frames.REFUSED, str(exc).encode(errors="replace"))
    except MemoryError:
        answers.send(
            frames.REFUSED, f"image {image!r} cannot be unpacked in the memory allowed for it; push it again".encode()
        )


def _send_files(
    tar: TarStream, what: str, search: DiskSearch, boot: BootSearch, tree: ImageTree, answers: _Answers
) -> None:
    """Reads one layer to its end. Sends the disk and the kernels, if it has them, and all files for the tree."""
    try:
        while (entry := tar.next()) is not None:
            path = boot.shown(entry)
            is_disk = search.is_disk(entry)
            data = tar.data()
            if not is_disk and boot.takes(path, entry):
                answers.send(frames.FILE, frames.words(path, str(entry.size)))
                data = _sent(data, answers)
            tree.take(entry, data, is_disk=is_disk)
            if is_disk:
                answers.send(frames.SIZE, str(entry.size).encode())
                data = _sent(data, answers)
            for _ in data:  # skip what the tree did not read
                pass
    except BadTar as exc:
        raise InvalidRequest(f"{what} cannot be read: {exc}; push the image again") from exc


def _has_disk(search: DiskSearch, tree: ImageTree, place: str) -> bool:
    """Raises InvalidRequest for an image that can be neither a VM nor a volume, and for one without a disk at a path that the
    operator configured."""
    try:
        search.finish()
    except InvalidRequest as exc:
        if tree.refused:
            raise InvalidRequest(f"{exc}; it cannot be a volume either: {tree.refused}") from exc
        if not tree.has_files or place not in ("", frames.DEFAULT_PLACE):
            raise
        return False
    return True


def _sent(chunks: Iterator[bytes], answers: _Answers) -> Iterator[bytes]:
    """Sends `chunks` as DATA and passes them on."""
    for piece in chunks:
        answers.send(frames.DATA, piece)
        yield piece


def verified(chunks: Iterator[bytes], diff: str, what: str) -> Iterator[bytes]:
    """Passes `chunks` on. At the end, raises InvalidRequest unless their digest is `diff`."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
        yield chunk
    if f"sha256:{sha256.hexdigest()}" != diff:
        raise InvalidRequest(
            f"{what} has the digest sha256:{sha256.hexdigest()}, expected {diff}; push the image again"
        )


class _Source:
    """Frames from virtshim. Raises EOFError if virtshim stops sending."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "rb", buffering=frames.MOST, closefd=False)  # noqa: SIM115

    def expect(self, kind: bytes) -> bytes:
        found, payload = self._frame()
        if found != kind:
            raise ValueError(f"frame {found!r} where {kind!r} is expected")
        return payload

    def layer(self) -> bytes | None:
        """The next layer's description; None after the last layer."""
        kind, payload = self._frame()
        return payload if kind == frames.LAYER else None

    def data(self) -> Iterator[bytes]:
        """The layer's bytes."""
        while True:
            kind, payload = self._frame()
            if kind != frames.DATA:
                return
            yield payload

    def _frame(self) -> tuple[bytes, bytes]:
        kind, length = frames.parse_head(self._exactly(frames.HEAD_BYTES))
        return kind, self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) != length:
            raise EOFError("virtshim stopped sending")
        return data


class _Answers:
    """Frames to virtshim. Frames of small files are written together."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._held = bytearray()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        if kind in _BATCHED_KINDS and len(payload) < _BATCHED_PAYLOAD:
            self._held += frames.head(kind, len(payload))
            self._held += payload
            if len(self._held) >= _BATCH_BYTES:
                self._write([self._held])
                self._held.clear()
            return
        self._write([self._held, frames.head(kind, len(payload)), payload])
        self._held.clear()

    def _write(self, parts: list[bytes | bytearray]) -> None:
        rest = [memoryview(bytes(part)) for part in parts]
        while any(rest):
            written = os.writev(self._fd, rest)
            for at, view in enumerate(rest):
                taken = min(written, len(view))
                rest[at] = view[taken:]
                written -= taken
