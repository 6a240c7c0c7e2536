"""Each overlay of deploy/kustomize holds objects that Kubernetes accepts and that find each other, as the real kubectl
renders it."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate.utils import ValidationError, latest_version, validate  # type: ignore[import-untyped]

pytestmark = pytest.mark.operator

OVERLAYS = ("vms-only", "mixed", "monitoring", "cluster")
# Overlays that one cluster has at the same time.
TOGETHER = (("vms-only", "monitoring", "cluster"), ("mixed", "monitoring", "cluster"))
# Kubernetes has no schemas of the Prometheus operator's resources. test_monitoring.py gives the rules to Prometheus itself.
OF_THE_OPERATOR = "monitoring.coreos.com/v1"
# The oldest Kubernetes with all that the manifests use, and the newest that the schemas know.
VERSIONS = ("1.30", latest_version())

Object = dict[str, Any]


@pytest.fixture(scope="session")
def kustomize(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath / "deploy/kustomize"


@pytest.fixture(scope="session")
def render() -> Callable[[Path], list[Object]]:
    """What `kubectl apply -k` of a directory applies, in this order."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("NOT TO BE HAD HERE: Debian 12 packages no kubectl that knows `replacements`")
    asked = subprocess.run([kubectl, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True)
    if "kustomizeVersion" not in json.loads(asked.stdout):
        pytest.skip("NOT TO BE HAD HERE: kubectl is older than 1.24")

    def rendered(directory: Path) -> list[Object]:
        done = subprocess.run([kubectl, "kustomize", str(directory)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return list(yaml.safe_load_all(done.stdout))

    return rendered


@pytest.fixture(scope="session")
def overlays(kustomize: Path, render: Callable[[Path], list[Object]]) -> dict[str, list[Object]]:
    return {name: render(kustomize / "overlays" / name) for name in OVERLAYS}


@pytest.fixture
def own(kustomize: Path, tmp_path: Path) -> Path:
    """A copy, for changes that an operator makes."""
    return Path(shutil.copytree(kustomize, tmp_path / "kustomize"))


def name_of(one: Object) -> tuple[str, str, str]:
    return one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def needs(one: Object) -> Iterator[tuple[str, str, str]]:
    """The objects that the object names."""
    kind, namespace, _ = name_of(one)
    if namespace and namespace != "kube-system":  # which every cluster has
        yield "Namespace", "", namespace
    if kind == "ValidatingAdmissionPolicyBinding":
        yield "ValidatingAdmissionPolicy", "", one["spec"]["policyName"]
    for subject in one.get("subjects", ()):
        yield subject["kind"], subject["namespace"], subject["name"]
    if "roleRef" in one and not one["roleRef"]["name"].startswith("system:"):
        yield one["roleRef"]["kind"], namespace if one["roleRef"]["kind"] == "Role" else "", one["roleRef"]["name"]
    if kind not in ("DaemonSet", "Deployment"):
        return
    pod = one["spec"]["template"]["spec"]
    yield "ServiceAccount", namespace, pod["serviceAccountName"]
    if not pod["priorityClassName"].startswith("system-"):
        yield "PriorityClass", "", pod["priorityClassName"]
    for volume in pod.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", namespace, volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", namespace, volume["secret"]["secretName"]


def selects_nothing(one: Object, objects: list[Object]) -> bool:
    """Whether the object selects others by labels, and none of them has these labels."""
    kind, namespace, _ = name_of(one)
    own = [found for found in of_kind(objects, "DaemonSet", "Deployment") if name_of(found)[1] == namespace]
    pods = [found["spec"]["template"] for found in own]
    if kind in ("DaemonSet", "Deployment"):
        return not matches(one["spec"]["selector"]["matchLabels"], one["spec"]["template"]["metadata"]["labels"])
    if kind == "Service":
        ports = {port.get("targetPort", port["port"]) for port in one["spec"]["ports"]}
        return not any(
            matches(one["spec"]["selector"], pod["metadata"]["labels"])
            and ports
            <= {port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
            for pod in pods
        )
    if kind == "ServiceMonitor":
        ports = {endpoint["port"] for endpoint in one["spec"]["endpoints"]}
        return not any(
            matches(one["spec"]["selector"]["matchLabels"], service["metadata"].get("labels", {}))
            and ports <= {port["name"] for port in service["spec"]["ports"]}
            for service in of_kind(objects, "Service")
            if name_of(service)[1] == namespace
        )
    return False


def troubles(objects: list[Object]) -> list[str]:
    """Objects of one name, names of objects that come later or never, and selectors that select nothing."""
    found = []
    made: set[tuple[str, str, str]] = set()
    everything = {name_of(one) for one in objects}
    for one in objects:
        kind, _, name = name_of(one)
        if name_of(one) in made:
            found.append(f"{kind} {name} twice")
        made.add(name_of(one))
        found += [
            f"{kind} {name} without {needed[0]} {needed[2]}"
            for needed in needs(one)
            if needed not in (made if needed[0] == "Namespace" else everything)
        ]
        if selects_nothing(one, objects):
            found.append(f"{kind} {name} selects nothing")
    return found


def set_at(objects: list[Object], kind: str, path: str, value: Any) -> list[Object]:
    """A copy in which the field of all objects of the kind is changed."""
    changed = copy.deepcopy(objects)
    for one in of_kind(changed, kind):
        here: Any = one
        *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        for part in way:
            here = here[part]
        here[last] = value
    return changed


@pytest.mark.parametrize("together", TOGETHER, ids="+".join)
def test_objects_that_one_cluster_gets_have_names_of_their_own_and_find_each_other(
    overlays: dict[str, list[Object]], together: tuple[str, ...]
) -> None:
    objects = [one for name in together for one in overlays[name]]
    assert len(objects) > 10
    assert troubles(objects) == []


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value", "trouble"),
    [
        ("mixed", "RuntimeClass", "metadata/name", "same", "RuntimeClass same twice"),
        ("mixed", "ServiceAccount", "metadata/name", "other", "DaemonSet virtshim-node without ServiceAccount virtshim-node"),
        ("mixed", "PriorityClass", "metadata/name", "other", "DaemonSet virtshim-node without PriorityClass virtshim-node"),
        ("mixed", "ClusterRole", "metadata/name", "other", "ClusterRoleBinding virtshim-node without ClusterRole virtshim-node"),
        ("mixed", "Namespace", "metadata/name", "other", "DaemonSet virtshim-node without Namespace virtshim-system"),
        ("mixed", "DaemonSet", "spec/selector/matchLabels", {"app": "other"}, "DaemonSet virtshim-node selects nothing"),
        ("mixed", "DaemonSet", "spec/template/spec/volumes/0/configMap", {"name": "c"},
         "DaemonSet virtshim-node without ConfigMap c"),
        ("vms-only", "ValidatingAdmissionPolicyBinding", "spec/policyName", "other",
         "ValidatingAdmissionPolicyBinding virtshim-pods without ValidatingAdmissionPolicy other"),
        ("monitoring", "Service", "spec/selector", {"app": "other"}, "Service virtshim-metrics selects nothing"),
        ("monitoring", "Service", "spec/ports/0/port", 1, "Service virtshim-metrics selects nothing"),
        ("monitoring", "ServiceMonitor", "spec/endpoints/0/port", "other", "ServiceMonitor virtshim selects nothing"),
        ("monitoring", "PrometheusRule", "metadata/namespace", "other", "PrometheusRule virtshim without Namespace other"),
    ],
)  # fmt: skip
def test_a_reference_that_leads_nowhere_is_detected(
    overlays: dict[str, list[Object]], overlay: str, kind: str, path: str, value: Any, trouble: str
) -> None:
    assert troubles(overlays[overlay]) == []
    assert trouble in troubles(set_at(overlays[overlay], kind, path, value))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_kubernetes_own_schema(overlays: dict[str, list[Object]], overlay: str, version: str) -> None:
    objects = [one for one in overlays[overlay] if one["apiVersion"] != OF_THE_OPERATOR]
    assert objects
    for one in objects:
        validate(one, version, strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("DaemonSet", "spec/template/spec/hostPid", True),
        ("DaemonSet", "spec/template/spec/tolerations", {"key": "virtshim.io/vms"}),
        ("PriorityClass", "value", "high"),
        ("ClusterRole", "rules/0/verbs", "patch"),
    ],
)
def test_a_field_that_kubernetes_does_not_take_is_detected(
    overlays: dict[str, list[Object]], kind: str, path: str, value: Any
) -> None:
    (wrong,) = of_kind(set_at(overlays["mixed"], kind, path, value), kind)
    with pytest.raises(ValidationError):
        validate(wrong, VERSIONS[0], strict=True)


def test_the_overlay_for_mixed_nodes_is_the_whole_installation(
    overlays: dict[str, list[Object]], kustomize: Path
) -> None:
    """All manifests of the base and of the DaemonSet are in it, whatever kustomization.yaml lists."""
    written = [
        one
        for directory in (kustomize / "base", kustomize / "overlays/mixed")
        for file in directory.glob("*.yaml")
        if file.name != "kustomization.yaml"
        for one in yaml.safe_load_all(file.read_text())
    ]
    assert sorted(map(name_of, overlays["mixed"])) == sorted(map(name_of, written))
    assert {"Namespace", "DaemonSet", "RuntimeClass", "PriorityClass"} <= {one["kind"] for one in written}


def test_no_container_is_sent_to_nodes_that_run_vms_alone(overlays: dict[str, list[Object]]) -> None:
    assert {one["kind"] for one in overlays["vms-only"]} == {
        "RuntimeClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    }  # fmt: skip


def test_the_daemonset_has_a_place_on_a_full_and_tainted_node(
    overlays: dict[str, list[Object]], pytestconfig: pytest.Config
) -> None:
    (daemonset,) = of_kind(overlays["mixed"], "DaemonSet")
    (priority,) = of_kind(overlays["mixed"], "PriorityClass")
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert pod["priorityClassName"] == priority["metadata"]["name"]
    assert 0 < priority["value"] <= 1_000_000_000
    assert not priority.get("globalDefault")
    kubelet = yaml.safe_load((pytestconfig.rootpath / "deploy/kubelet/90-virtshim.conf").read_text())
    tolerated = {one["key"] for one in pod["tolerations"] if one["operator"] == "Exists"}
    assert {taint["key"] for taint in kubelet["registerWithTaints"]} <= tolerated


def test_the_name_of_the_image_is_written_in_one_place(own: Path, render: Callable[[Path], list[Object]]) -> None:
    file = own / "overlays/mixed/kustomization.yaml"
    file.write_text(file.read_text().replace("newName: virtshim ", "newName: registry.example.com/virtshim "))
    (daemonset,) = of_kind(render(file.parent), "DaemonSet")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert re.fullmatch(r"registry\.example\.com/virtshim:[0-9.]+", container["image"])


def test_the_documented_kustomization_for_an_order_of_ones_own_works(
    own: Path, render: Callable[[Path], list[Object]], pytestconfig: pytest.Config
) -> None:
    page = (pytestconfig.rootpath / "docs/install.md").read_text()
    (block,) = (found for found in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE) if "kind: Kustomization" in found)
    (own / "overlays/kustomization.yaml").write_text(re.sub(r"^    ", "", block, flags=re.MULTILINE))
    (daemonset,) = of_kind(render(own / "overlays"), "DaemonSet")
    assert daemonset["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_one_word_turns_certificates_of_nodes_on(own: Path, render: Callable[[Path], list[Object]]) -> None:
    file = own / "overlays/cluster/kustomization.yaml"
    before = render(file.parent)
    file.write_text(file.read_text().replace("components: []", "components: [certificates]"))
    after = render(file.parent)
    assert troubles(after) == []
    for version in VERSIONS:
        for one in after:
            validate(one, version, strict=True)
    ((former,), (controller,)) = (of_kind(objects, "Deployment") for objects in (before, after))
    words = [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in (former, controller)]
    assert words[1] == [*words[0], "--sign-certificates"]
    (agent,) = of_kind(after, "DaemonSet")
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    directory = container["args"][-1].removeprefix("--certificates=")
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == directory]
    (volume,) = [one for one in agent["spec"]["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["hostPath"] == {"path": directory, "type": "DirectoryOrCreate"}
    assert not mount.get("readOnly")


def rules_of(objects: list[Object]) -> list[Object]:
    (one,) = of_kind(objects, "PrometheusRule")
    return [rule for group in one["spec"]["groups"] for rule in group["rules"]]


def test_the_cluster_gets_the_rules_that_are_tested(overlays: dict[str, list[Object]], kustomize: Path) -> None:
    written = yaml.safe_load((kustomize / "overlays/monitoring/alerts.yaml").read_text())
    assert of_kind(overlays["monitoring"], "PrometheusRule") == [written]


def test_the_address_of_the_alerts_page_is_written_in_one_place(
    own: Path, render: Callable[[Path], list[Object]], overlays: dict[str, list[Object]]
) -> None:
    file = own / "overlays/monitoring/alerts-page.yaml"
    file.write_text(re.sub(r"address: .*", "address: https://docs.internal/alerts.html", file.read_text()))
    before, after = (
        [rule["annotations"]["runbook_url"] for rule in rules_of(objects)]
        for objects in (overlays["monitoring"], render(file.parent))
    )
    assert after == [f"https://docs.internal/alerts.html#{url.partition('#')[2]}" for url in before]


def sections(page: str) -> dict[str, str]:
    """The second-level sections by title."""
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def test_every_alert_leads_to_a_section_that_says_what_to_do(kustomize: Path, pytestconfig: pytest.Config) -> None:
    page = sections((pytestconfig.rootpath / "docs/how-to/alerts.md").read_text())
    rules = rules_of([yaml.safe_load((kustomize / "overlays/monitoring/alerts.yaml").read_text())])
    address = yaml.safe_load((kustomize / "overlays/monitoring/alerts-page.yaml").read_text())["data"]["address"]
    assert [rule["alert"] for rule in rules] == list(page)
    for rule in rules:
        # The site makes anchors from titles in lower case.
        assert rule["annotations"]["runbook_url"] == f"{address}#{rule['alert'].lower()}"
    for title, text in page.items():
        assert re.findall(r"^- \*\*(.+?):\*\* \S", text, re.MULTILINE) == ["Meaning", "Look at", "Do"], title
