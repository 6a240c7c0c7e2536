"""The agent reports the node's VMs to an API server. The test scripts virtshim's answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster_rights import ShippedRights
from fakes.kubernetes_api import RESOURCES, Asked, KubernetesApi, Refused
from fakes.node_vms import PAUSED, Virtshim, lasting, put_vm_with_pod
from fakes.waiting import eventually

from virtshim.cluster.agent import Agent
from virtshim.cri.operator_client import SavedMemory
from virtshim.kubeapi.kubeconfig import access
from virtshim.system.clock import SystemClock

AGENT = "system:serviceaccount:virtshim-cluster:virtshim-agent"


@pytest.fixture
def rights() -> ShippedRights:
    return ShippedRights({AGENT: {"authentication.kubernetes.io/node-name": ["n1"]}})


@pytest.fixture
def virtshim() -> Virtshim:
    return Virtshim()


@pytest.fixture
def agent(api: KubernetesApi, virtshim: Virtshim) -> Iterator[Agent]:
    """Of node n1, with a VirtualMachine that has a pod there."""
    put_vm_with_pod(api)
    api.tokens["agent"] = AGENT
    config = api.kubeconfig("agent")
    made = Agent("n1", "virtshim-cluster", lambda: access(config), SystemClock(), virtshim.open)
    made.start()
    yield made
    made.close()


def conditions(api: KubernetesApi) -> dict[str, tuple[str, str]]:
    found = api.one("pods", "shop", "db-1")["status"]["conditions"]
    return {one["type"]: (one["status"], one.get("reason", "")) for one in found}


def annotate(api: KubernetesApi, agent: Agent, **changes: str) -> None:
    """Returns when the agent has seen it."""
    names = {f"cluster.virtshim.io/{name}": value for name, value in changes.items()}
    names |= {"virtshim.io/restore-from": changes["source"]} if "source" in changes else {}
    api.edit("pods", "shop", "db-1", lambda one: one["metadata"].update(annotations=names))
    seen(api, agent)


def seen(api: KubernetesApi, agent: Agent) -> None:
    """Returns when the agent's watches have brought everything."""
    end = time.monotonic() + 20
    for collection, plural, name in ((agent.pods, "pods", "db-1"), (agent.vms, "virtualmachines", "db")):
        wanted = api.one(plural, "shop", name)["metadata"]["resourceVersion"]
        while (collection.get("shop", name) or {"metadata": {}})["metadata"].get("resourceVersion") != wanted:
            assert time.monotonic() < end
            with api.news:
                api.news.wait(0.02)


def test_it_says_that_the_virtual_machine_can_move_and_leaves_kubelets_conditions(
    api: KubernetesApi, agent: Agent
) -> None:
    agent.look()
    assert conditions(api) == {"Ready": ("True", ""), "virtshim.io/movable": ("True", "Movable")}
    assert api.one("virtualmachines", "shop", "db")["status"]["nodes"] == {"n1": {}}
    (lease,) = api.all("leases")
    assert (lease["metadata"]["name"], bool(lease["spec"]["renewTime"])) == ("virtshim-agent.n1", True)


def test_nothing_is_written_twice(api: KubernetesApi, agent: Agent) -> None:
    agent.look()
    seen(api, agent)
    before = len(api.asked)
    agent.look()
    assert api.asked[before:] == []


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"granted": {"passthrough": [{}]}}, "HostDevices"),
        ({"volumes": [{"guest": "/data"}]}, "SharedVolumes"),
        ({"empty_disks": [{}]}, "EmptyDisks"),
    ],
)
def test_it_says_why_a_virtual_machine_cannot_move(
    api: KubernetesApi, agent: Agent, virtshim: Virtshim, record: dict[str, Any], reason: str
) -> None:
    virtshim.facts = {"container": {"record": record, "status": {}}, "vm": {"power": "running"}}
    agent.look()
    assert conditions(api)["virtshim.io/movable"] == ("False", reason)


@pytest.mark.parametrize(
    ("vm", "said"),
    [
        ({"comes_from": "n2"}, ("False", "Moving")),
        ({"comes_from": "n2", "undecided": True}, ("False", "Undecided")),
        ({}, ("True", "Arrived")),
    ],
)
def test_it_says_how_far_a_move_is(
    api: KubernetesApi, agent: Agent, virtshim: Virtshim, vm: dict[str, Any], said: tuple[str, str]
) -> None:
    annotate(api, agent, source="n2")
    virtshim.vms = [lasting(**vm)]
    agent.look()
    assert conditions(api)["virtshim.io/arrived"] == said


