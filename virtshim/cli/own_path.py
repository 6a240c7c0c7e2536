"""Checks that only root controls a path: no other user owns a component of it or can replace one.

`up` and `down` read settings, run programs and signal processes as the files below their directory say.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from virtshim.model.errors import InvalidRequest

_MOST_LINKS: Final = 40
_ROOT: Final = 0


def refuse_strangers(path: str) -> None:
    """Checks every existing component of `path`, and the targets of links. Raises InvalidRequest if another user owns one or
    may write to it. A sticky directory such as /tmp may be on the way, but `path` itself may not be one."""
    within = False  # inside a directory in which every user may create files
    for step, found in _steps(path):
        if found.st_uid not in (_ROOT, os.geteuid()):
            raise InvalidRequest(
                f"--dir: {step} belongs to user {found.st_uid}, who could change what root reads and runs below {path}; "
                "choose a directory that root owns, and whose parents root owns"
            )
        is_directory = stat.S_ISDIR(found.st_mode)
        within = is_directory and bool(found.st_mode & 0o022)
        if within and not found.st_mode & stat.S_ISVTX:
            raise _may_write(step, found, path)
    if within and os.path.exists(path):
        raise _may_write(step, found, path)


def _may_write(step: str, found: os.stat_result, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"--dir: users other than root may write to {step} (mode {stat.S_IMODE(found.st_mode):04o}), and so change what root "
        f"reads and runs below {path}; choose another directory, or run `chmod go-w {step}` if root owns all files in it"
    )


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each component in the kernel's order, links before their targets. Ends at the first that does not exist."""
    here, rest, links = "/", _parts(os.path.join(os.getcwd(), path)), 0
    yield here, os.lstat(here)
    while rest:
        part = rest.pop(0)
        if part == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, part)
        try:
            found = os.lstat(step)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise InvalidRequest(f"--dir: {path} contains too many symbolic links; name the directory by its real path")
        target = os.readlink(step)
        here = "/" if target.startswith("/") else here
        rest = [*_parts(target), *rest]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
