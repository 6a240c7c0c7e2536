"""Measures RunPodSandbox, CreateContainer and StartContainer on a node, and on containerd with runc, in turns. Client
and CNI configuration are the same. Pods start one by one, and many at the same moment.

    python -m tests.bench.many_pods [ROUNDS [LOG]]     these figures alone, on a node of their own; LOG: where its log goes"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in ("e2e", "bench", "faults"))]

from containerd import IMAGE, Containerd  # noqa: E402  needs the path above
from figures import Figures, timed  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from memory import Memory  # noqa: E402
from node import Node  # noqa: E402
from own_node import own_node  # noqa: E402
from podclient import PodClient, container_config, pod_config  # noqa: E402

MANY = 20


@dataclass
class Runtime:
    """One of the two runtimes: its CRI client, the image of its containers, and the settings that all its pods share."""

    name: str
    cri: PodClient
    image: str
    logs: str
    cgroup: str
    # The processes that serve it.
    daemons: tuple[int, ...] = ()
    # Milliseconds that each pod's calls took, by call.
    phases: dict[str, list[float]] = field(default_factory=dict)
    pods: list[str] = field(default_factory=list)

    def make(self) -> None:
        """Creates a pod whose container runs."""
        name = f"{self.name}-{secrets.token_hex(4)}"
        config = pod_config(name, f"{self.logs}/{name}")
        config.linux.cgroup_parent = self.cgroup
        made: dict[str, str] = {}
        self._timed("sandbox", lambda: made.update(pod=self.cri.run_pod(config)))
        self.pods.append(made["pod"])
        wanted = container_config(self.image, 64 << 20)
        self._timed("create", lambda: made.update(container=self.cri.create(made["pod"], wanted, config)))
        self._timed("start", lambda: self.cri.start(made["container"]))

    def remove_all(self) -> None:
        """Ends all pods as kubelet does: first it stops the sandbox, which ends its containers, then it removes the
        sandbox."""
        with ThreadPoolExecutor(MANY) as pool:
            list(pool.map(self._remove, self.pods))
        self.pods.clear()

    def _remove(self, pod: str) -> None:
        self._timed("stop", lambda: self.cri.stop_pod(pod))
        self._timed("remove", lambda: self.cri.remove_pod(pod))

    def _timed(self, phase: str, call: Callable[[], object]) -> None:
        self.phases.setdefault(phase, []).append(timed(call))


def pods_rounds(node: Node, image: str, directory: str, rounds: int, figures: Figures) -> None:
    """Adds `pod_vs_containerd` (one by one) and `pod_vs_containerd_20` (from the first call of 20 concurrent pods until
    the last container runs), each with both runtimes' milliseconds."""
    with (
        a_cgroup() as cgroup,
        Containerd(f"{directory}/pods", f"{node.directory}/cni/net.d") as containerd,
        PodClient(node.socket) as ours,
        PodClient(containerd.socket) as theirs,
    ):
        logs = f"{directory}/logs"
        pod = Runtime("pod", ours, ours.pull(image), logs, cgroup, tuple(node.daemons().values()))
        container = Runtime("containerd", theirs, IMAGE, logs, cgroup, (containerd.pid,))
        _beside(pod, container, 1, 0, Figures())  # caches: the first call of each kind
        pod.phases.clear()
        container.phases.clear()
        for number in range(1, rounds + 1):
            for _ in range(3):
                _beside(pod, container, 1, number, figures)
        _phases(pod, container, "", figures)
        for number in range(1, max(2, rounds // 2) + 1):
            _beside(pod, container, MANY, number, figures)
        _phases(pod, container, f"_{MANY}", figures)


def _beside(pod: Runtime, container: Runtime, count: int, number: int, figures: Figures) -> None:
    suffix = f"_{count}" if count > 1 else ""
    taken: dict[str, float] = {}
    # Which one goes first changes from round to round.
    for runtime in (pod, container) if number % 2 else (container, pod):
        before = Memory.now(runtime.daemons)
        try:
            taken[runtime.name] = at_once(runtime, count)
            figures.add(f"{runtime.name}_memory{suffix}_mib", Memory.now(runtime.daemons).since(before) / count, "MiB")
        finally:
            runtime.remove_all()
        figures.add(f"{runtime.name}_start{suffix}_ms", taken[runtime.name], "ms")
    figures.add(f"pod_vs_containerd{suffix}", taken["pod"] / taken["containerd"], "ratio")


def at_once(runtime: Runtime, count: int) -> float:
    """Milliseconds until all containers run."""
    together = threading.Barrier(count + 1)

    def one() -> None:
        together.wait()
        runtime.make()

    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(one) for _ in range(count)]
        together.wait()
        began = time.monotonic()
        for made in waiting:
            made.result()
        return (time.monotonic() - began) * 1000


def _phases(pod: Runtime, container: Runtime, suffix: str, figures: Figures) -> None:
    for runtime in (pod, container):
        for phase, taken in runtime.phases.items():
            for one in taken:
                figures.add(f"phase_{runtime.name}_{phase}{suffix}_ms", one, "ms")
        runtime.phases.clear()


@contextlib.contextmanager
def a_cgroup() -> Iterator[str]:
    """The path of a cgroup for pods, which kubelet would create."""
    path = f"/virtshim-bench-{secrets.token_hex(4)}"
    roots = (
        ["/sys/fs/cgroup"] if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else glob.glob("/sys/fs/cgroup/*/")
    )
    for root in roots:
        with contextlib.suppress(OSError):  # "unified" beside version 1 may be read-only
            os.mkdir(root.rstrip("/") + path)
    try:
        yield path
    finally:
        for root in roots:
            # From the leaves up: a failed round may have left pods' own, which end with the node.
            for below, _, _ in os.walk(root.rstrip("/") + path, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(below)


def main() -> None:
    """Measures these figures alone."""
    figures = Figures()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with own_node() as (node, directory), serve_directory(PROJECT / "build") as url:
        pods_rounds(node, f"{url.removeprefix('http://')}/null.qcow2", directory, rounds, figures)
        if len(sys.argv) > 2:
            Path(sys.argv[2]).write_text(node.log())
    figures.tell()


if __name__ == "__main__":
    main()
