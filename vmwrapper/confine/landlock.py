"""Landlock: restricts files by path, and forbids TCP, and signals and abstract sockets to others. QEMU's rules:
vmwrapper/landlock_rules.py.

Leaves out what the kernel's Landlock (`abi`) is too old for. It restricts neither open files, nor metadata (stat, chmod), nor
connecting to a Unix socket by its path; file modes and seccomp do that.
"""

from __future__ import annotations

import errno
import os
import stat
import struct

from vmwrapper.confine import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK = (1 << bit for bit in range(4, 10))
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15

# Rights on a file, or on everything below a directory.
READ = _READ_FILE | _READ_DIR
WRITE = READ | _WRITE_FILE | _TRUNCATE
DEVICE = WRITE | _IOCTL_DEV
EXECUTE = READ | _EXECUTE
LIST = _READ_DIR
# Rights in a directory.
MAKE = WRITE | _REMOVE_FILE | _MAKE_REG | _MAKE_SOCK

_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

# The version that added rights, and the rights. Version 1 has the first 13 bits.
_FILE_RIGHTS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV))
_TCP = (4, 0b11)  # bind, connect
_SCOPES = (6, 0b11)  # abstract Unix sockets, signals


def abi() -> int:
    """The version of the kernel's Landlock; 0 if it has none (QEMU's rules: vmwrapper/landlock_rules.py)."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError as exc:
        if exc.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def restrict(allowed: Iterable[tuple[str, int]]) -> int:
    """From now on only these paths can be opened, made, removed or run. Ignores missing paths. Returns the `abi`; 0: nothing is
    restricted. Call `kernel.forbid_new_privileges` first. Raises OSError."""
    version = abi()
    if not version:
        return 0
    files = sum(rights for since, rights in _FILE_RIGHTS if since <= version)
    ruleset = kernel.syscall(_CREATE_RULESET, *_described(version, files), 0)
    try:
        for path, rights in allowed:
            _allow(ruleset, path, rights & files)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _described(version: int, files: int) -> tuple[bytes, int]:
    """struct landlock_ruleset_attr, in this version's length."""
    fields = [files]
    if version >= _TCP[0]:
        fields.append(_TCP[1])
    if version >= _SCOPES[0]:
        fields.append(_SCOPES[1])
    described = struct.pack(f"={len(fields)}Q", *fields)
    return described, len(described)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # a process that may not look the path up cannot open it
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)
