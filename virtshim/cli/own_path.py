"""Whether a path is root's alone: nobody else prepared what is on the way to it, nobody else can exchange it.

`up` and `down` read settings, run programs and signal processes by what lies below their directory.
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
    """Looks at every component that is there, links' targets included. Raises InvalidRequest for one that another user owns or
    may write. A directory such as /tmp, where names belong to whoever made them, may be on the way, but not the end of it."""
    within = False  # a directory in which everybody may make names
    for step, found in _steps(path):
        if found.st_uid not in (_ROOT, os.geteuid()):
            raise InvalidRequest(
                f"--dir: {step} belongs to user {found.st_uid}, who could change what root reads and runs below {path}; "
                "choose a directory that is root's from / on"
            )
        is_directory = stat.S_ISDIR(found.st_mode)
        within = is_directory and bool(found.st_mode & 0o022)
        if within and not found.st_mode & stat.S_ISVTX:
            raise _may_write(step, found, path)
    if within and os.path.exists(path):
        raise _may_write(step, found, path)


def _may_write(step: str, found: os.stat_result, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"--dir: others than root may write to {step} (mode {stat.S_IMODE(found.st_mode):04o}), and so change what root reads "
        f"and runs below {path}; choose another directory, or `chmod go-w {step}` if all in it is root's"
    )


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each component, links before what they lead to, as the kernel would go; ends at the first that is not there."""
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
            raise InvalidRequest(f"--dir: {path} leads over too many symbolic links")
        target = os.readlink(step)
        here = "/" if target.startswith("/") else here
        rest = [*_parts(target), *rest]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
