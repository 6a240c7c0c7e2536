"""The admission policy in deploy/ admits and refuses the right pods, and the objects that make them. A CEL library
evaluates it as the API server does."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
POLICY, BINDING = yaml.safe_load_all((DEPLOY / "kustomize/base/admission-policy.yaml").read_text())
VARIABLES = {variable["name"]: variable["expression"] for variable in POLICY["spec"]["variables"]}
DYNAMIC = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN))

POD: dict[str, Any] = {
    "runtimeClassName": "virtshim",
    "containers": [
        {
            "name": "vm",
            "image": "quay.io/containerdisks/fedora:latest",
            "volumeMounts": [{"name": "kube-api-access", "mountPath": "/var/run/secrets", "readOnly": True}],
            "securityContext": {"runAsUser": 1, "seccompProfile": {"type": "RuntimeDefault"}, "privileged": True},
            "lifecycle": {"postStart": {"exec": {"command": ["true"]}}, "preStop": {"httpGet": {"port": 80}}},
        }
    ],
    "initContainers": [{"name": "first", "image": "disk.qcow2"}],
    "securityContext": {"runAsGroup": 3, "runAsUser": 3, "fsGroup": 2},
    "hostNetwork": False,
    "restartPolicy": "Always",
}


def evaluate(expression: str, thing: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Variables are put in where they are named, as often as that takes."""
    while (after := re.sub(r"variables\.(\w+)", lambda name: f"({VARIABLES[name[1]]})", expression)) != expression:
        expression = after
    answer = DYNAMIC.compile(expression).eval(data={"object": thing, "oldObject": before}).value()
    assert isinstance(answer, bool), f"{expression}: {answer}"
    return answer


def refusals(thing: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    spec = POLICY["spec"]
    if not all(evaluate(condition["expression"], thing, before) for condition in spec["matchConditions"]):
        return []
    return [rule["message"] for rule in spec["validations"] if not evaluate(rule["expression"], thing, before)]


def pod(**changes: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": "web"}, "spec": copy.deepcopy(POD) | changes}


def workload(kind: str, template: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"template": {"metadata": {}, "spec": template["spec"]}}
    if kind == "PodTemplate":
        return {"kind": kind, "metadata": {"name": "web"}, **made}
    spec = {"jobTemplate": {"spec": made}} if kind == "CronJob" else {"replicas": 1, **made}
    return {"kind": kind, "metadata": {"name": "web"}, "spec": spec}


def container(**fields: Any) -> dict[str, Any]:
    return {"name": "vm", "image": "x", **fields}


@pytest.mark.parametrize(
    "fine",
    [
        pod(),
        {"kind": "Pod", "metadata": {}, "spec": {"runtimeClassName": "virtshim", "containers": [container()]}},
        pod(hostUsers=True, shareProcessNamespace=True, ephemeralContainers=[]),
        pod(
            containers=[container(volumeMounts=[{"mountPath": "/a", "readOnly": True, "recursiveReadOnly": "Enabled"}])]
        ),
        pod(securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "0"}]}),
    ],
)
def test_a_vm_pod_is_admitted(fine: dict[str, Any]) -> None:
    assert refusals(fine) == []
    for kind in (
        "Deployment",
        "StatefulSet",
        "DaemonSet",
        "ReplicaSet",
        "Job",
        "CronJob",
        "ReplicationController",
        "PodTemplate",
    ):
        assert refusals(workload(kind, fine)) == []


