"""`kubectl drain` and single evictions move VirtualMachines by the webhook; disruption budgets protect them where the
webhook does not answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.control_planes import PODS, WEBHOOKS, Plane
from fakes.shop import Shop
from fakes.vm_nodes import VmNodes

from virtshim.cluster.api import below
from virtshim.cluster.controller import Controller
from virtshim.cluster.webhook import Webhook

ON_VOLUME = {
    "metadata": {"annotations": {"virtshim.io/state-volume": "/state"}},
    "spec": {"containers": [{"name": "vm", "image": "small"}]},
}
BUDGET = "disruption budget"


@pytest.mark.usefixtures("webhook", "has_kubectl")
def test_kubectl_empties_a_node_and_says_of_each_virtual_machine_what_happens(shop: Shop, nodes: VmNodes) -> None:
    home, away = nodes.names
    nodes.cordon(away)
    shop.create("live")
    shop.create("volume", ON_VOLUME)
    shop.create("saved", ON_VOLUME, drain="Save")
    shop.create("boots", drain="Restart")
    names = ("live", "volume", "saved", "boots")
    nodes.until(lambda: all(shop.runs_on(name) == home for name in names))
    nodes.cordon(away, is_cordoned=False)
    done = shop.drain(home)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes.until(lambda: all(shop.runs_on(name) == away for name in names))
    assert nodes.ran_on == {name: [home, away] for name in names}
    assert nodes.booted == {"live": 1, "volume": 1, "saved": 1, "boots": 2}
    assert "virtual machine live: it moves to another node" in done.stderr
    assert "virtual machine volume: its state goes to its volume" in done.stderr


@pytest.mark.usefixtures("webhook", "has_kubectl")
def test_a_virtual_machine_that_blocks_keeps_the_node_and_says_so(shop: Shop, nodes: VmNodes) -> None:
    home, _ = shop.started("db", drain="Block")
    done = shop.drain(home, seconds=7)
    assert done.returncode != 0
    assert "virtual machine db: its spec.drain is Block" in done.stderr
    assert shop.runs_on("db") == home


@pytest.mark.usefixtures("webhook", "has_kubectl")
def test_uncordon_half_way_leaves_it_on_one_node(shop: Shop, nodes: VmNodes) -> None:
    home, _ = shop.started("db")
    nodes.deaf.add("db")
    shop.drain(home, seconds=3)
    nodes.until(lambda: shop.status("db")["phase"] == "Moving")
    both = [one["metadata"]["name"] for one in shop.pods("db")]
    nodes.until(lambda: all(one["status"]["phase"] == "Running" for one in shop.pods("db")))
    assert [shop.evict(name)[0] for name in both] == [429, 429]
    assert shop.kubectl("uncordon", home).returncode == 0
    nodes.until(lambda: shop.runs_on("db") == home)
    assert (nodes.ran_on, nodes.booted) == ({"db": [home]}, {"db": 1})


@pytest.mark.usefixtures("webhook")
def test_no_room_leaves_it_where_it_is_with_the_schedulers_words(shop: Shop, nodes: VmNodes) -> None:
    home, away = shop.started("db")
    nodes.taint(away)
    nodes.cordon(home)
    assert shop.evict_vm("db")[0] == 429
    nodes.until(lambda: shop.condition("db", "Draining") == ("True", "Unschedulable"))
    nodes.until(lambda: "Unschedulable" in shop.reasons())
    assert "nodes are available" in shop.evict_vm("db")[1]
    assert nodes.ran_on == {"db": [home]}


@pytest.mark.usefixtures("webhook")
def test_one_that_cannot_move_stays_and_says_why(shop: Shop, nodes: VmNodes) -> None:
    nodes.passthrough.add("db")
    home, _ = shop.started("db")
    code, told = shop.evict_vm("db")
    assert (code, "cannot move: it has devices of the host" in told) == (429, True)
    assert shop.runs_on("db") == home


@pytest.mark.usefixtures("webhook")
def test_a_dry_run_changes_nothing(shop: Shop, nodes: VmNodes) -> None:
    shop.started("db")
    assert shop.evict_vm("db", "?dryRun=All")[0] == 429
    assert "eviction" not in shop.status("db")


@pytest.mark.usefixtures("webhook")
def test_pods_of_others_may_go(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    for name, labels in (("plain", {}), ("posing", {"virtshim.io/vm": "db"})):
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"containers": [{"name": "web", "image": "web"}], "nodeName": nodes.names[0]},
        }
        plane.admin.do("POST", below(PODS, shop.name), body)
        assert shop.evict(name)[0] in (200, 201)


@pytest.mark.usefixtures("webhook")
def test_without_the_webhook_the_budget_refuses(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    shop.started("db", drain="Block")
    plane.reach(1)  # where nobody listens
    nodes.until(lambda: "violate the pod's disruption budget" in shop.evict_vm("db")[1])
    assert shop.evict_vm("db")[0] == 429
    assert shop.runs_on("db")


def test_a_webhook_with_another_certificate_is_not_asked(
    shop: Shop, nodes: VmNodes, plane: Plane, webhook: Webhook
) -> None:
    """Until it has told its own, which it does by itself from time to time."""
    shop.started("db", drain="Block")
    (found,) = plane.admin.do("GET", f"{WEBHOOKS}/virtshim-evictions")["webhooks"]
    found["clientConfig"].pop("caBundle")
    plane.admin.do("PATCH", f"{WEBHOOKS}/virtshim-evictions", {"webhooks": [found]})
    nodes.until(lambda: BUDGET in shop.evict_vm("db")[1])
    webhook.tell_certificate()
    nodes.until(lambda: "spec.drain is Block" in shop.evict_vm("db")[1])


def test_two_controllers_trust_each_others_webhooks(
    shop: Shop,
    nodes: VmNodes,
    plane: Plane,
    controller_of: Callable[..., Controller],
    webhook_of: Callable[[Controller], Webhook],
) -> None:
    older = webhook_of(controller_of())
    newer = webhook_of(controller_of())
    shop.started("db", drain="Block")
    assert "spec.drain is Block" in shop.evict_vm("db")[1]
    newer.close()
    plane.reach(older.port)
    nodes.until(lambda: "spec.drain is Block" in shop.evict_vm("db")[1])


@pytest.mark.usefixtures("controller", "has_kubectl")
def test_the_plugins_verbs_wait_until_it_is_so(shop: Shop, nodes: VmNodes, pytestconfig: pytest.Config) -> None:
    plugin = (sys.executable, str(Path(pytestconfig.rootpath) / "deploy/kubectl-virt/kubectl-virt"))

    def virt(*words: str) -> str:
        done = shop.kubectl(*words, "-n", shop.name, program=plugin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    _, away = shop.started("db")
    virt("move", "db", away)
    assert shop.runs_on("db") == away
    virt("pause", "db")
    assert shop.status("db")["phase"] == "Paused"
    virt("start", "db")
    assert shop.runs_on("db") == away
    virt("restart", "db")
    assert nodes.booted["db"] == 2
    virt("stop", "db")
    assert shop.pods("db") == []
    assert virt("list").splitlines()[1].split()[:2] == ["db", "Stopped"]


@pytest.mark.usefixtures("controller", "has_kubectl")
def test_a_verb_that_is_not_done_in_time_says_what_happens(
    shop: Shop, nodes: VmNodes, pytestconfig: pytest.Config
) -> None:
    plugin = (sys.executable, str(Path(pytestconfig.rootpath) / "deploy/kubectl-virt/kubectl-virt"))
    shop.started("db")
    done = shop.kubectl("move", "db", "n9", "--timeout", "2", "-n", shop.name, program=plugin)
    assert done.returncode == 1
    assert "spec.moveTo: the cluster has no node n9" in done.stderr
    assert "the request stays" in done.stderr
