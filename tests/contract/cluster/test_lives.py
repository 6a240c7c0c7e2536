"""A VirtualMachine becomes what its users ask for, from its creation to its deletion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.control_planes import PODS, Plane
from fakes.shop import Shop
from fakes.vm_nodes import VmNodes

from virtshim.cluster.api import VMS, below
from virtshim.cluster.controller import Controller

SAVING = {
    "metadata": {"annotations": {"virtshim.io/on-stop": "save"}},
    "spec": {"containers": [{"name": "vm", "image": "small"}]},
}

pytestmark = pytest.mark.usefixtures("controller")


def test_it_runs_in_a_pod_that_has_its_name(shop: Shop, nodes: VmNodes) -> None:
    home, _ = shop.started("db")
    (pod,) = shop.pods("db")
    assert pod["metadata"]["name"].startswith("db-")
    assert (pod["spec"]["hostname"], pod["spec"]["nodeName"]) == ("db", home)
    assert shop.budgets() == ["virtshim-db"]
    assert shop.condition("db", "Movable") == ("True", "Movable")
    assert nodes.booted == {"db": 1}


def test_it_stops_and_starts_where_its_disk_is(shop: Shop, nodes: VmNodes) -> None:
    home, _ = shop.started("db")
    shop.patch("db", state="Stopped")
    nodes.until(lambda: shop.status("db")["phase"] == "Stopped" and not shop.pods("db"))
    shop.patch("db", state="Running")
    nodes.until(lambda: shop.runs_on("db"))
    assert nodes.ran_on == {"db": [home]}
    assert nodes.booted == {"db": 2}


def test_it_is_paused_and_continues(shop: Shop, nodes: VmNodes) -> None:
    shop.started("db")
    shop.patch("db", state="Paused")
    nodes.until(lambda: shop.status("db")["phase"] == "Paused")
    assert shop.condition("db", "Ready") == ("False", "Paused")
    shop.patch("db", state="Running")
    nodes.until(lambda: shop.runs_on("db"))
    assert nodes.booted == {"db": 1}


def test_a_restart_is_done_once_and_takes_the_new_template(shop: Shop, nodes: VmNodes) -> None:
    shop.started("db")
    (before,) = shop.pods("db")
    changed = {"spec": {"containers": [{"name": "vm", "image": "large"}]}}
    shop.patch("db", template=changed)
    nodes.until(lambda: shop.status("db").get("templateWaits"))
    shop.patch("db", restartedAt="now")
    nodes.until(lambda: shop.runs_on("db") and shop.pods("db")[0]["metadata"]["uid"] != before["metadata"]["uid"])
    assert shop.pods("db")[0]["spec"]["containers"][0]["image"] == "large"
    nodes.until(lambda: "templateWaits" not in shop.status("db"))


def test_a_saved_one_continues_on_the_node_that_has_its_memory(shop: Shop, nodes: VmNodes) -> None:
    home, _ = shop.started("db", SAVING, drain="Restart")
    shop.patch("db", state="Saved")
    nodes.until(lambda: shop.status("db")["phase"] == "Saved" and not shop.pods("db"))
    assert shop.status("db")["savedState"]["nodeName"] == home
    nodes.cordon(home)
    shop.patch("db", state="Running")
    nodes.until(lambda: shop.condition("db", "Ready") == ("False", "Unschedulable"))
    nodes.cordon(home, is_cordoned=False)
    nodes.until(lambda: shop.runs_on("db"))
    assert (nodes.ran_on, nodes.booted) == ({"db": [home]}, {"db": 1})


def test_it_moves_once_to_the_node_that_the_object_names(shop: Shop, nodes: VmNodes) -> None:
    home, away = shop.started("db")
    shop.patch("db", moveTo=away)
    nodes.until(lambda: shop.runs_on("db") == away and shop.status("db")["record"].get("movedTo") == away)
    assert (nodes.ran_on, nodes.booted) == ({"db": [home, away]}, {"db": 1})
    assert {"Moves", "Moved"} <= shop.reasons()


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_nothing_is_left_when_it_is_deleted(shop: Shop, nodes: VmNodes, plane: Plane, propagation: str) -> None:
    shop.started("db")
    assert shop.vm("db")["metadata"]["finalizers"] == ["virtshim.io/kept"]
    plane.admin.do("DELETE", below(VMS, shop.name, "db"), {"propagationPolicy": propagation})
    nodes.until(lambda: not shop.vm("db"))
    nodes.until(lambda: not shop.pods("db") and not shop.budgets())
    assert [one.vms for one in nodes.virtshims.values()] == [{}, {}]


def test_nothing_is_left_on_a_node_that_it_has_moved_from(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    """The agent there may be slower than the one of the node that has the disk."""
    home, away = shop.started("db")
    shop.patch("db", moveTo=away)
    nodes.until(lambda: shop.runs_on("db") == away)
    shop.patch("db", state="Stopped")
    nodes.until(lambda: shop.status("db")["phase"] == "Stopped" and not shop.pods("db"))
    plane.admin.do("DELETE", below(VMS, shop.name, "db"))
    slow = next(one for one in nodes.agents if one.node == home)
    nodes.agents.remove(slow)
    nodes.until(lambda: list(shop.status("db")["nodes"]) == [home])
    nodes.agents.append(slow)
    nodes.until(lambda: not shop.vm("db"))
    assert [one.vms for one in nodes.virtshims.values()] == [{}, {}]


def test_a_node_that_is_gone_does_not_hold_the_object(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    home, _ = shop.started("db")
    shop.patch("db", state="Stopped")
    nodes.until(lambda: shop.status("db")["phase"] == "Stopped" and home in shop.status("db")["nodes"])
    nodes.leave(home)
    plane.admin.do("DELETE", below(VMS, shop.name, "db"))
    nodes.until(lambda: not shop.vm("db"))
    nodes.until(lambda: "NodeGone" in shop.reasons())


def test_a_pod_that_admission_refuses_is_told_on_the_object(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    """The namespace allows only pods that are as restricted as can be."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    plane.admin.do("PATCH", f"/api/v1/namespaces/{shop.name}", label)
    shop.create("db")
    nodes.until(lambda: "PodRefused" in shop.reasons())
    (event,) = [one for one in plane.admin.all("/api/v1/events", shop.name) if one["reason"] == "PodRefused"][:1]
    assert "restricted" in event["message"]
    nodes.until(lambda: shop.condition("db", "Ready") == ("False", "PodRefused"))
    assert shop.status("db")["record"]["podRefusal"]["tries"] >= 1


def test_pods_of_others_are_never_touched(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "db-other", "labels": {"virtshim.io/vm": "db"}},
        "spec": {"containers": [{"name": "web", "image": "web"}], "nodeName": nodes.names[0]},
    }
    plane.admin.do("POST", below(PODS, shop.name), body)
    shop.create("db")
    nodes.until(lambda: shop.status("db").get("phase") == "Running")
    shop.patch("db", state="Stopped")
    nodes.until(lambda: shop.status("db")["phase"] == "Stopped")
    assert [one["metadata"]["name"] for one in shop.pods("db")] == ["db-other"]


def test_two_controllers_do_no_harm(shop: Shop, nodes: VmNodes, controller_of: Callable[..., Controller]) -> None:
    controller_of()
    _, away = shop.started("db")
    shop.patch("db", moveTo=away)
    nodes.until(lambda: shop.runs_on("db") == away)
    shop.patch("db", restartedAt="now")
    nodes.until(lambda: nodes.booted["db"] == 2 and shop.runs_on("db"))
    assert len(shop.pods("db")) == 1
