"""With the DaemonSet's token, root on one node can change only one label of that node. A CEL library evaluates the
admission policy as the API server does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel

pytestmark = pytest.mark.hostile

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DOCUMENTS: list[Any] = list(yaml.safe_load_all((DEPLOY / "kustomize/overlays/mixed/daemonset.yaml").read_text()))
(POLICY,) = (one for one in DOCUMENTS if one["kind"] == "ValidatingAdmissionPolicy")
(BINDING,) = (one for one in DOCUMENTS if one["kind"] == "ValidatingAdmissionPolicyBinding")
DYNAMIC = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN))
ACCOUNT = "system:serviceaccount:virtshim-system:virtshim-node"
NODE_NAME = "authentication.kubernetes.io/node-name"

NODE: dict[str, Any] = {
    "metadata": {
        "name": "own",
        "labels": {"kubernetes.io/hostname": "own", "zone": "a", "virtshim.io/vms": "true"},
        "annotations": {"a": "b"},
    },
    "spec": {"taints": [{"key": "virtshim.io/vms", "effect": "NoSchedule"}], "podCIDR": "10.0.0.0/24"},
}


def is_let_in(after: dict[str, Any], before: dict[str, Any] = NODE, **request: Any) -> bool:
    asked = {
        "name": before["metadata"]["name"],
        "operation": "UPDATE",
        "userInfo": {"username": ACCOUNT, "extra": {NODE_NAME: ["own"]}},
        **request,
    }
    values = {"object": after, "oldObject": before, "request": asked}

    def holds(expression: str) -> bool:
        return DYNAMIC.compile(expression).eval(data=values).value() is True

    spec = POLICY["spec"]
    if not all(holds(one["expression"]) for one in spec["matchConditions"]):
        return True
    return all(holds(one["expression"]) for one in spec["validations"])


def changed(**parts: dict[str, Any]) -> dict[str, Any]:
    node = copy.deepcopy(NODE)
    for part, values in parts.items():
        node[part] |= values
    return node


LABELS: dict[str, str] = NODE["metadata"]["labels"]
ATTACKS: dict[str, dict[str, Any]] = {
    "another label": changed(metadata={"labels": {**LABELS, "node-role.kubernetes.io/control-plane": ""}}),
    "another value": changed(metadata={"labels": {**LABELS, "zone": "b"}}),
    "a label less": changed(metadata={"labels": {"virtshim.io/vms": "true"}}),
    "a label like ours": changed(metadata={"labels": {**LABELS, "virtshim.io/vms2": "true"}}),
    "no labels": {**NODE, "metadata": {"name": "own", "annotations": {"a": "b"}}},
    "no taints": changed(spec={"taints": []}),
    "another taint": changed(spec={"taints": [{"key": "x", "effect": "NoExecute"}]}),
    "cordoned": changed(spec={"unschedulable": True}),
    "an annotation": changed(metadata={"annotations": {"a": "b", "kubeadm": "x"}}),
    "a finalizer": changed(metadata={"finalizers": ["x/y"]}),
    "another owner": changed(metadata={"ownerReferences": [{"name": "y"}]}),
    "an owner": changed(metadata={"ownerReferences": [{"name": "x"}]}),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_a_nodes_token_can_change_one_label_only(what: str) -> None:
    before = changed(metadata={"ownerReferences": [{"name": "x"}]}) if what == "another owner" else NODE
    assert not is_let_in(ATTACKS[what], before)


OURS = {key: value for key, value in LABELS.items() if key != "virtshim.io/vms"}


@pytest.mark.parametrize("labels", [OURS, {**OURS, "virtshim.io/vms": "true"}])
def test_a_nodes_token_can_add_and_remove_its_own_nodes_label(labels: dict[str, str]) -> None:
    assert is_let_in(changed(metadata={"labels": labels}))
    assert is_let_in(NODE, changed(metadata={"labels": labels}))


@pytest.mark.parametrize(
    "request_",
    [
        {"userInfo": {"username": ACCOUNT, "extra": {NODE_NAME: ["other"]}}},
        {"userInfo": {"username": ACCOUNT, "extra": {NODE_NAME: ["own", "other"]}}},
        {"userInfo": {"username": ACCOUNT, "extra": {}}},
        {"subResource": "status"},
        {"operation": "DELETE"},
        {"operation": "CREATE"},
    ],
)
def test_another_nodes_token_and_other_calls_are_refused(request_: dict[str, Any]) -> None:
    assert not is_let_in(changed(metadata={"labels": OURS}), **request_)


def test_the_policy_does_not_restrict_other_users() -> None:
    assert is_let_in(ATTACKS["no taints"], userInfo={"username": "admin"})


def test_the_policy_is_enforced_for_all_nodes() -> None:
    assert BINDING["spec"] == {"policyName": POLICY["metadata"]["name"], "validationActions": ["Deny"]}
    assert POLICY["spec"]["failurePolicy"] == "Fail"
    (rule,) = POLICY["spec"]["matchConstraints"]["resourceRules"]
    assert "nodes" in rule["resources"]
