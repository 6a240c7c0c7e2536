"""VirtualMachine objects on two real nodes: their start beside a bare pod's, a drain beside moves by hand, and what the death of
a program costs a move. The API server and the kubelets are the tests' stand-ins, the same for both sides of a ratio."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cluster_of_nodes import ClusterOfNodes, cluster_of
from fakes.control_planes import PODS
from figures import Figures
from own_node import two_nodes
from podclient import PodClient

from virtshim.cluster.api import VMS, below

_FLEET: Final = ("vm-0", "vm-1", "vm-2", "vm-3")
_AT_ONCE: Final = 2
_numbers = itertools.count()


def drain_rounds(image: str, rounds: int, figures: Figures) -> None:
    with (
        two_nodes() as (here, there),
        PodClient(here.socket) as first,
        PodClient(there.socket) as second,
        tempfile.TemporaryDirectory(prefix="virtshim-cluster-") as place,
        cluster_of(Path(place), {"here": (here, first), "there": (there, second)}) as cluster,
    ):
        spec = {"containers": [{"name": "vm", "image": image, "resources": {"limits": {"memory": "128Mi"}}}]}
        for number in range(rounds + 1):
            # The first round fills caches.
            _starts(cluster, {"spec": spec}, Figures() if number == 0 else figures)
        for name in _FLEET:
            cluster.shop.create(name, {"spec": spec}, drain="Move")
        for name in _FLEET:
            cluster.until(
                lambda name=name: cluster.shop.condition(name, "Movable")[0] == "True" and cluster.boots(name)
            )
        for _ in range(rounds):
            _drains(cluster, figures)
            _kills(cluster, figures)


def _seconds(cluster: ClusterOfNodes, begin: Callable[[], object], is_over: Callable[[], Any]) -> float:
    began = time.monotonic()
    begin()
    cluster.until(is_over)
    return time.monotonic() - began


def _starts(cluster: ClusterOfNodes, template: dict[str, Any], figures: Figures) -> None:
    shop, admin, name = cluster.shop, cluster.plane.admin, f"start-{next(_numbers)}"
    pod = {"metadata": {"name": name}, **template}
    path, vm = below(PODS, shop.name, name), below(VMS, shop.name, name)
    bare = _seconds(
        cluster,
        lambda: admin.do("POST", below(PODS, shop.name), pod),
        lambda: admin.do("GET", path).get("status", {}).get("phase") == "Running",
    )
    admin.do("DELETE", path, {"gracePeriodSeconds": 0})
    cluster.until(lambda: not sum(cluster.qemus().values()))
    ours = _seconds(cluster, lambda: shop.create(name, template), lambda: shop.status(name).get("phase") == "Running")
    shop.patch(name, state="Stopped")
    admin.do("DELETE", vm)
    cluster.until(lambda: not shop.vm(name) and not sum(cluster.qemus().values()))
    figures.add("vm_object_ms", ours * 1000, "ms")
    figures.add("vm_bare_pod_ms", bare * 1000, "ms")
    figures.add("vm_object_ratio", ours / bare, "ratio")


def _drains(cluster: ClusterOfNodes, figures: Figures) -> None:
    """All go from the first node by a drain, and back by hand."""
    shop, waiting = cluster.shop, list(_FLEET)
    drained = _seconds(
        cluster, lambda: cluster.drain("here"), lambda: all(_is_on(cluster, one, "there") for one in _FLEET)
    )
    cluster.uncordon("here")
    _forget_moves(cluster)
    moving: list[str] = []

    def by_hand() -> bool:
        moving[:] = [one for one in moving if not _is_on(cluster, one, "here")]
        while waiting and len(moving) < _AT_ONCE:
            moving.append(waiting.pop())
            shop.patch(moving[-1], moveTo="here")
        return not moving

    moved = _seconds(cluster, lambda: None, by_hand)
    figures.add("drain_s", drained, "s")
    figures.add("drain_by_hand_s", moved, "s")
    figures.add("drain_ratio", drained / moved, "ratio")


def _kills(cluster: ClusterOfNodes, figures: Figures) -> None:
    """One VM moves by hand, first without a kill, then with each of the programs killed when it has begun to move."""
    undisturbed = _move(cluster, lambda: None)
    for program in (cluster.controller, *cluster.agents.values()):
        figures.add("converge_s", max(0.0, _move(cluster, program.killed) - undisturbed), "s")


def _move(cluster: ClusterOfNodes, meanwhile: Callable[[], object]) -> float:
    """Seconds from the move's begin to its end."""
    shop, name = cluster.shop, _FLEET[0]
    home = shop.runs_on(name)
    (away,) = [one for one in cluster.names if one != home]
    _forget_moves(cluster)
    shop.patch(name, moveTo=away)
    cluster.until(lambda: shop.status(name)["phase"] == "Moving")
    return _seconds(cluster, meanwhile, lambda: _is_on(cluster, name, away))


def _is_on(cluster: ClusterOfNodes, name: str, node: str) -> bool:
    return cluster.shop.runs_on(name) == node


def _forget_moves(cluster: ClusterOfNodes) -> None:
    """Only a new value of moveTo is a request."""
    for name in _FLEET:
        cluster.shop.patch(name, moveTo=None)
    cluster.until(lambda: not any(cluster.shop.status(name)["record"].get("movedTo") for name in _FLEET))
