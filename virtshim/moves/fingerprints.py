"""Fingerprints of the disks of a saved guest. Old memory must not meet a disk that was changed or restored from a backup, because
the guest would overwrite the disk with what it remembers.

A disk is too large to be read as a whole, so samples of it are hashed. A change between the samples of a block device is not
seen. The file system tells whether a file was written to or replaced.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virtshim.model.errors import Unavailable
from virtshim.model.text import escaped

# Bytes at both ends of a disk, where file systems and partition tables keep what changes at each mount.
_END: Final = 1 << 20
_SAMPLES: Final = 64
_SAMPLE: Final = 64 << 10
# Longest text that the kernel gives for a device's identity.
_LONGEST: Final = 4096
# Files with the permanent names of a device, below its directory in sysfs.
_NAMES: Final = ("wwid", "device/wwid", "device/serial", "serial", "dm/uuid")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`identity`: of the device or file, "" if it has none that lasts. `written_at`: when the file was last written to, in
    nanoseconds since the epoch; 0 for a device. `digest`: SHA-256 of the samples, in hex."""

    size: int
    identity: str
    written_at: int
    digest: str


def samples(size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what is hashed of a disk of `size` bytes. Pure."""
    if size <= 2 * _END + _SAMPLES * _SAMPLE:
        yield 0, size
        return
    yield 0, _END
    step = (size - 2 * _END - _SAMPLE) // _SAMPLES
    for number in range(_SAMPLES):
        yield _END + number * step, _SAMPLE
    yield size - _END, _END


def difference(before: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> str:
    """Which disk has changed, and how; "" if none has. The keys are the disks' paths in the pod, "" for the root disk. Pure."""
    for path in sorted(before.keys() | now.keys()):
        name = f"the volume at {escaped(path, 200)}" if path else "the root disk"
        was, is_now = before.get(path), now.get(path)
        if was is None or is_now is None:
            return f"{name} is only there {'now' if was is None else 'in the saved VM'}"
        if was.size != is_now.size:
            return f"{name} had {was.size} bytes and has {is_now.size}"
        if was.identity != is_now.identity:
            return f"{name} is another one"
        if was != is_now:
            return f"{name} was written to, or restored from a backup"
    return ""


def fingerprint(path: str, *, is_file: bool) -> Fingerprint:
    """The fingerprint of a block device, or of a file that is a disk. A link to a file is not followed, because a pod's author
    may put links into a volume. Raises Unavailable."""
    try:
        return Fingerprint(*look_at(path, is_file=is_file))
    except OSError as exc:
        raise unreadable(path, exc) from exc


def unreadable(path: str, error: OSError) -> Unavailable:
    return Unavailable(f"the disk {escaped(path, 300)} cannot be read: {error.strerror or error}")


def look_at(path: str, *, is_file: bool) -> tuple[int, str, int, str]:
    """The fields of the disk's fingerprint. Raises OSError."""
    if not is_file:  # kubelet's links to devices
        path = os.path.realpath(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISBLK(found.st_mode) and not is_file:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            return size, _identity(found.st_rdev), 0, _digest(descriptor, size)
        if not stat.S_ISREG(found.st_mode) or not is_file:
            raise OSError(errno.EINVAL, f"it is no {'regular file' if is_file else 'block device'}")
        digest = _digest(descriptor, found.st_size)
        return found.st_size, f"inode {found.st_ino}", found.st_mtime_ns, digest
    finally:
        os.close(descriptor)


def _digest(descriptor: int, size: int) -> str:
    digest = hashlib.sha256()
    for offset, length in samples(size):
        end = offset + length
        at = offset
        while at < end and (data := os.pread(descriptor, end - at, at)):
            digest.update(data)
            at += len(data)
    return digest.hexdigest()


def _identity(device: int) -> str:
    directory = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for name in _NAMES:
        try:
            with (directory / name).open("rb") as file:
                text = file.read(_LONGEST).decode(errors="replace").strip()
        except OSError:
            continue
        if text:
            return f"{name} {text}"
    return ""
