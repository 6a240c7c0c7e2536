"""Measures save and restore of a VM that outlives its pod, beside `virsh save` and `virsh restore` of the same domain,
and the restore beside a boot."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from bare import BareLibvirt
from bare_qemu import said_ms
from boot import boot_in_pod
from figures import Figures, timed
from node import Node
from podclient import PodClient, container_config, pod_config

_READY = b"virtshim-guest: ready"
_LASTING = {"virtshim.io/vm": "bench", "virtshim.io/on-stop": "save"}
_numbers = itertools.count(1)


def outlive_round(cri: PodClient, node: Node, bare: BareLibvirt, image: str, figures: Figures, number: int) -> None:
    """Both in turns; the order alternates from round to round."""
    ways: list[Callable[[], tuple[float, float]]] = [
        lambda: _ours(cri, node, image, figures),
        lambda: virsh_ms(cri, node, bare, image),
    ]
    first = number % 2
    found = {at: ways[at]() for at in (first, 1 - first)}
    for key, ours, theirs in zip(("save", "restore"), found[0], found[1], strict=True):
        figures.add(f"{key}_ms", ours, "ms")
        figures.add(f"virsh_{key}_ms", theirs, "ms")
        figures.add(f"{key}_ratio", ours / theirs, "ratio")


def _ours(cri: PodClient, node: Node, image: str, figures: Figures) -> tuple[float, float]:
    """Milliseconds of StopContainer and of StartContainer."""
    began = time.monotonic()
    pod, container = _pod(cri, node, image)
    cri.start(container)
    _agent_answers(cri, container)
    booted = time.monotonic() - began
    save = timed(lambda: cri.stop(container, 60))
    assert cri.status(container).reason == "Saved", cri.status(container)
    cri.remove_pod(pod)
    began = time.monotonic()
    pod, container = _pod(cri, node, image)
    restore = timed(lambda: cri.start(container))
    _agent_answers(cri, container)
    figures.add("restore_vs_boot", (time.monotonic() - began) / booted, "ratio")
    cri.stop(container, 0)
    cri.remove_pod(pod)
    return save, restore


def _pod(cri: PodClient, node: Node, image: str) -> tuple[str, str]:
    config = pod_config("lasting", f"{node.directory}/logs/lasting-{next(_numbers)}", _LASTING)
    pod = cri.run_pod(config)
    return pod, cri.create(pod, container_config(cri.pull(image)), config)


def _agent_answers(cri: PodClient, container: str) -> None:
    assert cri.exec_sync(container, "true").exit_code == 0


def virsh_ms(cri: PodClient, node: Node, bare: BareLibvirt, image: str) -> tuple[float, float]:
    """Milliseconds of save and restore of the same domain on plain QEMU, when its guest is up."""
    with boot_in_pod(cri, node, image, "like", {}) as (container, _):
        bare.define_like(container)
    os.truncate(bare.console_log, 0)  # a copy of the pod's
    bare.start()
    said_ms(bare.console_log, _READY, time.monotonic())
    file = Path(f"{bare.console_log}.save")
    try:
        return timed(lambda: bare.save(str(file))), timed(lambda: bare.restore(str(file)))
    finally:
        bare.remove()
        if file.exists():
            os.unlink(file)
