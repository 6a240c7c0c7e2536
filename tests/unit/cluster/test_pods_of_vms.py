"""The pod of a VirtualMachine has what the template says, and what the controller adds."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_validate.utils import latest_version, validate  # type: ignore[import-untyped]

from virtshim.cluster.reading import pod_seen, vm_seen
from virtshim.cluster.steps import Create, Place
from virtshim.cluster.values import VmSeen
from virtshim.cluster.writing import budget, pod, ungated

TEMPLATE: dict[str, Any] = {
    "metadata": {"annotations": {"virtshim.io/vnc": "true"}, "labels": {"app": "db"}},
    "spec": {"containers": [{"name": "db", "image": "fedora", "resources": {"limits": {"memory": "2Gi"}}}]},
}


def vm(**spec: Any) -> VmSeen:
    document = {
        "metadata": {"name": "db", "namespace": "shop", "uid": "vm-1", "resourceVersion": "7"},
        "spec": {"template": TEMPLATE, **spec},
    }
    return vm_seen(document, has_budget=False)


ANYWHERE = Create()


def made(create: Create = ANYWHERE, **spec: Any) -> dict[str, Any]:
    document = pod(vm(**spec), create)
    for version in ("1.30", latest_version()):
        validate(document, version, strict=True)
    return document


def seen(document: dict[str, Any]) -> Any:
    """What the controller reads of it when the API server has named it."""
    metadata = document["metadata"] | {"name": "db-x2x4z", "uid": "pod-1", "resourceVersion": "9"}
    return pod_seen(document | {"metadata": metadata})


def test_the_guest_has_the_name_of_the_virtual_machine() -> None:
    document = made()
    assert document["metadata"]["generateName"] == "db-"
    assert document["spec"]["hostname"] == "db"
    assert document["metadata"]["labels"] == {"app": "db", "virtshim.io/vm": "db"}
    assert document["metadata"]["annotations"]["virtshim.io/vm"] == "db"


def test_the_template_is_taken_over() -> None:
    document = made()
    assert document["spec"]["containers"] == TEMPLATE["spec"]["containers"]
    assert document["spec"]["runtimeClassName"] == "virtshim"
    assert document["metadata"]["annotations"]["virtshim.io/vnc"] == "true"


def test_a_new_pod_waits_behind_its_gate_and_belongs_to_the_virtual_machine() -> None:
    found = seen(made())
    assert (found.gated, found.owner, found.restore_from) == (True, "vm-1", "")


def test_only_the_controllers_gate_is_taken_away() -> None:
    template = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "schedulingGates": [{"name": "quota.example/wait"}]}}
    document = made(template=template)
    change = ungated(seen(document), document)
    assert change["spec"] == {"schedulingGates": [{"name": "quota.example/wait"}]}
    assert change["metadata"] == {"uid": "pod-1", "resourceVersion": "9"}


def test_kubelet_does_not_end_a_target_whose_guest_has_yet_to_arrive() -> None:
    """It would after a postStart hook or probes that such a guest does not answer, and it would wait for init containers."""
    answers = {"tcpSocket": {"port": 22}, "periodSeconds": 7}
    hooks = {name: {"exec": {"command": ["true"]}} for name in ("postStart", "preStop")}
    container = {"name": "db", "image": "fedora", "livenessProbe": answers, "lifecycle": hooks}
    first = {"name": "first", "image": "fedora"}
    template = {**TEMPLATE, "spec": {"containers": [container], "initContainers": [first]}}
    spec = made(Create(Place(never="node1"), restore_from="node1"), template=template)["spec"]
    (awaiting,) = spec["containers"]
    assert "initContainers" not in spec
    assert list(awaiting["lifecycle"]) == ["preStop"]
    assert awaiting["livenessProbe"] == answers
    assert awaiting["startupProbe"]["tcpSocket"] == {"port": 22}
    assert awaiting["startupProbe"]["failureThreshold"] * 7 >= 24 * 3600
    usual = made(template=template)["spec"]
    assert usual == {**usual, **template["spec"]}


def test_a_pod_that_kubelet_refuses_says_why() -> None:
    refused = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: too little cpu"}
    assert seen({**made(), "status": refused}).trouble == "Pod was rejected: too little cpu"


def test_a_target_says_where_the_virtual_machine_comes_from_and_is_ready_when_it_is_there() -> None:
    document = made(Create(Place(never="node1"), restore_from="node1"))
    assert document["metadata"]["annotations"]["virtshim.io/restore-from"] == "node1"
    assert document["spec"]["readinessGates"] == [{"conditionType": "virtshim.io/arrived"}]
    assert seen(document).restore_from == "node1"


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        (Place(only="node2", never="node1"), [{"key": "metadata.name", "operator": "In", "values": ["node2"]}]),
        (Place(never="node1"), [{"key": "metadata.name", "operator": "NotIn", "values": ["node1"]}]),
    ],
)
def test_the_place_is_added_to_each_alternative_of_the_template(place: Place, fields: list[Any]) -> None:
    fast = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}
    near = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [fast, near]}}}
    template = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "affinity": affinity}}
    node = made(Create(place), template=template)["spec"]["affinity"]["nodeAffinity"]
    terms = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{**fast, "matchFields": fields}, {**near, "matchFields": fields}]


def test_a_node_with_the_disk_is_a_wish_only() -> None:
    node = made(Create(Place(rather="node1")))["spec"]["affinity"]["nodeAffinity"]
    assert list(node) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_a_state_volume_makes_stops_save() -> None:
    template = {**TEMPLATE, "metadata": {"annotations": {"virtshim.io/state-volume": "/state"}}}
    found = seen(made(template=template))
    assert (found.stop_saves, found.has_volume) == (True, True)


def test_each_restart_is_known_by_its_time() -> None:
    assert seen(made(restartedAt="2026-01-31T12:00:00Z")).restarted_at == "2026-01-31T12:00:00Z"


def test_the_budget_protects_both_pods_of_a_move() -> None:
    document = budget(vm())
    for version in ("1.30", latest_version()):
        validate(document, version, strict=True)
    assert document["spec"] == {"minAvailable": 2, "selector": {"matchLabels": {"virtshim.io/vm": "db"}}}


def test_fields_of_a_wrong_type_count_as_unset() -> None:
    found = vm_seen(
        {"metadata": [], "spec": {"state": 3, "template": "x"}, "status": {"record": 1, "nodes": {"a": 2}}},
        has_budget=False,
    )
    assert (found.spec.state, found.record.pod, dict(found.kept)) == ("Running", None, {})
    assert pod_seen({"status": {"conditions": "x", "containerStatuses": [1]}}).phase == "Pending"
