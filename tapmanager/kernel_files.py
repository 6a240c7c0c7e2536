"""Reads and writes files of the kernel: sysfs, cgroups, procfs."""

from __future__ import annotations

import errno
import os
from typing import Final

# What the kernel says of a device that has no such value, and of one that has just gone.
_NO_VALUE: Final = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.EINVAL)


def value_in(path: str) -> str:
    """The file's text without surrounding white space; "" if the kernel has no value there. Raises OSError for any
    other failure, because the value may exist."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError as exc:
        if exc.errno not in _NO_VALUE:
            raise
        return ""


def write_once(path: str, text: str) -> None:
    """Writes with one write(2), because the kernel accepts or refuses a value as a whole. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def names_in(directory: str) -> list[str]:
    """The names in the directory, sorted; empty if it does not exist. Raises OSError."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def boot_id() -> str:
    """The id of the machine's current boot; it changes with each boot (proc(5), /proc/sys/kernel/random). Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
