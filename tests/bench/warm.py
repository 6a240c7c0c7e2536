"""Measures a pod whose guest comes from a template beside one whose guest boots: the time until its command runs, and
the guest's memory that no other VM shares."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from figures import Figures
from node import Node
from own_node import own_node
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

_CONFIG = "[templates]\nmax_bytes = 1073741824\n"
_MEMORY = 256 << 20
_COMMAND = ("/bin/sh", "-c", "echo begun; sleep 10000")
# Seconds for a guest to become quiet.
_QUIET = 5.0
_LONGEST = 600.0
_numbers = itertools.count(1)


def warm_rounds(image: str, rounds: int, figures: Figures) -> None:
    """On a node of its own, which allows templates. The order alternates from round to round."""
    with own_node(config=_CONFIG) as (node, _), PodClient(node.socket) as cri:
        _measured(cri, node, image, warm=True)
        wait_until(lambda: "template.made" in node.log(), _LONGEST, "the template is made")
        for number in range(rounds):
            found = {warm: _measured(cri, node, image, warm=warm) for warm in (number % 2 == 0, number % 2 == 1)}
            for at, key in ((True, "warm"), (False, "cold")):
                figures.add(f"{key}_begun_ms", found[at][0], "ms")
                figures.add(f"{key}_private_mib", found[at][1] / (1 << 20), "MiB")
            figures.add("warm_ratio", found[True][0] / found[False][0], "ratio")
            figures.add("clone_private_ratio", found[True][1] / found[False][1], "ratio")


def _measured(cri: PodClient, node: Node, image: str, *, warm: bool) -> tuple[float, int]:
    """Milliseconds until the command runs, and the private bytes of the guest's memory once it is idle."""
    annotations = {"virtshim.io/warm-start": "true"} if warm else {}
    config = pod_config("warm", f"{node.directory}/logs/warm-{next(_numbers)}", annotations)
    wanted = container_config(cri.pull(image), _MEMORY)
    wanted.command.extend(_COMMAND)
    began = time.monotonic()
    pod = cri.run_pod(config)
    container = cri.create(pod, wanted, config)
    cri.start(container)
    wait_for_log(cri.status(container).log_path, "begun", _LONGEST)
    took = (time.monotonic() - began) * 1000
    time.sleep(_QUIET)
    (pid,) = Path(node.directory, "libvirt/run/qemu").glob(f"virtshim-{container[:12]}*.pid")
    private = private_bytes(Path(f"/proc/{pid.read_text().strip()}/smaps").read_text(), _MEMORY)
    cri.remove_pod(pod)
    return took, private


def private_bytes(smaps: str, size: int) -> int:
    """Of the mapping of that size. Pages of a template are the file's, whoever else maps them."""
    found = 0
    is_memory = False
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if name == "Size":
            is_memory = int(value.split()[0]) << 10 == size
        elif name == "Anonymous" and is_memory:
            found += int(value.split()[0]) << 10
    return found
