"""Whether a user may access a file, by owner, group and mode (stat(2)). Ignores access control lists. Pure."""

from __future__ import annotations

import enum
import stat
from collections.abc import Sequence
from dataclasses import dataclass


class AccessMode(enum.IntFlag):
    EXECUTE = 1
    WRITE = 2
    READ = 4


@dataclass(frozen=True, slots=True)
class UserAccount:
    """A user with all groups, including the primary one."""

    name: str
    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file or directory. `mode` as in stat(2), including the type bits."""

    path: str
    mode: int
    uid: int
    gid: int

    @property
    def permissions(self) -> str:
        return f"{stat.S_IMODE(self.mode):04o}"


def allows(node: FileStatus, who: UserAccount, want: AccessMode) -> bool:
    if who.uid == 0:
        return want is not AccessMode.EXECUTE or bool(node.mode & 0o111) or stat.S_ISDIR(node.mode)
    if node.uid == who.uid:
        given = node.mode >> 6
    elif node.gid in who.gids:
        given = node.mode >> 3
    else:
        given = node.mode
    return given & want == want


def first_blocked(directories: Sequence[FileStatus], who: UserAccount) -> FileStatus | None:
    """The first directory on the way that `who` cannot enter."""
    return next((node for node in directories if not allows(node, who, AccessMode.EXECUTE)), None)


def chmod_command(node: FileStatus) -> str:
    """The command that lets everybody enter a directory, but not list it."""
    return f"chmod a+x {node.path}"
