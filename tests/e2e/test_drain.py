"""`kubectl drain` empties a node with VirtualMachine objects. The programs are real, there are two nodes, and the
guests count in their memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_of_nodes import ClusterOfNodes, cluster_of
from test_outlive import COUNTER

from virtshim.cluster.api import VMS, below

pytestmark = [pytest.mark.e2e, pytest.mark.outlive]

# VM -> what its drain is.
FLEET = {"live": "Move", "cold": "Move", "saved": "Save", "blocked": "Block"}
ON_VOLUME = ("cold", "saved")
MOVING = ("live", "cold", "saved")


@pytest.fixture
def cluster(cri, node, other_node, tmp_path: Path) -> Iterator[ClusterOfNodes]:
    other, client = other_node
    (tmp_path / "cluster").mkdir()
    with cluster_of(tmp_path / "cluster", {"here": (node, cri), "there": (other, client)}) as made:
        yield made


class Fleet:
    """VMs of a cluster, each of which counts and has a note in its memory."""

    def __init__(self, cluster: ClusterOfNodes, image: str, volumes: Path) -> None:
        self.cluster, self.shop = cluster, cluster.shop
        self._image, self._volumes = image, volumes
        self.boots: dict[str, str] = {}
        self.reached: dict[str, int] = {}

    def start(self, *names: str) -> None:
        """On the first node."""
        for name in names:
            self.shop.create(name, self._template(name), drain=FLEET[name])
        for name in names:
            self.cluster.until(lambda name=name: self.shop.runs_on(name) and self.cluster.counts(name))
            (self.boots[name],) = self.cluster.boots(name).values()
            self.cluster.until(lambda name=name: self.shop.condition(name, "Movable")[0] in ("True", "False"))
        assert {self.shop.runs_on(name) for name in names} == {"here"}
        self.note()

    def note(self) -> None:
        """How far each has counted."""
        self.reached = {name: self.cluster.counts(name)[-1] for name in self.boots}

    def run_on(self, node: str, *names: str) -> bool:
        return all(self.shop.runs_on(name) == node for name in names)

    def go_on(self) -> None:
        """Each runs once, in the boot that it had, and counts on."""
        for name, boot in self.boots.items():
            home = self.shop.runs_on(name)
            assert self.cluster.boots(name) == {home: boot}
            self.cluster.until(lambda name=name: self.cluster.counts(name)[-1:] > [self.reached[name] + 2])
        assert sum(self.cluster.qemus().values()) == len(self.boots)

    def delete(self) -> None:
        """Nothing is left of them anywhere, and nothing was wrong."""
        for name in self.boots:
            self.shop.plane.admin.do("DELETE", below(VMS, self.shop.name, name))
        self.cluster.until(lambda: not any(self.shop.vm(name) or self.shop.pods(name) for name in self.boots))
        assert self.shop.budgets() == []
        assert self.cluster.kept() == {"here": [], "there": []}
        assert self.cluster.qemus() == {"here": 0, "there": 0}
        assert [one["message"] for one in self.cluster.events() if one["type"] == "Warning"] == []

    def _template(self, name: str) -> dict:
        container = {
            "name": "vm",
            "image": self._image,
            "command": ["/bin/sh", "-c", COUNTER],
            "resources": {"limits": {"memory": "128Mi"}},
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": 60}
        if name not in ON_VOLUME:
            return {"spec": spec}
        volume = self._volumes / name
        volume.mkdir()
        container["volumeMounts"] = [{"name": "state", "mountPath": "/state"}]
        spec["volumes"] = [{"name": "state", "hostPath": {"path": str(volume)}}]
        return {"metadata": {"annotations": {"virtshim.io/state-volume": "/state"}}, "spec": spec}


@pytest.fixture
def fleet(cluster: ClusterOfNodes, image_url: str, tmp_path: Path) -> Fleet:
    return Fleet(cluster, f"{image_url}/guest.qcow2", tmp_path)


def told(cluster: ClusterOfNodes, name: str) -> set[str]:
    """The events of a VM, without the names of its pods."""
    found = [one["message"] for one in cluster.events() if one["involvedObject"]["name"] == name]
    return {re.sub(rf"{name}-\w+", name, one) for one in found}


@pytest.mark.timeout(900)
def test_a_drain_empties_the_node_whoever_is_killed_meanwhile(cluster, fleet):
    """Each VM does what its object says, and the answers say so."""
    fleet.start(*FLEET)
    before = [pod.container for _, pod in cluster.pods("blocked")]
    drain = cluster.drain("here")
    cluster.until(lambda: fleet.shop.status("live")["phase"] == "Moving")
    for program in (cluster.controller, *cluster.agents.values()):
        program.killed()
    cluster.until(lambda: fleet.run_on("there", *MOVING))
    fleet.go_on()
    assert [pod.container for _, pod in cluster.pods("blocked")] == before
    assert fleet.run_on("here", "blocked")
    assert "virtual machine live: it moves to another node" in drain.said
    assert "virtual machine cold: its state goes to its volume, and it continues on another node" in drain.said
    assert "virtual machine saved" not in drain.said, "its eviction is allowed"
    assert "virtual machine blocked: its spec.drain is Block; stop it (kubectl virt stop)" in drain.said
    assert told(cluster, "live") >= {
        "node here is drained: it moves from node here",
        "the virtual machine runs on node there now (pod live)",
    }
    for name in ON_VOLUME:
        assert fleet.shop.condition(name, "Saved") == ("False", "NoMemory"), "it has continued"
    fleet.shop.patch("blocked", state="Stopped")
    cluster.until(lambda: drain.is_done)
    fleet.delete()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_drain_that_is_called_off_leaves_each_vm_on_one_node(cluster, fleet):
    fleet.start(*FLEET)
    drain = cluster.drain("here")
    cluster.until(lambda: fleet.shop.status("live")["phase"] == "Moving")
    drain.cancel()
    cluster.uncordon("here")
    cluster.until(lambda: all(fleet.shop.runs_on(name) for name in FLEET))
    fleet.go_on()
    for name in ON_VOLUME:
        assert f"pod {name} ends: its state goes to its volume" in told(cluster, name)
    again = cluster.drain("here")
    cluster.until(lambda: fleet.run_on("there", *MOVING))
    again.cancel()
    fleet.go_on()
    for name in FLEET:
        fleet.shop.patch(name, state="Stopped")
    cluster.until(lambda: not any(fleet.shop.pods(name) for name in FLEET))
    fleet.delete()