def test_it_says_that_a_virtual_machine_has_moved_away(api: KubernetesApi, agent: Agent, virtshim: Virtshim) -> None:
    virtshim.vms = [lasting(moved_to="n2")]
    agent.look()
    assert conditions(api)["virtshim.io/moved"] == ("True", "Moved")
    assert api.one("virtualmachines", "shop", "db")["status"]["nodes"] == {"n1": {}}, "a record of it stays"


def test_it_pauses_and_resumes_on_request(api: KubernetesApi, agent: Agent, virtshim: Virtshim) -> None:
    annotate(api, agent, pause="true")
    agent.look()
    assert conditions(api)["virtshim.io/paused"] == ("True", "Requested")
    assert conditions(api)["virtshim.io/movable"] == ("False", "NotRunning"), "as it is after the pause"
    annotate(api, agent)
    agent.look()
    assert (virtshim.done, conditions(api)["virtshim.io/paused"]) == (["pause", "resume"], ("False", "Resumed"))
    assert conditions(api)["virtshim.io/movable"] == ("True", "Movable")


def test_what_an_operator_has_paused_is_shown_and_not_undone(
    api: KubernetesApi, agent: Agent, virtshim: Virtshim
) -> None:
    virtshim.facts = PAUSED
    for _ in range(2):
        agent.look()
        seen(api, agent)
    assert (virtshim.done, conditions(api)["virtshim.io/paused"]) == ([], ("True", "Operator"))


def test_a_forced_take_needs_the_annotation(api: KubernetesApi, agent: Agent, virtshim: Virtshim) -> None:
    virtshim.vms = [lasting(comes_from="n2", undecided=True)]
    agent.look()
    assert virtshim.done == []
    annotate(api, agent, take="true", source="n2")
    agent.look()
    assert virtshim.done == ["take"]


def test_a_saved_memory_is_told_and_taken_back(api: KubernetesApi, agent: Agent, virtshim: Virtshim) -> None:
    virtshim.vms = [lasting(pod="", pod_id="", vm_id="", saved=SavedMemory(7, 10.0, 20.0, taken=False))]
    agent.look()
    nodes = api.one("virtualmachines", "shop", "db")["status"]["nodes"]
    assert nodes == {"n1": {"savedAt": 10.0, "savedBytes": 7, "lapsesAt": 20.0}}
    seen(api, agent)
    written = api.one("virtualmachines", "shop", "db")["metadata"]["resourceVersion"]
    virtshim.vms.append(lasting(pod="", pod_id="", vm_id=""))  # an init container that is a VM
    agent.look()
    assert api.one("virtualmachines", "shop", "db")["metadata"]["resourceVersion"] == written
    virtshim.vms = [lasting()]
    agent.look()
    assert api.one("virtualmachines", "shop", "db")["status"]["nodes"] == {"n1": {}}


def test_what_a_deleted_object_has_left_is_removed_when_no_pod_uses_it(
    api: KubernetesApi, agent: Agent, virtshim: Virtshim
) -> None:
    api.edit(
        "virtualmachines",
        "shop",
        "db",
        lambda one: one["metadata"].update(deletionTimestamp="2026-01-31T12:00:00Z", finalizers=["virtshim.io/kept"]),
    )
    seen(api, agent)
    agent.look()
    assert virtshim.done == []
    virtshim.vms = [lasting(pod="", pod_id="", vm_id="")]
    agent.look()
    assert virtshim.done == ["remove"]


def test_it_keeps_nothing_of_an_object_but_what_it_looks_at(api: KubernetesApi, agent: Agent) -> None:
    """A cluster may have very many."""
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "own": "yes"}

    def change(vm: dict[str, Any]) -> None:
        vm["metadata"]["annotations"] = applied
        vm["status"] = {"nodes": {"n1": {}}, "phase": "Running"}

    api.edit("virtualmachines", "shop", "db", change)
    seen(api, agent)
    found = agent.vms.get("shop", "db")
    assert found is not None
    assert found["metadata"]["annotations"] == {"own": "yes"}
    assert {name: one for name, one in found.items() if name != "metadata"} == {"status": {"nodes": {"n1": {}}}}


def test_without_virtshim_it_gives_no_sign_of_life(api: KubernetesApi, agent: Agent, virtshim: Virtshim) -> None:
    virtshim.is_away = True
    agent.look()
    assert api.all("leases") == []


def test_while_the_api_server_is_away_nothing_changes_on_the_node(
    api: KubernetesApi, agent: Agent, virtshim: Virtshim
) -> None:
    annotate(api, agent, pause="true")

    def cut(_asked: Asked) -> None:
        raise ConnectionResetError

    api.before = cut
    agent.look()
    assert virtshim.done == []
    api.before = None
    agent.look()
    assert (virtshim.done, conditions(api)["virtshim.io/paused"]) == (["pause"], ("True", "Requested"))


