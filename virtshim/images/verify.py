"""Whether qemu-img's findings about a downloaded file agree with its header's verdict. Pure.

Both come from a child that may have been taken over by the file (`virtshim.images.confined.program`): the verdict is written
before qemu-img has seen the file, and either of the two refuses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

from virtshim.images.confined.frames import CANNOT_CONFINE
from virtshim.images.confinement import MOST_OUTPUT, Account, Bounds, Parser, command
from virtshim.model.errors import InternalError, InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.model.text import printable_text
from virtshim.system.process import Finished, run

# What `judged_before` wants to see.
FIRST_BYTES = 32

_QCOW_MAGIC = b"QFI\xfb"
_CONVERT = "convert it with qemu-img convert -O qcow2"


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """What `qemu-img info` says. `virtual_size` is in bytes."""

    format: str
    virtual_size: int
    has_backing: bool
    has_data_file: bool
    encrypted: bool
    corrupt: bool


def judged_before(first: bytes, size: int) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of a disk that was judged when it was pulled, by its first bytes and its size."""
    if not first.startswith(_QCOW_MAGIC):
        return DiskFormat.RAW, size
    if len(first) < FIRST_BYTES:
        raise InternalError("a stored disk has lost its header; remove its image and pull it again")
    return DiskFormat.QCOW2, int.from_bytes(first[24:32], "big")


def judge_info(info: DiskInfo, found: DiskFormat, max_bytes: int, image: str) -> None:
    """Raises InvalidRequest unless qemu-img agrees with the header's verdict, and the guest's disk is not too large."""
    if info.format != found.value:
        raise _unusable(
            image,
            f"is taken for {printable_text(info.format[:40])} by qemu-img though it begins like {found.value}",
            _CONVERT,
        )
    if info.has_backing:
        raise _has_backing(image)
    if info.has_data_file:
        raise _has_data_file(image)
    if info.encrypted:
        raise _unusable(image, "is encrypted", "publish it unencrypted")
    if info.corrupt:
        raise _is_corrupt(image)
    if not 0 < info.virtual_size <= max_bytes:
        raise _unusable(
            image,
            f"gives the guest a disk of {info.virtual_size} bytes; allowed are 1 to {max_bytes}",
            "use a smaller one or raise images.max_bytes",
        )


def parse_info(output: bytes) -> DiskInfo:
    """The JSON of `qemu-img info`. Raises InternalError if it is not that."""
    try:
        document = json.loads(output)
        specific = _mapping(_mapping(document.get("format-specific")).get("data"))
        return DiskInfo(
            format=str(document["format"]),
            virtual_size=int(document["virtual-size"]),
            has_backing=any(key in document for key in ("backing-filename", "full-backing-filename", "backing-image")),
            has_data_file="data-file" in specific,
            encrypted=bool(document.get("encrypted")) or "encrypt" in specific,
            corrupt=bool(specific.get("corrupt")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise InternalError(
            "qemu-img info answers with something that is not its JSON; check the qemu-img installed"
        ) from exc


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_backing(image: str) -> InvalidRequest:
    return _unusable(image, "has a backing file, which would be read from this host", _CONVERT)


def _has_data_file(image: str) -> InvalidRequest:
    return _unusable(image, "keeps its data in another file, which would be read from this host", _CONVERT)


def _is_corrupt(image: str) -> InvalidRequest:
    return _unusable(image, "is marked corrupt", "repair it with qemu-img check -r all and publish it again")


def _unusable(image: str, why: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"image {image!r} {why}; {remedy}")


# Lets a child judge a downloaded file: first by its header, then as qemu-img, which must agree. And copy one that was
# judged.

# Reading a header takes milliseconds and a few megabytes; what takes more was made to.
BOUNDS = Bounds(memory=1 << 30, cpu_seconds=20)
# The slowest device gets the largest image in that time; kubelet's repeated calls join the first meanwhile.
_COPY_BOUNDS = Bounds(memory=4 << 30, cpu_seconds=6 * 3600)
_COPY_TIMEOUT = 6 * 3600.0
_ROOT = Account("root", 0, 0)
# How the child names the file.
_PATH = re.compile(r"/proc/self/fd/\d+")


def verify(
    path: str, image: str, max_bytes: int, parser: Parser, cancelled: threading.Event | None = None
) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of the file at `path`, which the parser's user must be allowed to read; `image` names it in
    error texts. Raises InvalidRequest if it may not become a disk or cannot be read within its limits, InternalError if somebody
    killed the child: the image is not to blame for that."""
    done = _judged(path, parser, cancelled)
    verdict, _, findings = done.stdout.partition(b"\n")
    found = _verdict(verdict, image) if verdict else None
    if done.returncode != 0:
        raise _failure(done, image)
    if found is None:
        raise InternalError(f"image {image!r}: its judge ended without a verdict; pull it again")
    info = parse_info(findings)
    judge_info(info, found, max_bytes, image)
    return found, info.virtual_size


def qemu_img_copy_to_device(path: str, kind: DiskFormat, device: int, at: int) -> None:
    """The disk in the file at `path`, an image's that was verified, is behind the first `at` bytes of the block device, open as
    `device`. Raises ShimError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        done = run(
            command(kind.value, _ROOT, _COPY_BOUNDS, descriptor, device, at),
            name="qemu-img convert",
            timeout=_COPY_TIMEOUT,
            pass_fds=(descriptor, device),
            output_limit=MOST_OUTPUT,
        )
    finally:
        os.close(descriptor)
    if done.returncode != 0:
        raise InternalError(f"the image cannot be copied by qemu-img: {_PATH.sub('it', done.summary())}")


def _judged(path: str, parser: Parser, cancelled: threading.Event | None) -> Finished:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return parser.judge(descriptor, BOUNDS, cancelled)
    finally:
        os.close(descriptor)


def _verdict(line: bytes, image: str) -> DiskFormat:
    """Raises InvalidRequest if the header is refused."""
    kind, _, told = line.decode(errors="replace").partition(" ")
    if kind == "unusable":
        raise InvalidRequest(f"image {image!r} {printable_text(told)}")
    try:
        return DiskFormat(told)
    except ValueError as exc:
        raise InternalError(f"image {image!r}: its judge says nothing that is known; pull it again") from exc


def _failure(done: Finished, image: str) -> InternalError | InvalidRequest:
    if done.returncode == CANNOT_CONFINE:
        return InternalError(f"image {image!r} is not read: {done.summary()}")
    if done.returncode == -signal.SIGKILL:
        return InternalError(f"image {image!r}: qemu-img was killed by signal 9 (no memory left?); pull it again")
    if done.returncode == -signal.SIGXCPU:
        return InvalidRequest(
            f"image {image!r} cannot be read by qemu-img in {BOUNDS.cpu_seconds} s of processor time, the limit; "
            "convert it with qemu-img convert -O qcow2"
        )
    words = _PATH.sub("it", done.summary())
    if done.returncode < 0:
        words += f"; it may use {BOUNDS.memory >> 20} MiB of memory"
    return InvalidRequest(f"image {image!r} cannot be read by qemu-img: {words}; repair it or publish it again")
