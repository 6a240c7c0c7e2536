"""Lets qemu-img look at a downloaded file: in a process of its own, with little memory and little time."""

from __future__ import annotations

import os
import signal
import threading

from virtshim.domain.errors import InternalError, InvalidRequest
from virtshim.domain.image import DiskFormat
from virtshim.images.verify import HEAD_BYTES, TAIL_BYTES, DiskInfo, judge_bytes, judge_info, parse_info
from virtshim.process import ProcessLimits, run

# Reading a header takes milliseconds and a few megabytes; what takes more was made to.
_LIMITS = ProcessLimits(address_space=1 << 30, cpu_seconds=20)
_TIMEOUT = 60.0


def verify(path: str, image: str, max_bytes: int, cancelled: threading.Event | None = None) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of the file at `path`; `image` names it in error texts. Raises InvalidRequest if it may
    not become a disk."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read(TAIL_BYTES)
    found = judge_bytes(head, tail, size, image)
    info = inspect(path, image, cancelled)
    judge_info(info, found, max_bytes, image)
    return found, info.virtual_size


def inspect(path: str, image: str, cancelled: threading.Event | None = None) -> DiskInfo:
    """What qemu-img takes the file for. Raises InvalidRequest if it cannot read it within its limits, InternalError if
    somebody killed it: the image is not to blame for that."""
    done = run(["qemu-img", "info", "--output=json", path], timeout=_TIMEOUT, limits=_LIMITS, cancelled=cancelled)
    if done.returncode == -signal.SIGKILL:
        raise InternalError(f"image {image!r}: qemu-img was killed by signal 9 (no memory left?); pull it again")
    if done.returncode != 0:
        words = done.summary().replace(path, "it")
        raise InvalidRequest(f"image {image!r} cannot be read by qemu-img: {words}; repair it or publish it again")
    return parse_info(done.stdout)
