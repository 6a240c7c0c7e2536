"""A kubelet's cgroups: one for each QoS class, and in them one for each pod, with the pod's limits."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fakes.kubelet_requests import Asked, Qos, pod_group

from tapmanager.cgroups import tree as cgroups
from tapmanager.cgroups.plan import RequestedLimits


class KubeletCgroups:
    """`root` is kubelet's `cgroupRoot`, with a private name because this machine may have a kubelet."""

    def __init__(self) -> None:
        self.root = f"/virtshim-test-{secrets.token_hex(4)}"
        self._hierarchies = [one for one in cgroups.hierarchies() if one.is_needed]
        self._tree = cgroups.VmCgroups(self._hierarchies)
        self._made: list[str] = []

    def make_classes(self) -> None:
        """Creates the classes' groups. Their pods together have the weight of eight busy processes, because this machine
        may have other work."""
        self._make(self.root, RequestedLimits(shares=8192))
        for qos in Qos:
            self._make(self.root + qos.value, RequestedLimits())

    def make_pod(self, uid: str, asked: Asked) -> str:
        """Creates the pod's group; returns its path."""
        path = f"{self.root}{asked.qos.value}/pod{uid}"
        self._make(path, self._limits(asked))
        return path

    def limit_pod(self, path: str, asked: Asked) -> None:
        """Resizes the pod's group; limits without a value stay."""
        self._tree.limit(path, self._limits(asked), 0)

    def remove_pod(self, path: str) -> None:
        """Removes the group as kubelet does after the pod; fails if anything is in it."""
        self._tree.remove(path)
        self._made.remove(path)

    def taken_for_pods(self) -> set[str]:
        """The pod groups that `cleanupOrphanedPodCgroups` would find, by UID: it goes by names alone."""
        found = set()
        for qos in Qos:
            for name in self.children(self.root + qos.value):
                parts = name.split("pod")
                if len(parts) == 2 and "kubepods" not in name:
                    found.add(parts[1])
        return found

    def children(self, path: str) -> set[str]:
        """The groups below it, in any hierarchy."""
        found = set()
        for one in self._hierarchies:
            with contextlib.suppress(FileNotFoundError):
                found |= {entry.name for entry in os.scandir(one.root + path) if entry.is_dir()}
        return found

    def value(self, path: str, controller: str, v1: str, v2: str) -> str:
        """The first word of a file of the group."""
        home = next(one for one in self._hierarchies if controller in one.controllers)
        return Path(f"{home.root}{path}/{v2 if home.is_v2 else v1}").read_text().split()[0]

    def memory_limit(self, path: str) -> int:
        return int(self.value(path, "memory", "memory.limit_in_bytes", "memory.max"))

    def quota(self, path: str) -> int:
        """The CPU quota, -1 for none."""
        word = self.value(path, "cpu", "cpu.cfs_quota_us", "cpu.max")
        return -1 if word == "max" else int(word)

    def holds(self, path: str, pid: int) -> bool:
        """Whether the group holds the process in all hierarchies."""
        places = [Path(f"{one.root}{path}/cgroup.procs") for one in self._hierarchies]
        return all(str(pid) in place.read_text().split() for place in places)

    def remove_all(self) -> None:
        with contextlib.ExitStack() as last_in_first_out:  # one that cannot go keeps no other
            for path in self._made:
                last_in_first_out.callback(self._tree.remove, path)
        self._made.clear()

    def _make(self, path: str, limits: RequestedLimits) -> None:
        self._made.append(path)
        self._tree.make(path, limits)

    @staticmethod
    def _limits(asked: Asked) -> RequestedLimits:
        group = pod_group(asked)
        return RequestedLimits(
            shares=group.shares, quota=max(group.quota or 0, 0), period=100_000, memory=group.memory or 0
        )


@contextlib.contextmanager
def kubelet_cgroups() -> Iterator[KubeletCgroups]:
    """The cgroups, which are removed afterwards; a leftover in one of them is an error."""
    made = KubeletCgroups()
    try:
        made.make_classes()
        yield made
    finally:
        made.remove_all()
