"""A move survives deaths on either node at any step: SIGKILL of virtshim, tapmanager, libvirtd or QEMU, and a reboot.
Afterwards the VM runs on the new node, there was never a second guest, its disk is the newest, and nothing is left on
the first node. The guest keeps its memory unless its QEMU, or its node, has died.

A first move counts the steps. `--all` takes each point of virtshim's two rows, and one point of each other row. Other runs take
one point of virtshim's rows."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from imageserver import serve_directory
from kill_points import strike
from leaks import Snapshot
from libvirtd_node import LibvirtdNode
from mortal_node import MortalNode
from own_libvirtd import missing
from peer_nodes import NAMES, PeerNodes
from podclient import pod_config
from traveller import Place, Strike, Traveller

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.outlive, pytest.mark.timeout(4 * 3600)]

SIDES = ("first", "second")
# The first node's tapmanager has nothing to do in a move.
OTHERS = [("tapmanager", "second"), *((who, side) for who in ("QEMU", "all by a reboot") for side in SIDES)]
FIRST_UIDS = (1_900_000_000, 1_910_000_000)


@contextlib.contextmanager
def travelling(guest_image: Path, make: Callable[[str, str, str], MortalNode]) -> Iterator[Traveller]:
    """`make`: a node, by its directory, the images' URL, and settings, the first of which are of [libvirt]."""
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="vs-moves-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    try:
        with serve_directory(guest_image.parent) as url, contextlib.ExitStack() as ending:
            peers, places, images = PeerNodes(directory), [], url.removeprefix("http://")
            for name, uid in zip(NAMES, FIRST_UIDS, strict=True):
                settings = f"first_vm_uid = {uid}\n{peers.settings(name)}"
                node = make(f"{directory}/{name[0]}", images, settings)
                ending.callback(node.end)
                node.up()
                places.append(Place(name, node))
                with node.client() as cri:  # the bridge comes with the first pod and stays
                    cri.remove_pod(cri.run_pod(pod_config("first", f"{directory}/{name[0]}/logs/first")))
            made = Traveller(*places, f"{images}/guest.qcow2")
            made.depart()
            yield made
            with made.at.node.client() as cri:
                made.at.remove(cri)
        left = before.settled(seconds=10)
        assert not left, "left behind: " + "; ".join(left)
    finally:
        shutil.rmtree(directory)


def usual_node(directory: str, images: str, settings: str) -> MortalNode:
    return MortalNode(directory, images, settings=f"[libvirt]\n{settings}")


def kill_along(traveller: Traveller, who: str, side: str, steps: list[str], *, every: bool) -> None:
    """One row. A QEMU, or a node, that dies before a step has died after the one before."""
    times = ("before", "after") if who in ("virtshim", "tapmanager", "libvirtd") else ("after",)
    points = [Strike(who, side, number, when) for number in range(1, len(steps) + 1) for when in times]

    def kill(point: Strike) -> bool:
        print(f"MOVE {side}: {who} dies {point.when} step {point.number} ({steps[point.number - 1]})")
        return traveller.move(point)

    strike(f"move {side} {who}", points, kill, every=every, at_least=lambda taken: taken // 3)


def test_a_move_survives_a_kill_of_either_daemon_at_any_step(guest_image: Path, every_point: bool) -> None:
    with travelling(guest_image, usual_node) as traveller:
        steps = traveller.steps(("virtshim",))
        for side in SIDES:
            kill_along(traveller, "virtshim", side, steps["virtshim", side], every=every_point)


@pytest.mark.full
def test_a_move_survives_a_death_of_tapmanager_qemu_or_the_node(guest_image: Path) -> None:
    """One point of each row: a point takes half a minute."""
    with travelling(guest_image, usual_node) as traveller:
        steps = traveller.steps(("virtshim", "tapmanager"))
        for who, side in OTHERS:
            mine = steps["tapmanager" if who == "tapmanager" else "virtshim", side]
            kill_along(traveller, who, side, mine, every=False)


@pytest.mark.full
def test_a_move_survives_a_death_of_either_nodes_libvirtd(guest_image: Path) -> None:
    if why := missing():
        pytest.skip(why)

    def node(directory: str, images: str, settings: str) -> MortalNode:
        return LibvirtdNode(directory, images, settings=settings)

    with travelling(guest_image, node) as traveller:
        steps = traveller.steps(("libvirtd",))
        for side in SIDES:
            kill_along(traveller, "libvirtd", side, steps["libvirtd", side], every=False)
