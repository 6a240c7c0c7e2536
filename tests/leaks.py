"""Takes a snapshot of what a test could leave behind on the machine. It covers this process's children and our own
names only.

Only processes of this process's PID namespace count: isolated test runs (apart.sh) have their own namespace and take
their own snapshots. Neither the product nor a test creates a PID namespace otherwise, so nothing escapes that way."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Snapshot:
    netns: frozenset[str]
    links: frozenset[str]
    bridge_ports: frozenset[str]
    processes: Counter[str]
    mounts: frozenset[str]
    descriptors: Counter[str]
    nat_chains: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        links = set(os.listdir("/sys/class/net"))
        return cls(
            netns=frozenset(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else frozenset(),
            links=frozenset(links),
            bridge_ports=frozenset(link for link in links if os.path.exists(f"/sys/class/net/{link}/brport")),
            processes=Counter(_processes()),
            mounts=frozenset(line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()),
            descriptors=Counter(_descriptors()),
            nat_chains=frozenset(_nat_chains()),
        )

    def left(self) -> list[str]:
        """What exists now and did not before."""
        now = Snapshot.take()
        found: list[str] = []
        for kind in ("netns", "links", "bridge_ports", "processes", "mounts", "nat_chains"):
            new = getattr(now, kind) - getattr(self, kind)  # sets and counters alike
            found.extend(f"{kind}: {item}" for item in sorted(new))
        # A few descriptors belong to caches of libraries (gRPC, logging) and come once.
        if now.descriptors.total() > self.descriptors.total() + 8:
            new = ", ".join(f"{count} x {kind}" for kind, count in sorted((now.descriptors - self.descriptors).items()))
            found.append(f"descriptors: {self.descriptors.total()} before, {now.descriptors.total()} now: {new}")
        return found

    def settled(self, seconds: float) -> list[str]:
        """Waits for the kernel to finish removals, for example a veth with its netns."""
        until = time.monotonic() + seconds
        while (found := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found


def runs(pid: int) -> bool:
    """Whether it runs. A zombie does not: an orphan stays one for ever if process 1 does not reap, as in many
    containers."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


_PROGRAMS = ("qemu-system", "tapmanager", "virtshim", "vmwrapper", "docker-registry", "qemu-img", "virtiofsd")


def _processes() -> list[str]:
    """Our running command lines. They have no process ids, because a daemon may have been restarted."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or _is_apart(entry):
            continue
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        program = " ".join(command.split()[:4])
        if runs(int(entry)) and any(name in program for name in _PROGRAMS) and "pytest" not in command:
            found.append(command[:160])
    return found


def _is_apart(pid: str) -> bool:
    """Whether it is in another PID namespace than this process; if unknown, it is not."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _descriptors() -> list[str]:
    """The target of each descriptor of this process: a path, or a kind such as "socket"."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            found.append(target if target.startswith(("/", "anon_inode")) else target.partition(":")[0])
    return found


class OpenedSince:
    """The descriptors that this process has opened since and still has. A plain count would be wrong when the garbage
    collector, or a thread of an earlier test, closes some meanwhile."""

    def __init__(self) -> None:
        gc.collect()
        self._before = _open_files()

    def count(self) -> int:
        return len(_open_files() - self._before)


def _open_files() -> frozenset[tuple[str, str]]:
    """Number and target of each; sockets and pipes have their inode in it."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


def _nat_chains() -> list[str]:
    """Per-pod chains of CNI's masquerading; the plugins' own top-level chains stay by design."""
    result = subprocess.run(["iptables", "-t", "nat", "-S"], capture_output=True, text=True, check=False)
    return [
        line
        for line in result.stdout.splitlines()
        if line.startswith("-N CNI-") and not line.startswith(("-N CNI-HOSTPORT", "-N CNI-DN"))
    ]
