"""Lets a child judge a downloaded file: first by its header, then as qemu-img, which must agree. And copy one that was judged."""

from __future__ import annotations

import os
import re
import signal
import threading

from virtshim.domain.errors import InternalError, InvalidRequest
from virtshim.domain.image import DiskFormat
from virtshim.domain.printable import printable_text
from virtshim.images.confined.frames import CANNOT_CONFINE
from virtshim.images.confinement import Account, Bounds, command
from virtshim.images.verify import judge_info, parse_info
from virtshim.process import Finished, run

# Reading a header takes milliseconds and a few megabytes; what takes more was made to.
BOUNDS = Bounds(memory=1 << 30, cpu_seconds=20)
_TIMEOUT = 60.0
_MAX_OUTPUT = 1 << 16
# The slowest device gets the largest image in that time; kubelet's repeated calls join the first meanwhile.
_COPY_BOUNDS = Bounds(memory=4 << 30, cpu_seconds=6 * 3600)
_COPY_TIMEOUT = 6 * 3600.0
_ROOT = Account("root", 0, 0)
# How the child names the file.
_PATH = re.compile(r"/proc/self/fd/\d+")


def verify(
    path: str, image: str, max_bytes: int, user: Account, cancelled: threading.Event | None = None
) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of the file at `path`, which `user` must be allowed to read; `image` names it in error
    texts. Raises InvalidRequest if it may not become a disk or cannot be read within its limits, InternalError if somebody
    killed the child: the image is not to blame for that."""
    done = _judged(path, user, cancelled)
    verdict, _, findings = done.stdout.partition(b"\n")
    found = _verdict(verdict, image) if verdict else None
    if done.returncode != 0:
        raise _failure(done, image)
    if found is None:
        raise InternalError(f"image {image!r}: its judge ended without a verdict; pull it again")
    info = parse_info(findings)
    judge_info(info, found, max_bytes, image)
    return found, info.virtual_size


def copy_to_device(path: str, kind: DiskFormat, device: int, at: int) -> None:
    """The disk in the file at `path`, an image's that was verified, is behind the first `at` bytes of the block device, open as
    `device`. Raises ShimError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        done = run(
            command(kind.value, _ROOT, _COPY_BOUNDS, descriptor, device, at),
            name="qemu-img convert",
            timeout=_COPY_TIMEOUT,
            pass_fds=(descriptor, device),
            output_limit=_MAX_OUTPUT,
        )
    finally:
        os.close(descriptor)
    if done.returncode != 0:
        raise InternalError(f"the image cannot be copied by qemu-img: {_PATH.sub('it', done.summary())}")


def _judged(path: str, user: Account, cancelled: threading.Event | None) -> Finished:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return run(
            command("judge", user, BOUNDS, descriptor),
            name="qemu-img",
            timeout=_TIMEOUT,
            pass_fds=(descriptor,),
            cancelled=cancelled,
            output_limit=_MAX_OUTPUT,
        )
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