TWO = {"containers": [container(), container(name="sidecar")]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (TWO, "one virtual machine and has one container"),
    ({"initContainers": [container(name="proxy", restartPolicy="Always")]}, "native sidecar"),
    ({"ephemeralContainers": [container(name="debugger")]}, "ephemeral container"),
    ({"hostNetwork": True}, "hostNetwork, hostPID and hostIPC"),
    ({"hostPID": True}, "hostNetwork, hostPID and hostIPC"),
    ({"hostIPC": True}, "hostNetwork, hostPID and hostIPC"),
    ({"hostUsers": False}, "hostUsers"),
    ({"securityContext": {"runAsGroup": 3}}, "runAsGroup is set without runAsUser"),
    ({"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "a"}}}, "type Localhost"),
    ({"containers": [container(securityContext={"appArmorProfile": {"type": "Localhost"}})]}, "type Localhost"),
    (
        {"initContainers": [container(volumeMounts=[{"mountPath": "/a", "mountPropagation": "Bidirectional"}])]},
        "mountPropagation: Bidirectional",
    ),
    ({"containers": [container(lifecycle={"postStart": {"httpGet": {"port": 80}}})]}, "lifecycle.postStart"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_a_pod_that_no_vm_can_be_is_refused_with_a_sentence(changes: dict[str, Any], why: str) -> None:
    for thing in (
        pod(**changes),
        *(
            workload(kind, pod(**changes))
            for kind in ("Deployment", "Job", "CronJob", "ReplicationController", "PodTemplate")
        ),
    ):
        (refusal,) = refusals(thing)
        assert why in refusal
        assert refusals({**thing, "metadata": {}}, before=None) == [refusal]


def test_the_example_pod_with_hooks_and_probes_is_admitted() -> None:
    assert refusals(yaml.safe_load((DEPLOY / "pod-with-hooks.yaml").read_text())) == []


# --- with ordinary containers beside the VM

LOCAL = {"seccompProfile": {"type": "Localhost", "localhostProfile": "a"}}


def helper(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "docker.io/library/busybox", **fields}


def shared(**changes: Any) -> dict[str, Any]:
    """Every kind of container, and what only a VM cannot have. Injected containers look like these."""
    spec = {
        "runtimeClassName": "virtshim-pod",
        "containers": [
            {"name": "vm", "image": "virtlet.cloud/disk", "ports": [{"containerPort": 22}]},
            helper(
                "mesh",
                securityContext=LOCAL,
                ports=[{"containerPort": 53, "protocol": "UDP"}],
                volumeMounts=[{"mountPath": "/a", "mountPropagation": "Bidirectional"}],
                lifecycle={"postStart": {"httpGet": {"port": 80}}},
            ),
        ],
        "initContainers": [
            helper("fetch", ports=[{"containerPort": 9, "protocol": "SCTP"}]),
            helper("agent", restartPolicy="Always"),
            {"name": "first", "image": "virtlet.cloud/first"},
        ],
        "ephemeralContainers": [helper("debug"), helper("debug-mesh", targetContainerName="mesh")],
        "securityContext": LOCAL,
        "shareProcessNamespace": False,
    }
    return {"kind": "Pod", "metadata": {}, "spec": spec | changes}


def vm(name: str = "vm", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "virtlet.cloud/disk", **fields}


SHARED_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"containers": [vm(), vm("second")]}, "a pod has one virtual machine"),
    ({"initContainers": [vm("agent", restartPolicy="Always")]}, "a pod has one virtual machine"),
    ({"ephemeralContainers": [helper("debug", targetContainerName="vm")]}, "leave --target out"),
    ({"shareProcessNamespace": True}, "shareProcessNamespace"),
    ({"containers": [vm(), helper("b", ports=[{"containerPort": 9, "protocol": "SCTP"}])]}, "SCTP"),
    ({"hostNetwork": True}, "hostNetwork, hostPID and hostIPC"),
    ({"hostUsers": False}, "hostUsers"),
    ({"containers": [vm(securityContext=LOCAL)]}, "type Localhost"),
    (
        {"containers": [vm(volumeMounts=[{"mountPath": "/a", "mountPropagation": "Bidirectional"}])]},
        "mountPropagation: Bidirectional",
    ),
    ({"containers": [vm(lifecycle={"postStart": {"httpGet": {"port": 80}}})]}, "lifecycle.postStart"),
]


def test_a_pod_with_containers_beside_its_vm_is_admitted() -> None:
    assert refusals(shared()) == []
    for kind in ("Deployment", "CronJob", "PodTemplate"):
        assert refusals(workload(kind, shared())) == []
    assert refusals(shared(containers=[vm()], initContainers=[])) == []


@pytest.mark.parametrize(("changes", "why"), SHARED_REFUSED)
def test_what_a_vm_beside_containers_cannot_have_is_refused_with_a_sentence(changes: dict[str, Any], why: str) -> None:
    for thing in (shared(**changes), workload("Deployment", shared(**changes))):
        (refusal,) = refusals(thing)
        assert why in refusal


def test_the_vm_may_be_named_by_an_annotation_too() -> None:
    named = shared(containers=[vm("disk"), helper("fedora")])
    assert refusals(named) == []
    template = workload("Deployment", named)
    for metadata in (named["metadata"], template["spec"]["template"]["metadata"]):
        metadata["annotations"] = {"virtshim.io/vm-container": "fedora"}
    for thing in (named, template):
        (refusal,) = refusals(thing)
        assert "a pod has one virtual machine" in refusal


def test_every_rule_refuses_something() -> None:
    told = {refusal for changes, _ in REFUSED for refusal in refusals(pod(**changes))}
    told |= {refusal for changes, _ in SHARED_REFUSED for refusal in refusals(shared(**changes))}
    assert told == {rule["message"] for rule in POLICY["spec"]["validations"]}


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_pods_of_other_runtimes_are_ignored(changes: dict[str, Any], why: str) -> None:
    del why
    assert refusals(pod(**changes, runtimeClassName="gvisor")) == []
    other = pod(**changes)
    del other["spec"]["runtimeClassName"]
    assert refusals(other) == []
    assert refusals(workload("CronJob", other)) == []


@pytest.mark.parametrize(("runtime", "is_ours"), [("virtlet.cloud", True), ("other.runtime", False)])
def test_virtlets_annotation_also_marks_a_vm_pod(runtime: str, is_ours: bool) -> None:
    thing = pod(**TWO)
    del thing["spec"]["runtimeClassName"]
    thing["metadata"]["annotations"] = {"kubernetes.io/target-runtime": runtime}
    template = workload("Deployment", thing)
    template["spec"]["template"]["metadata"] = thing["metadata"]
    assert bool(refusals(thing)) is bool(refusals(template)) is is_ours
    assert refusals({**thing, "spec": {**thing["spec"], "runtimeClassName": "gvisor"}}) == []


def test_workloads_older_than_the_policy_may_be_scaled_and_corrected() -> None:
    for kind in ("Deployment", "CronJob"):
        before = workload(kind, pod(**TWO))
        scaled = copy.deepcopy(before)
        scaled["spec"]["replicas"] = 0
        assert refusals(scaled, before) == []
        assert refusals(workload(kind, pod()), before) == []
        assert refusals(before, workload(kind, pod())) != []


def test_an_ephemeral_container_is_refused_when_it_is_added() -> None:
    before = pod()
    assert any("ephemeral" in why for why in refusals(pod(ephemeralContainers=[container(name="debug")]), before))


def test_the_policy_has_the_shape_that_the_api_server_takes() -> None:
    for document, kind in ((POLICY, "ValidatingAdmissionPolicy"), (BINDING, "ValidatingAdmissionPolicyBinding")):
        assert (document["apiVersion"], document["kind"]) == ("admissionregistration.k8s.io/v1", kind)
    assert BINDING["spec"] == {"policyName": POLICY["metadata"]["name"], "validationActions": ["Deny"]}
    spec = POLICY["spec"]
    assert set(spec) == {"failurePolicy", "matchConstraints", "matchConditions", "variables", "validations"}
    assert spec["failurePolicy"] == "Fail"
    for rule in spec["matchConstraints"]["resourceRules"]:
        assert set(rule) == {"apiGroups", "apiVersions", "operations", "resources"}
    for validation in spec["validations"]:
        assert set(validation) == {"expression", "message"}
        assert "\n" not in validation["message"]
    classes = list(yaml.safe_load_all((DEPLOY / "kustomize/base/runtimeclass.yaml").read_text()))
    assert f"in {[one['metadata']['name'] for one in classes]}" in spec["matchConditions"][1]["expression"]
    shared = [one["metadata"]["name"] for one in classes if one["handler"] == "virtshim-pod"]
    assert f"in {shared}" in VARIABLES["shared"]


def test_the_policy_covers_every_kind_that_makes_pods() -> None:
    looked_at = {name for rule in POLICY["spec"]["matchConstraints"]["resourceRules"] for name in rule["resources"]}
    assert {"pods", "replicationcontrollers", "podtemplates", "deployments", "jobs", "cronjobs"} <= looked_at
