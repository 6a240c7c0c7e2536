"""The child that reads strangers' files: as whom it runs, how much it gets, how it is started.

It is a Python of its own that has seen neither this process's memory nor its settings, and it gives its rights up before it reads
anything: `virtshim.images.confined.program`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virtshim.model.errors import InternalError

OWN_USER: Final = "virtshim-parser"
"""Made by systemd-sysusers."""

_FALLBACK: Final = "nobody"
ROOT = str(Path(__file__).resolve().parents[2])
# No site-packages, nothing from the environment: the standard library, what lies below the one directory, zlib-ng, and zstd, a
# part of the standard library from Python 3.14 on.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from virtshim.images.confined.program import main; main(sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Account:
    """An unprivileged user."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of memory, seconds of processor time."""

    memory: int
    cpu_seconds: int


def account(name: str = "") -> Account:
    """The named user; without a name virtshim's own, or nobody where that was not made. Raises InternalError."""
    for candidate in (name,) if name else (OWN_USER, _FALLBACK):
        try:
            found = pwd.getpwnam(candidate)
        except KeyError:
            continue
        if found.pw_uid == 0 or found.pw_gid == 0:
            raise InternalError(f"images.parser_user: {candidate!r} is root; name a user without rights")
        return Account(candidate, found.pw_uid, found.pw_gid)
    raise InternalError(
        f"images.parser_user: there is no user {name or OWN_USER!r} to read images as; run systemd-sysusers, or name another"
    )


def command(
    do: str, user: Account, bounds: Bounds, descriptor: int = -1, target: int = -1, at: int = 0
) -> Sequence[str]:
    """What starts the child."""
    numbers = (user.uid, user.gid, os.getpid(), bounds.memory, bounds.cpu_seconds, descriptor, target, at)
    return (sys.executable, "-I", "-S", "-c", _START, ROOT, do, _packages(), *map(str, numbers))


@functools.cache
def _packages() -> str:
    """The directory in which the child finds zlib-ng and zstd."""
    found = importlib.util.find_spec("zlib_ng")
    return str(Path(found.origin).parents[1]) if found and found.origin else ROOT
