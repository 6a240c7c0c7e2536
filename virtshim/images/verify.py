"""Verifies a downloaded disk in a child, and copies verified disks to devices.

The child (`virtshim.images.confined.program`) judges the file's header, then runs qemu-img. A hostile file may take the child
over. So the child writes its verdict before qemu-img opens the file, and the file is refused unless both accept it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

from virtshim.images.confined.frames import CANNOT_CONFINE, QCOW_MAGIC
from virtshim.images.confinement import MOST_OUTPUT, Account, Bounds, Parser, command
from virtshim.model.errors import InternalError, InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.model.text import printable_text
from virtshim.system.process import Finished, run

# The first bytes of a disk that `judged_before` needs.
FIRST_BYTES = 32

_CONVERT = "convert it with qemu-img convert -O qcow2"


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """The result of `qemu-img info`. `virtual_size`: in bytes."""

    format: str
    virtual_size: int
    has_backing: bool
    has_data_file: bool
    encrypted: bool
    corrupt: bool


def judged_before(first: bytes, size: int) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of a disk that was verified when it was pulled. `first`: its first bytes. `size`: of the
    file."""
    if not first.startswith(QCOW_MAGIC):
        return DiskFormat.RAW, size
    if len(first) < FIRST_BYTES:
        raise InternalError("a stored disk has lost its header; remove its image and pull it again")
    return DiskFormat.QCOW2, int.from_bytes(first[24:32], "big")


def judge_info(info: DiskInfo, found: DiskFormat, max_bytes: int, image: str) -> None:
    """Raises InvalidRequest if qemu-img disagrees with the header's verdict, or the guest's disk is too large. Pure."""
    if info.format != found.value:
        raise _unusable(
            image,
            f"is {printable_text(info.format[:40])} according to qemu-img, but begins like {found.value}",
            _CONVERT,
        )
    if info.has_backing:
        raise _unusable(image, "has a backing file, which would be read from this host", _CONVERT)
    if info.has_data_file:
        raise _unusable(image, "keeps its data in another file, which would be read from this host", _CONVERT)
    if info.encrypted:
        raise _unusable(image, "is encrypted", "publish it unencrypted")
    if info.corrupt:
        raise _unusable(image, "is marked corrupt", "repair it with qemu-img check -r all and publish it again")
    if not 0 < info.virtual_size <= max_bytes:
        raise _unusable(
            image,
            f"has a disk of {info.virtual_size} bytes for the guest; allowed are 1 to {max_bytes}",
            "use a smaller one or raise images.max_bytes",
        )


def parse_info(output: bytes) -> DiskInfo:
    """Parses the JSON of `qemu-img info`. Raises InternalError if it is malformed."""
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
            "the output of qemu-img info is not the expected JSON; check the installed qemu-img"
        ) from exc


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unusable(image: str, why: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"image {image!r} {why}; {remedy}")


# Reading a header takes milliseconds and a few megabytes. A file that needs more is hostile.
BOUNDS = Bounds(memory=1 << 30, cpu_seconds=20)
# Enough for the largest image on the slowest device. kubelet's repeated calls join the first one.
_COPY_BOUNDS = Bounds(memory=4 << 30, cpu_seconds=6 * 3600)
_COPY_TIMEOUT = 6 * 3600.0
_ROOT = Account("root", 0, 0)
# The child's name of the file.
_PATH = re.compile(r"/proc/self/fd/\d+")


def verify(
    path: str, image: str, max_bytes: int, parser: Parser, cancelled: threading.Event | None = None
) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of the file at `path`, which the parser's user must be allowed to read. `image`: for error
    texts. Raises InvalidRequest if the file may not become a disk or cannot be read within the limits, InternalError if the
    child was killed, which is not the image's fault."""
    done = _judged(path, parser, cancelled)
    verdict, _, findings = done.stdout.partition(b"\n")
    found = _verdict(verdict, image) if verdict else None
    if done.returncode != 0:
        raise _failure(done, image)
    if found is None:
        raise InternalError(f"image {image!r}: the child that checks it returned no verdict; pull it again")
    info = parse_info(findings)
    judge_info(info, found, max_bytes, image)
    return found, info.virtual_size


def qemu_img_copy_to_device(path: str, kind: DiskFormat, device: int, at: int) -> None:
    """Copies the verified disk image at `path` to the block device open as `device`, from offset `at` on. Raises ShimError."""
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
    kind, _, rest = line.decode(errors="replace").partition(" ")
    if kind == "unusable":
        raise InvalidRequest(f"image {image!r} {printable_text(rest)}")
    try:
        return DiskFormat(rest)
    except ValueError as exc:
        raise InternalError(
            f"image {image!r}: the child that checks it returned an unknown verdict; pull it again"
        ) from exc


def _failure(done: Finished, image: str) -> InternalError | InvalidRequest:
    if done.returncode == CANNOT_CONFINE:
        return InternalError(f"image {image!r} cannot be checked: {done.summary()}")
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
