"""Measures how long the guest of a VM stands still that moves to another node while it runs, beside `virsh save` and
`virsh restore` of the same domain."""

from __future__ import annotations

import subprocess

from bare import BareLibvirt
from ears import TALK, Ears, console
from figures import Figures
from node import VIRTSHIM, Node
from outlive import virsh_ms
from own_node import two_nodes
from podclient import PodClient, container_config, pod_config

_VM = {"virtshim.io/vm": "bench"}
_LIMIT = 120.0


def move_rounds(directory: str, cri: PodClient, node: Node, image: str, rounds: int, figures: Figures) -> None:
    """`directory`, `node`, `cri`: of the measurement, where the bare VM is."""
    with (
        two_nodes() as (here, there),
        BareLibvirt(directory, node) as bare,
        PodClient(here.socket) as first,
        PodClient(there.socket) as second,
    ):
        for number in range(1, rounds + 1):
            theirs = sum(virsh_ms(cri, node, bare, image))
            ours = _standstill((first, here), (second, there), image, number)
            figures.add("move_standstill_ms", ours, "ms")
            figures.add("virsh_save_and_restore_ms", theirs, "ms")
            figures.add("move_standstill_ratio", ours / theirs, "ratio")


def _standstill(first: tuple[PodClient, Node], second: tuple[PodClient, Node], image: str, number: int) -> float:
    """Milliseconds between the guest's last word on one node and its first on the other."""
    pod, container = _pod(*first, image, number, _VM)
    first[0].start(container)
    assert first[0].exec_sync(container, "sh", "-c", TALK).exit_code == 0
    new_pod, new = _pod(*second, image, number, {**_VM, "virtshim.io/restore-from": "here"})
    words = [console(first[1].directory, container), console(second[1].directory, new)]
    with Ears(words) as ears:
        second[0].start(new)
        ears.wait_for_second(_LIMIT)
    second[0].stop(new, 0)
    for client, one in ((second[0], new_pod), (first[0], pod)):
        client.remove_pod(one)
    for _, node in (first, second):
        remove = [*VIRTSHIM, "vms", "rm", "--socket", node.socket, "default/bench"]
        subprocess.run(remove, check=True, stdout=subprocess.DEVNULL)
    return ears.gap_ms()


def _pod(client: PodClient, node: Node, image: str, number: int, annotations: dict[str, str]) -> tuple[str, str]:
    config = pod_config("moving", f"{node.directory}/logs/moving-{number}", annotations)
    pod = client.run_pod(config)
    return pod, client.create(pod, container_config(client.pull(image)), config)
