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
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from virtshim.model.errors import InternalError
from virtshim.system.process import Finished, Piped, piped, run

OWN_USER: Final = "virtshim-parser"
"""Made by systemd-sysusers."""

MOST_OUTPUT: Final = 1 << 16
"""Bytes that are read of what qemu-img says."""

_FALLBACK: Final = "nobody"
_JUDGING_TIMEOUT = 60.0
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


class Parser(Protocol):
    """Reads strangers' files, within `bounds`. The daemon's is `ConfinedChild`; most tests have one in their own process."""

    def unpack(self, bounds: Bounds) -> AbstractContextManager[Piped]:
        """Starts what takes layers and answers with the disk in them, in the frames of `virtshim.images.confined.frames`. Raises
        InternalError if it does not start."""

    def judge(self, descriptor: int, bounds: Bounds, cancelled: threading.Event | None) -> Finished:
        """The verdict on an open file, one line, then what `qemu-img info` says of it, as JSON. Raises DeadlineExceeded if it
        takes too long or is cancelled, InternalError if it does not start."""


@dataclass(frozen=True, slots=True)
class ConfinedChild:
    """Implements `Parser`: each file gets a child of its own, which runs as `user`."""

    user: Account

    def unpack(self, bounds: Bounds) -> AbstractContextManager[Piped]:
        return piped(command("layers", self.user, bounds))

    def judge(self, descriptor: int, bounds: Bounds, cancelled: threading.Event | None) -> Finished:
        return run(
            command("judge", self.user, bounds, descriptor),
            name="qemu-img",
            timeout=_JUDGING_TIMEOUT,
            pass_fds=(descriptor,),
            cancelled=cancelled,
            output_limit=MOST_OUTPUT,
        )
