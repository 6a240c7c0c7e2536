"""How the child that reads untrusted files is started: its user, its limits, its command line.

The child is a separate Python process that has neither virtshim's memory nor its settings. It drops its rights before it reads
anything: see `virtshim.images.confined.program`.
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
"""systemd-sysusers creates this user."""

MOST_OUTPUT: Final = 1 << 16
"""Bytes of qemu-img's output that are read."""

_FALLBACK: Final = "nobody"
_JUDGING_TIMEOUT = 60.0
ROOT = str(Path(__file__).resolve().parents[2])
# The child gets no site-packages and nothing from the environment. It loads the standard library, modules below one directory,
# zlib-ng, and zstd, which the standard library includes since Python 3.14.
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
    """`memory` is in bytes, `cpu_seconds` is processor time."""

    memory: int
    cpu_seconds: int


def account(name: str = "") -> Account:
    """The named user. Without a name: virtshim's own, or nobody if that does not exist. Raises InternalError."""
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
    """The command line of the child."""
    numbers = (user.uid, user.gid, os.getpid(), bounds.memory, bounds.cpu_seconds, descriptor, target, at)
    return (sys.executable, "-I", "-S", "-c", _START, ROOT, do, _packages(), *map(str, numbers))


@functools.cache
def _packages() -> str:
    """The directory in which the child finds zlib-ng and zstd."""
    found = importlib.util.find_spec("zlib_ng")
    return str(Path(found.origin).parents[1]) if found and found.origin else ROOT


class Parser(Protocol):
    """Reads untrusted files within `bounds`. The daemon uses `ConfinedChild`; most tests read in their own process."""

    def unpack(self, bounds: Bounds) -> AbstractContextManager[Piped]:
        """Starts the process that unpacks layers; `virtshim.images.confined.frames` describes the exchange. Raises InternalError
        if it does not start."""

    def judge(self, descriptor: int, bounds: Bounds, cancelled: threading.Event | None) -> Finished:
        """Standard output is the verdict on the open file in one line, then the JSON of `qemu-img info`. Raises DeadlineExceeded
        if it takes too long or is cancelled, InternalError if it does not start."""


@dataclass(frozen=True, slots=True)
class ConfinedChild:
    """Implements `Parser`: each file is read by a new child, which runs as `user`."""

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
