"""Measures the guest's own time: how much later the same image is ready in a pod's VM than in bare QEMU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bare_qemu import boot_ms, said_ms
from figures import Figures
from node import Node
from podclient import PodClient, container_config, pod_config

_MEMORY = 128 << 20
_READY = b"virtshim-guest: ready"


def boot_round(cri: PodClient, node: Node, image: str, file: Path, figures: Figures, number: int) -> None:
    """One boot of each, one after the other; the order alternates from round to round."""
    if number % 2:
        ours, bare = _in_a_pod(cri, node, image, number), boot_ms(file, _MEMORY, _READY)
    else:
        bare, ours = boot_ms(file, _MEMORY, _READY), _in_a_pod(cri, node, image, number)
    figures.add("boot_ms", ours, "ms")
    figures.add("bare_boot_ms", bare, "ms")
    figures.add("boot_ratio", ours / bare, "ratio")


def _in_a_pod(cri: PodClient, node: Node, image: str, number: int) -> float:
    with boot_in_pod(cri, node, image, f"boot-{number}", {}) as (_, took):
        return took


@contextlib.contextmanager
def boot_in_pod(
    cri: PodClient,
    node: Node,
    image: str,
    name: str,
    volumes: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, float]]:
    """The container, which runs inside the block, and the milliseconds since StartContainer answered. `volumes`: path in
    the guest -> directory."""
    config = pod_config(name, f"{node.directory}/logs/{name}", annotations)
    pod = cri.run_pod(config)
    try:
        wanted = container_config(cri.pull(image), _MEMORY)
        wanted.linux.resources.cpu_shares = 1024  # an ordinary process's weight, as the bare QEMU has
        for inside, directory in volumes.items():
            wanted.mounts.add(container_path=inside, host_path=directory)
        made = cri.create(pod, wanted, config)
        cri.start(made)
        yield made, said_ms(f"{node.directory}/state/containers/{made}/console.log", _READY, time.monotonic())
    finally:
        cri.remove_pod(pod)
