"""With the manifests applied, the API server refuses bad objects, and everything that the programs' accounts may not
do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.control_planes import NAMESPACE, NAMESPACES, NODES, PODS, Document, Plane, RealPlane
from fakes.crd import EXAMPLE
from fakes.shop import Shop
from fakes.vm_nodes import VmNodes

from virtshim.cluster.api import BUDGETS, VMS, below

LEASES = "/apis/coordination.k8s.io/v1/leases"
SECRETS = "/api/v1/secrets"


def changed(path: str, value: Any) -> Document:
    made = copy.deepcopy(EXAMPLE)
    *above, last = path.split(".")
    here = made
    for name in above:
        here = here[name]
    here[last] = value
    if value is None:
        del here[last]
    return made


@pytest.fixture
def namespace(plane: Plane) -> Iterator[str]:
    name = plane.namespace()
    yield name
    for vm in plane.admin.all(VMS, name):  # a controller of another test would give it a finalizer
        plane.admin.do("DELETE", below(VMS, name, vm["metadata"]["name"]))
    plane.admin.ask("DELETE", f"{NAMESPACES}/{name}")


def test_a_virtual_machine_with_everything_is_taken_as_it_is(plane: Plane, namespace: str) -> None:
    made = plane.admin.do("POST", f"{below(VMS, namespace)}?fieldValidation=Strict", EXAMPLE)
    assert made["spec"] == EXAMPLE["spec"]


def test_an_image_is_enough(plane: Plane, namespace: str) -> None:
    small = changed("spec", {"template": {"spec": {"containers": [{"name": "a", "image": "b"}]}}})
    made = plane.admin.do("POST", below(VMS, namespace), small)
    own = {name: value for name, value in made["spec"].items() if name != "template"}
    assert own == {"state": "Running", "drain": "Move", "stayOnNode": False}


@pytest.mark.parametrize(
    ("path", "value", "code", "told"),
    [
        ("spec.stat", "Running", 400, 'unknown field "spec.stat"'),
        ("spec.template.metadata.name", "db-1", 400, 'unknown field "spec.template.metadata.name"'),
        ("spec.state", "On", 422, "spec.state"),
        ("spec.drain", "Evict", 422, "spec.drain"),
        ("spec.template.spec.containers", [], 422, "spec.template.spec.containers"),
        (
            "spec.template.spec.containers",
            [{"name": "a", "image": "b"}, {"name": "c", "image": "d"}],
            422,
            "spec.template.spec.containers",
        ),
        ("spec.template.spec.hostNetwork", True, 422, "cannot share the host's network; remove it"),
        ("spec.template.spec.runtimeClassName", "kata", 422, "choose virtshim, virtshim-large or virtshim-huge"),
        ("spec.template.spec.nodeName", "node1", 422, "use nodeSelector, stayOnNode or moveTo"),
        ("spec.template.spec.hostname", "other", 422, "the guest has the virtual machine's name"),
        ("metadata.name", "db.example", 422, "at most 57 of a-z, 0-9 and -"),
        ("metadata.name", "d" * 58, 422, "at most 57"),
        ("spec.template", None, 422, "template"),
        ("spec.template.metadata.annotations", {"virtshim.io/vm": "x"}, 422, "are the controller's: remove them"),
        ("spec.template.metadata.annotations", {"virtshim.io/restore-from": "x"}, 422, "are the controller's"),
        ("spec.template.metadata.annotations", {"cluster.virtshim.io/x": "x"}, 422, "are the controller's"),
        ("spec.template.metadata.labels", {"virtshim.io/vm": "x"}, 422, "is the controller's: remove it"),
        ("spec.drain", "Save", 422, "drain: Save needs a state volume"),
        ("spec.state", "Saved", 422, "state: Saved needs a pod whose stop saves"),
        (
            "spec.template.metadata.annotations",
            {"virtshim.io/state-volume": "/state", "virtshim.io/on-stop": "shutdown"},
            422,
            "remove virtshim.io/on-stop, or write save",
        ),
    ],
)
def test_a_bad_object_is_refused_with_the_remedy(
    plane: Plane, namespace: str, path: str, value: Any, code: int, told: str
) -> None:
    answer = plane.admin.ask("POST", f"{below(VMS, namespace)}?fieldValidation=Strict", changed(path, value))
    assert (answer.status, told in answer.document["message"]) == (code, True), answer.document["message"]


def test_the_programs_of_the_manifests_are_taken(plane: Plane) -> None:
    if not isinstance(plane, RealPlane):
        pytest.skip("NOT TO BE HAD HERE: a control plane; see VIRTSHIM_TEST_CONTROL_PLANE in CONTRIBUTING.md")
    found = plane.kubectl("apply", "--dry-run=server", "-f", "-", input=plane.workloads)
    assert found.count("created (server dry run)") == 2


def _pod(name: str, labels: Document, **spec: Any) -> Document:
    spec = {"containers": [{"name": "vm", "image": "small"}], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


OWNER = {"apiVersion": "virtshim.io/v1alpha1", "kind": "VirtualMachine", "name": "db", "uid": "x", "controller": True}
OWNED: Document = {"labels": {"virtshim.io/vm": "db"}, "ownerReferences": [OWNER]}


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("GET", below(SECRETS, "default", "key"), {}, "cannot get resource"),
        ("DELETE", f"{NODES}/n1", {}, "cannot delete resource"),
        ("PATCH", f"{NODES}/n1", {"spec": {"unschedulable": True}}, "cannot patch resource"),
        ("DELETE", "web", {}, "only what belongs to a VirtualMachine"),
        ("PATCH", "web", {"metadata": {"labels": {"a": "b"}}}, "only what belongs to a VirtualMachine"),
        ("POST", "", _pod("x", {}), "only what belongs to a VirtualMachine"),
        ("POST", "", _pod("x", {"virtshim.io/vm": "db"}), "only what belongs to a VirtualMachine"),
        ("POST", "", {**_pod("x", {}), "metadata": {"name": "x", **OWNED}}, "only pods that are virtual machines"),
    ],
)  # fmt: skip
def test_the_controller_may_not_touch_anything_else(
    plane: Plane, namespace: str, method: str, path: str, body: Document, told: str
) -> None:
    """A path that does not begin with / is a pod of the namespace."""
    plane.admin.do("POST", below(PODS, namespace), _pod("web", {}))
    full = path if path.startswith("/") else below(PODS, namespace, path)
    answer = plane.user("virtshim-controller").ask(method, full, body)
    assert (answer.status, told in answer.document["message"]) == (403, True), answer.document


def test_the_controller_may_remove_only_budgets_of_virtual_machines(plane: Plane, namespace: str) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }
    plane.admin.do("POST", below(BUDGETS, namespace), budget)
    answer = plane.user("virtshim-controller").ask("DELETE", below(BUDGETS, namespace, "web"))
    assert (answer.status, "belongs to a VirtualMachine" in answer.document["message"]) == (403, True)


ARRIVED = {"type": "virtshim.io/arrived", "status": "True"}


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize(
    ("of", "what", "body", "told"),
    [
        ("foreign", "status", {"status": {"conditions": [ARRIVED]}}, "on its own node"),
        ("plain", "status", {"status": {"conditions": [ARRIVED]}}, "of VirtualMachines"),
        ("own", "status", {"status": {"phase": "Failed"}}, "only conditions of pods"),
        ("own", "status", {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, "begins with virtshim.io/"),
        ("own", "", {"metadata": {"labels": {"a": "b"}}}, "cannot patch resource"),
    ],
)  # fmt: skip
def test_an_agent_may_change_no_pod_but_the_conditions_of_its_own(
    shop: Shop, nodes: VmNodes, plane: Plane, of: str, what: str, body: Document, told: str
) -> None:
    home, away = shop.started("db")
    plane.admin.do("POST", below(PODS, shop.name), {**_pod("plain", {}, nodeName=home)})
    name = "plain" if of == "plain" else shop.status("db")["podName"]
    agent = nodes.users[away if of == "foreign" else home]
    answer = agent.ask("LISTS", below(PODS, shop.name, name, what), body)
    assert (answer.status, told in answer.document["message"]) == (403, True), answer.document


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize(
    ("what", "body", "told"),
    [
        ("status", {"status": {"nodes": {"HOME": {"savedAt": 1}}}}, "its own node keeps"),
        ("status", {"status": {"nodes": {"HOME": None}}}, "its own node keeps"),
        ("status", {"status": {"record": {"node": "AWAY"}}}, "what its node keeps"),
        ("status", {"status": {"record": None}}, "what its node keeps"),
        ("", {"spec": {"state": "Stopped"}}, "cannot patch resource"),
    ],
)
def test_an_agent_may_say_of_a_virtual_machine_only_what_its_node_keeps(
    shop: Shop, nodes: VmNodes, what: str, body: Document, told: str
) -> None:
    home, away = shop.started("db")
    nodes.until(lambda: home in shop.status("db").get("nodes", {}))
    asked = _named(body, {"HOME": home, "AWAY": away})
    answer = nodes.users[away].ask("PATCH", below(VMS, shop.name, "db", what), asked)
    assert (answer.status, told in answer.document["message"]) == (403, True), answer.document
    assert home in shop.status("db")["nodes"]


def _named(body: Any, names: dict[str, str]) -> Any:
    if isinstance(body, dict):
        return {names.get(name, name): _named(value, names) for name, value in body.items()}
    return names.get(body, body) if isinstance(body, str) else body


def test_an_agent_may_give_only_its_own_node_s_sign_of_life(shop: Shop, nodes: VmNodes) -> None:
    first, second = nodes.names
    nodes.act()
    path = below(LEASES, NAMESPACE, f"virtshim-agent.{second}")
    answer = nodes.users[first].ask("PATCH", path, {"spec": {"holderIdentity": "me"}})
    assert (answer.status, "its own node's lease" in answer.document["message"]) == (403, True)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", below(SECRETS, "default", "key")),
        ("PATCH", f"{NODES}/n2"),
        ("POST", below(PODS, "default")),
    ],
)
def test_an_agent_has_no_other_rights(nodes: VmNodes, method: str, path: str) -> None:
    assert nodes.users[nodes.names[0]].ask(method, path, _pod("x", {})).status in (403, 404)


def test_a_token_that_names_no_node_changes_nothing(shop: Shop, nodes: VmNodes, plane: Plane) -> None:
    nodes.act()
    path = below(LEASES, NAMESPACE, f"virtshim-agent.{nodes.names[0]}")
    answer = plane.user("virtshim-agent").ask("PATCH", path, {"spec": {"holderIdentity": "me"}})
    assert (answer.status, "names no node" in answer.document["message"]) == (403, True)
