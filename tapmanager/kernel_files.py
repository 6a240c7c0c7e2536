"""Files in which the kernel shows and takes values: sysfs and cgroups."""

from __future__ import annotations

import errno
import os
from typing import Final

# What the kernel says of a device that has no such value, and of one that has just gone.
_NO_VALUE: Final = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.EINVAL)


def value_in(path: str) -> str:
    """Without surrounding white space; "" where there is none. Raises OSError: what cannot be read now may be there."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError as exc:
        if exc.errno not in _NO_VALUE:
            raise
        return ""


def write_once(path: str, text: str) -> None:
    """One write(2): the kernel takes or refuses a value as a whole. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def names_in(directory: str) -> list[str]:
    """Sorted; none if there is no such directory. Raises OSError."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def boot_id() -> str:
    """Of the machine's present boot: another one after each (proc(5), /proc/sys/kernel/random). Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
