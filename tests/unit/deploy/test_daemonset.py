"""Kubernetes accepts every field of the DaemonSet's objects, and they fit the program that runs and deploy/."""

import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from image import on_node
from kubernetes import client

pytestmark = pytest.mark.operator

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DOCUMENTS: list[Any] = list(yaml.safe_load_all((DEPLOY / "kustomize/overlays/mixed/daemonset.yaml").read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}
POD = BY_KIND["DaemonSet"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
NAME = "virtshim-node"


@pytest.mark.parametrize("document", DOCUMENTS, ids=list(BY_KIND))
def test_every_field_exists_in_kubernetes(document: dict[str, Any]) -> None:
    """The client drops what it does not know, and refuses what lacks a field that must be there."""
    api = client.ApiClient()
    types_of = {"Namespace": "V1Namespace", "ServiceAccount": "V1ServiceAccount", "ClusterRole": "V1ClusterRole",
                "ClusterRoleBinding": "V1ClusterRoleBinding", "DaemonSet": "V1DaemonSet", "PriorityClass": "V1PriorityClass",
                **{kind: f"V1{kind}" for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")}}  # fmt: skip
    answer = types.SimpleNamespace(data=json.dumps(document))
    try:
        read = api.deserialize(answer, types_of[document["kind"]])
    except TypeError:  # later versions want the media type
        read = api.deserialize(answer.data, types_of[document["kind"]], "application/json")
    assert api.sanitize_for_serialization(read) == document


def test_names_that_refer_to_each_other_are_equal() -> None:
    namespace = BY_KIND["Namespace"]["metadata"]["name"]
    (subject,) = BY_KIND["ClusterRoleBinding"]["subjects"]
    assert BY_KIND["ClusterRoleBinding"]["roleRef"]["name"] == BY_KIND["ClusterRole"]["metadata"]["name"] == NAME
    assert subject == {"kind": "ServiceAccount", "name": POD["serviceAccountName"], "namespace": namespace}
    assert BY_KIND["ServiceAccount"]["metadata"] == {"name": POD["serviceAccountName"], "namespace": namespace}
    spec = BY_KIND["DaemonSet"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_the_role_allows_what_the_program_does_and_no_more() -> None:
    assert BY_KIND["ClusterRole"]["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]


def test_the_daemonset_has_what_the_program_needs() -> None:
    given = {variable["name"] for variable in CONTAINER["env"]}
    source = Path(on_node.__file__).read_text()
    asked = set(re.findall(r'environment(?:\.get\(|\[)"(\w+)"', source))
    assert asked - given == {"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT_HTTPS"}
    assert {variable["name"]: variable.get("value") for variable in CONTAINER["env"]}[
        "UNINSTALL_ON_TERMINATION"
    ] == "false"
    assert CONTAINER["volumeMounts"] == [{"name": "host", "mountPath": str(on_node.Node().root)}]
    assert CONTAINER["args"] == ["run"]
    assert CONTAINER["securityContext"]["privileged"]
    assert POD["hostPID"]


def test_the_daemonset_tolerates_vm_nodes_and_nodes_without_a_network() -> None:
    classes = list(yaml.safe_load_all((DEPLOY / "kustomize/base/runtimeclass.yaml").read_text()))
    ((key,),) = {tuple(one["scheduling"]["nodeSelector"]) for one in classes}
    assert key == on_node.LABEL
    assert {toleration["key"] for toleration in POD["tolerations"]} == {key, "node.kubernetes.io/not-ready"}


def test_the_image_has_the_projects_version(pytestconfig: pytest.Config) -> None:
    version = re.search(r'^version = "(.+)"$', (pytestconfig.rootpath / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert CONTAINER["image"] == f"virtshim:{version[1]}"
