"""Measures what pods cost the node: the memory of their own processes, and the growth of the daemons.

Sizes are proportional set sizes (proc(5), smaps_rollup): a page that several processes share is divided between them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# The processes that run for a pod: a VM's, or a container's.
_OF_PODS = ("qemu-system", "vmwrapper", "virtiofsd", "containerd-shim", "busybox")


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB by process."""

    pods: dict[int, float]
    daemons: dict[int, float]

    @classmethod
    def now(cls, daemons: Iterable[int]) -> Self:
        of_pods = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):  # it has just ended
                    if Path(f"/proc/{entry}/comm").read_text().startswith(_OF_PODS):
                        of_pods[int(entry)] = _resident(int(entry))
        return cls(of_pods, {pid: _resident(pid) for pid in daemons})

    def since(self, before: Self) -> float:
        new = sum(mib for pid, mib in self.pods.items() if pid not in before.pods)
        return new + sum(self.daemons.values()) - sum(before.daemons.values())


def _resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
