"""Measures the time of RunPodSandbox beyond its CNI plugins, and of 50 concurrent calls, on a node and on containerd
with the same plugins.

python -m tests.bench.sandboxes [ROUNDS [LOG]]     these figures alone, on a node of their own; LOG: where its log goes"""

from __future__ import annotations

import os
import re
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in ("e2e", "bench", "faults"))]

from containerd import Containerd  # noqa: E402  needs the path above
from figures import Figures, timed  # noqa: E402
from node import Node  # noqa: E402
from own_node import own_node  # noqa: E402
from podclient import PodClient, pod_config  # noqa: E402

AT_ONCE = 50
_A_ROUND = 5


@dataclass(frozen=True)
class Runtime:
    name: str
    cri: PodClient
    logs: str

    def run(self, number: int) -> str:
        name = f"{self.name}-{number}-{time.monotonic_ns()}"
        return self.cri.run_pod(pod_config(name, f"{self.logs}/{name}"))

    def remove(self, pod: str) -> None:
        self.cri.stop_pod(pod)
        self.cri.remove_pod(pod)


def sandbox_rounds(node: Node, directory: str, rounds: int, figures: Figures) -> None:
    """Adds `sandbox_own_ms`, and `attach_50_ms`: from the first of 50 concurrent calls to the last answer. Both have
    containerd's RunPodSandbox beside them (`containerd_sandbox_ms`, `containerd_attach_50_ms`) with the same CNI
    configuration; those include the plugins' time, which containerd does not report."""
    with (
        Containerd(f"{directory}/sandboxes", f"{node.directory}/cni/net.d") as containerd,
        PodClient(node.socket) as ours,
        PodClient(containerd.socket) as theirs,
    ):
        both = (Runtime("pod", ours, f"{directory}/logs"), Runtime("containerd", theirs, f"{directory}/logs"))
        for runtime in both:  # caches: the first call of each kind
            runtime.remove(runtime.run(0))
        for number in range(1, rounds + 1):
            for _ in range(_A_ROUND):
                _one(node, both, number, figures)
        for number in range(1, max(2, rounds // 2) + 1):
            _many(node, both, number, figures)


def _one(node: Node, both: tuple[Runtime, Runtime], number: int, figures: Figures) -> None:
    taken: dict[str, float] = {}
    for runtime in both if number % 2 else both[::-1]:  # which one goes first changes from round to round
        made: list[str] = []
        taken[runtime.name] = timed(lambda runtime=runtime, made=made: made.append(runtime.run(number)))
        if runtime.name == "pod":
            plugins = plugins_ms(node, made[0])
            figures.add("sandbox_own_ms", taken["pod"] - plugins, "ms")
            figures.add("phase_sandbox_plugins_ms", plugins, "ms")
        runtime.remove(made[0])
    figures.add("sandbox_ms", taken["pod"], "ms")
    figures.add("containerd_sandbox_ms", taken["containerd"], "ms")
    figures.add("sandbox_vs_containerd", taken["pod"] / taken["containerd"], "ratio")


def _many(node: Node, both: tuple[Runtime, Runtime], number: int, figures: Figures) -> None:
    taken: dict[str, float] = {}
    for runtime in both if number % 2 else both[::-1]:
        pods, taken[runtime.name] = at_once(runtime, number)
        if runtime.name == "pod":
            plugins = [plugins_ms(node, pod) for pod in pods]
            figures.add("phase_attach_50_plugins_ms", statistics.median(plugins), "ms")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(runtime.remove, pods))
        left = runtime.cri.pods()
        assert not left, f"{runtime.name} still has {len(left)} pods"
    figures.add("attach_50_ms", taken["pod"], "ms")
    figures.add("containerd_attach_50_ms", taken["containerd"], "ms")
    figures.add("attach_50_vs_containerd", taken["pod"] / taken["containerd"], "ratio")


def at_once(runtime: Runtime, number: int) -> tuple[list[str], float]:
    """Starts the pods; returns them and the milliseconds until all have their network."""
    together = threading.Barrier(AT_ONCE + 1)

    def one(_: int) -> str:
        together.wait()
        return runtime.run(number)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(one, at) for at in range(AT_ONCE)]
        together.wait()
        began = time.monotonic()
        pods = [made.result() for made in waiting]
        return pods, (time.monotonic() - began) * 1000


def plugins_ms(node: Node, pod: str) -> float:
    """The time of the CNI plugins' ADD, from tapmanager's log."""
    return sum(float(ms) for ms in re.findall(rf"cni\.ran sandbox={pod} command=ADD .* ms=([0-9.]+)", node.log()))


def main() -> None:
    """Measures these figures alone."""
    figures = Figures()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with own_node(os.environ.get("TMPDIR", "/var/tmp")) as (node, directory):
        sandbox_rounds(node, directory, rounds, figures)
        if len(sys.argv) > 2:
            Path(sys.argv[2]).write_text(node.log())
    figures.tell()


if __name__ == "__main__":
    main()
