"""Whose a process is. What was said to one of ours when it was started is shown; of all others that they are there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.cli.diag.gather import Node
from virtshim.cli.diag.programs import file_text
from virtshim.cli.diag.secrets import REMOVED
from virtshim.cli.diag.vms import our_domains

HEAD: Final = f"{'PID':>8} {'PARENT':>8} {'USER':>10} S {'THR':>5} {'KiB':>10} {'CPU s':>10} COMMAND"

_PROGRAMS: Final = ("virtshim", "tapmanager", "vmwrapper")
# Other people run these too: ours have one of our VMs, or a path of ours, on their command lines.
_LENT: Final = ("qemu", "virtiofsd", "swtpm")

# Commands of `virtshim` that go on with a guest's.
_FOR_GUESTS: Final = frozenset(("exec", "ssh", "run"))


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str
    is_ours: bool
    line: str


def all_processes(node: Node) -> list[Process]:
    """Environments are not looked at."""
    ours = (*(one.uuid for one in our_domains(node) if one.uuid), *(f"{place}/" for place in _directories(node)))
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            found.append(_process(pid, ours))
    return found


def _directories(node: Node) -> Sequence[str]:
    paths, run_dir = node.settings.paths, os.path.dirname(node.settings.shares.socket)
    return tuple(place for place in (paths.state_dir, paths.run_dir, run_dir) if place.strip("/"))


def _process(pid: int, ours: Sequence[str]) -> Process:
    head, _, tail = file_text(f"/proc/{pid}/stat").rpartition(")")
    name, fields = head.partition("(")[2], tail.split()
    if not _is_ours(words := file_text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0"), ours):
        return Process(pid, name, False, f"{pid:>8} {'':>8} {'':>10} {fields[0]} {'':>5} {'':>10} {'':>10} [{name}]")
    owner = os.stat(f"/proc/{pid}").st_uid
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") >> 10
    line = f"{pid:>8} {fields[1]:>8} {owner:>10} {fields[0]} {fields[17]:>5} {memory:>10} {seconds:>10.1f}"
    return Process(pid, name, True, f"{line} {' '.join(_of_ours(words))}")


def _of_ours(words: Sequence[str]) -> Sequence[str]:
    """Without what somebody has a guest run, and with which variables."""
    at = next((at for at, word in enumerate(words) if word in _FOR_GUESTS), len(words))
    return words if _is_lent(words) or at == len(words) else (*words[: at + 1], REMOVED)


def _is_ours(words: Sequence[str], ours: Sequence[str]) -> bool:
    program = os.path.basename(words[0])
    if _is_lent(words):
        return any(one in word for word in words[1:] for one in ours)
    return _is_program(_script(words) if program.startswith("python") else program)


def _is_lent(words: Sequence[str]) -> bool:
    return any(part in os.path.basename(words[0]) for part in _LENT)


def _script(words: Sequence[str]) -> str:
    """What Python runs: a module's name, or a file; "" for a text that it was given."""
    for before, word in itertools.pairwise(words):
        if not word.startswith("-"):
            return "" if before == "-c" else word
    return ""


def _is_program(word: str) -> bool:
    """`virtshim`, `/usr/bin/virtshim-shares`, and as Python is told: `tapmanager.shares`, a file of our package."""
    name = os.path.basename(word)
    return any(
        name == program or name.startswith((f"{program}-", f"{program}.")) or f"/{program}/" in word
        for program in _PROGRAMS
    )
