"""Reads a VM's cgroup: what it uses, and how often the kernel killed in it. Reads only; tapmanager makes the groups."""

from __future__ import annotations

import errno
import os

ROOT = "/sys/fs/cgroup"


def directory(group: str, controller: str, root: str = ROOT) -> str:
    """Where `controller`'s files of a group (`virtshim.domain.cgroup.vm_cgroup_path`) are: cgroup v2, or v1's hierarchy of that
    controller (systemd mounts cpu and cpuacct as one, with links of both names)."""
    if os.path.exists(f"{root}/cgroup.controllers"):
        return root + group
    return f"{root}/{controller}{group}"


def oom_kills(group: str, root: str = ROOT) -> int:
    """How many processes of the group the kernel killed for lack of memory, the pod's or the group's own; 0 if there is
    no such group (any more). Raises OSError for other trouble."""
    where = directory(group, "memory", root)
    counts = _counts(f"{where}/memory.events") or _counts(f"{where}/memory.oom_control")
    return counts.get("oom_kill", 0)


def memory_bytes(group: str, root: str = ROOT) -> int | None:
    """What is charged to the group now; None if there is no such group. Raises OSError for other trouble."""
    where = directory(group, "memory", root)
    text = _text(f"{where}/memory.current") or _text(f"{where}/memory.usage_in_bytes")
    return int(text) if text else None


def _counts(path: str) -> dict[str, int]:
    """Flat keyed files: `name number` a line."""
    words = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno == errno.ENODEV:  # the group was removed while the file was open
            return None
        raise
