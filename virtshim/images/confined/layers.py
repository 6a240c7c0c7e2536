"""The child's side of a pull from a registry: compressed layers in, the disk and the other files out. It opens no file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from virtshim.domain.errors import InvalidRequest
from virtshim.images.confined import frames
from virtshim.images.confined.container_disk import BootSearch, DiskSearch
from virtshim.images.confined.image_tree import ImageTree
from virtshim.images.confined.layer_tar import BadTar, TarStream
from virtshim.images.confined.unpacking import Inflation, limited, unpacked

_FILES = (frames.ENTRY, frames.PIECE)
_SMALL, _TOGETHER = 16 << 10, 64 << 10


def serve(source: int, target: int) -> None:
    """Reads frames from one descriptor, writes its own to the other, until DONE or REFUSED was written. Raises OSError if the
    other end is gone."""
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
    """The disk and the kernels, if they are in this layer, and all files for the tree. It is read to its end."""
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
            for _ in data:  # what the tree had no use for
                pass
    except BadTar as exc:
        raise InvalidRequest(f"{what} cannot be read: {exc}; push the image again") from exc


def _has_disk(search: DiskSearch, tree: ImageTree, place: str) -> bool:
    """Raises InvalidRequest for an image that can be neither a VM nor a volume, and for one of which the operator has said where
    its disk is."""
    try:
        search.finish()
    except InvalidRequest as exc:
        if tree.refused:
            raise InvalidRequest(f"{exc}; nor can it be a volume: {tree.refused}") from exc
        if not tree.has_files or place not in ("", frames.DEFAULT_PLACE):
            raise
        return False
    return True


def _sent(chunks: Iterator[bytes], answers: _Answers) -> Iterator[bytes]:
    """Passes `chunks` on, which are the disk's, or a kernel's."""
    for piece in chunks:
        answers.send(frames.DATA, piece)
        yield piece


def verified(chunks: Iterator[bytes], diff: str, what: str) -> Iterator[bytes]:
    """Passes `chunks` on; at their end, raises InvalidRequest unless they had this digest."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
        yield chunk
    if f"sha256:{sha256.hexdigest()}" != diff:
        raise InvalidRequest(
            f"{what} has the digest sha256:{sha256.hexdigest()}, expected {diff}; push the image again"
        )


class _Source:
    """Frames from virtshim. It ends the process when virtshim does not go on: nobody is there to be told."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "rb", buffering=frames.MOST, closefd=False)  # noqa: SIM115

    def expect(self, kind: bytes) -> bytes:
        found, payload = self._frame()
        if found != kind:
            raise ValueError(f"frame {found!r} where {kind!r} is expected")
        return payload

    def layer(self) -> bytes | None:
        """The next layer's description, None behind the last one."""
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
            os._exit(1)
        return data


class _Answers:
    """Frames to virtshim. Of many small files some go together."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._held = bytearray()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        if kind in _FILES and len(payload) < _SMALL:
            self._held += frames.head(kind, len(payload))
            self._held += payload
            if len(self._held) >= _TOGETHER:
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
