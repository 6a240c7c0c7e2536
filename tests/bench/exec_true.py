"""ExecSync of `true` in a guest whose agent is up."""

from __future__ import annotations

import time
from collections.abc import Callable

from node import Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb


def exec_rounds(cri: PodClient, node: Node, image: str, rounds: int, add: Callable[[str, float, str], None]) -> None:
    """Calls `add(key, value, unit)` once for the boot, and once for each round. `exec_ready_ms`: from the start to the
    first answer."""
    config = pod_config("bench-exec", f"{node.directory}/logs/exec-{time.monotonic_ns()}")
    pod = cri.run_pod(config)
    try:
        made = cri.create(pod, container_config(cri.pull(image)), config)
        cri.start(made)
        add("exec_ready_ms", _true(cri, made), "ms")
        for _ in range(rounds):
            add("exec_true_ms", _true(cri, made), "ms")
    finally:
        cri.remove_pod(pod)


def _true(cri: PodClient, container: str) -> float:
    """Runs `true`; milliseconds."""
    started = time.monotonic()
    answer = cri.runtime.ExecSync(pb.ExecSyncRequest(container_id=container, cmd=["true"]), timeout=120)
    assert answer.exit_code == 0, answer
    return (time.monotonic() - started) * 1000
