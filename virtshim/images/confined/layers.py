"""The child's side of a pull from a registry: compressed layers in, the disk out. It opens no file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from virtshim.domain.errors import InvalidRequest
from virtshim.images.confined import frames
from virtshim.images.confined.container_disk import BootSearch, DiskSearch
from virtshim.images.confined.layer_tar import BadTar, TarStream
from virtshim.images.confined.unpacking import Inflation, limited, unpacked


def serve(source: int, target: int) -> None:
    """Reads frames from one descriptor, writes its own to the other, until DONE or REFUSED was written. Raises OSError if the
    other end is gone."""
    frame_source, answers = _Source(source), _Answers(target)
    image, max_bytes, place = frames.parse_words(frame_source.expect(frames.BEGIN))
    try:
        search, boot, inflation = DiskSearch(image, place), BootSearch(image), Inflation()
        while (layer := frame_source.layer()) is not None:
            what, digest, diff, kind = frames.parse_words(layer)
            chunks = limited(unpacked(frame_source.data(), what, inflation), int(max_bytes), what)
            if diff != digest:
                chunks = verified(chunks, diff, what)
            if kind == frames.WHOLE:
                search.found_as(what)
                _send_all(chunks, answers)
            else:
                _send_found(TarStream(chunks), what, search, boot, answers)
            search.layer_done()
            boot.layer_done()
            answers.send(frames.END)
        if boot.is_empty:  # a kernel needs no disk
            search.finish()
        answers.send(frames.DONE)
    except InvalidRequest as exc:
        answers.send(frames.REFUSED, str(exc).encode(errors="replace"))
    except MemoryError:
        answers.send(
            frames.REFUSED, f"image {image!r} cannot be unpacked in the memory allowed for it; push it again".encode()
        )


def _send_found(tar: TarStream, what: str, search: DiskSearch, boot: BootSearch, answers: _Answers) -> None:
    """The disk and the kernels that are in this layer, which is read to its end."""
    try:
        while (entry := tar.next()) is not None:
            path = boot.shown(entry)
            if search.is_disk(entry):
                answers.send(frames.SIZE, str(entry.size).encode())
                _send_all(tar.data(), answers)
            elif boot.takes(path, entry):
                answers.send(frames.FILE, frames.words(path, str(entry.size)))
                _send_all(tar.data(), answers)
    except BadTar as exc:
        raise InvalidRequest(f"{what} cannot be read: {exc}; push the image again") from exc


def _send_all(chunks: Iterator[bytes], answers: _Answers) -> None:
    for piece in chunks:
        answers.send(frames.DATA, piece)


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
    """Frames to virtshim."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        rest = [memoryview(frames.head(kind, len(payload))), memoryview(payload)]
        while any(rest):
            written = os.writev(self._fd, rest)
            for at, view in enumerate(rest):
                taken = min(written, len(view))
                rest[at] = view[taken:]
                written -= taken
