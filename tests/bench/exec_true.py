"""Measures ExecSync of `true` in a guest whose agent is up, compared with the agent's own guest-exec of `true` in a
bare QEMU."""

from __future__ import annotations

import time
from pathlib import Path

from bare_qemu import BareAgent
from figures import Figures
from node import Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb

_MEMORY = 128 << 20


def exec_rounds(cri: PodClient, node: Node, image: str, file: Path, rounds: int, figures: Figures) -> None:
    """Once for the boot, and once for each round. `exec_ready_ms`: from the start to the first answer. Both guests are idle
    otherwise; which one runs its command first changes from round to round."""
    config = pod_config("bench-exec", f"{node.directory}/logs/exec-{time.monotonic_ns()}")
    pod = cri.run_pod(config)
    try:
        made = cri.create(pod, container_config(cri.pull(image), _MEMORY), config)
        cri.start(made)
        figures.add("exec_ready_ms", _true(cri, made), "ms")
        with BareAgent.of(file, _MEMORY) as bare:
            bare.true_ms()  # caches, as the pod's guest has them by now
            for number in range(rounds):
                if number % 2:
                    plain, ours = bare.true_ms(), _true(cri, made)
                else:
                    ours, plain = _true(cri, made), bare.true_ms()
                figures.add("exec_true_ms", ours, "ms")
                figures.add("bare_exec_true_ms", plain, "ms")
                figures.add("exec_ratio", ours / plain, "ratio")
    finally:
        cri.remove_pod(pod)


def _true(cri: PodClient, container: str) -> float:
    """Runs `true`; milliseconds."""
    started = time.monotonic()
    answer = cri.runtime.ExecSync(pb.ExecSyncRequest(container_id=container, cmd=["true"]), timeout=120)
    assert answer.exit_code == 0, answer
    return (time.monotonic() - started) * 1000