def test_an_object_that_cannot_be_written_keeps_no_other_one_waiting(api: KubernetesApi, agent: Agent) -> None:
    """The node has nothing of both any more."""
    for name in ("first", "second"):
        vm = {"namespace": "shop", "name": name, "uid": name}
        template = {"spec": {"containers": [{"name": "vm", "image": "small"}]}}
        spec = {"template": template}
        api.put(
            "virtualmachines",
            {"kind": "VirtualMachine", "metadata": vm, "spec": spec, "status": {"nodes": {"n1": {}}}},
        )

    def refuse(asked: Asked) -> None:
        if asked.name == "first":
            raise Refused(422, "Invalid", "it breaks a newer rule")

    api.before = refuse
    end = time.monotonic() + 20
    while not (agent.vms.get("shop", "first") and agent.vms.get("shop", "second")):
        assert time.monotonic() < end
        with api.news:
            api.news.wait(0.02)
    agent.look()
    kept = {name: api.one("virtualmachines", "shop", name)["status"]["nodes"] for name in ("first", "second")}
    assert kept == {"first": {"n1": {}}, "second": {}}


def ask(api: KubernetesApi, path: str, body: Any, method: str = "PATCH") -> Any:
    plural, namespace, name, sub = (*path.split("/"), "")[:4]
    (resource,) = [one for one in RESOURCES if one.plural == plural]
    return api.answer(Asked(method, resource, namespace, name, sub, {}, body, AGENT))


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("pods/shop/other/status", {"status": {"conditions": [{"type": "virtshim.io/arrived"}]}}, "on its own node"),
        ("pods/shop/plain/status", {"status": {"conditions": [{"type": "virtshim.io/arrived"}]}}, "of VirtualMachines"),
        ("pods/shop/db-1/status", {"status": {"phase": "Failed"}}, "only conditions of pods"),
        ("pods/shop/db-1/status", {"status": {"conditions": []}}, "begins with virtshim.io/"),
        (
            "pods/shop/db-1/status",
            {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
            "begins with virtshim.io/",
        ),
        ("pods/shop/db-1", {"metadata": {"labels": {"a": "b"}}}, "cannot patch resource"),
        ("virtualmachines/shop/db/status", {"status": {"nodes": {"n2": {}}}}, "its own node keeps"),
        ("virtualmachines/shop/db/status", {"status": {"record": {"node": "n2"}}}, "what its node keeps"),
        ("virtualmachines/shop/db", {"spec": {"state": "Stopped"}}, "cannot patch resource"),
        ("leases/virtshim-cluster/virtshim-agent.n2", {"spec": {}}, "its own node's lease"),
        ("nodes//n2", {"spec": {}}, "cannot patch resource"),
        ("secrets/shop/key", {}, "cannot patch resource"),
    ],
)
def test_an_agent_may_change_nothing_of_others(
    api: KubernetesApi, agent: Agent, rights: ShippedRights, path: str, body: Any, told: str
) -> None:
    labels = {"virtshim.io/vm": "db"}
    for name, node, own in (("other", "n2", labels), ("plain", "n1", {})):
        pod = {"namespace": "shop", "name": name, "labels": own}
        api.put("pods", {"kind": "Pod", "metadata": pod, "spec": {"nodeName": node}, "status": {}})
    api.put(
        "leases",
        {"kind": "Lease", "metadata": {"namespace": "virtshim-cluster", "name": "virtshim-agent.n2"}, "spec": {}},
    )
    with pytest.raises(Refused, match=told):
        ask(api, path, body)
    rights.refused.clear()


def test_a_token_that_names_no_node_changes_nothing(api: KubernetesApi, agent: Agent, rights: ShippedRights) -> None:
    rights.extra.clear()
    agent.look()
    assert "names no node" in rights.refused[0]
    assert set(conditions(api)) == {"Ready"}
    rights.refused.clear()


def test_the_agent_needs_every_right_that_it_has(
    api: KubernetesApi, agent: Agent, rights: ShippedRights, tmp_path: Path
) -> None:
    agent.look()
    spec = {"translations": [{"name": "no url"}]}
    api.put("virtletimagemappings", {"metadata": {"namespace": "kube-system", "name": "bad"}, "spec": spec})
    mirroring = Agent("n1", "virtshim-cluster", agent.access, agent.clock, agent.virtshim, str(tmp_path / "images"))
    mirroring.start()
    eventually(lambda: mirroring.mappings.is_complete)
    mirroring.look()
    end = time.monotonic() + 20
    while ("watch", "virtletimagemappings") not in rights.used[AGENT]:
        assert time.monotonic() < end
        with api.news:
            api.news.wait(0.02)
    mirroring.close()
    assert rights.granted(AGENT) == rights.used[AGENT]
