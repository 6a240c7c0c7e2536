"""What the documents and examples say is what the code says."""

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.sysfs import FakeSysfs

from virtshim.config import Settings
from virtshim.cri.error_codes import GRPC_CODES
from virtshim.cri.stats import CONTAINER_FAMILIES, POD_FAMILIES
from virtshim.devices.classify import NoDevice, Unusable, classify
from virtshim.devices.host_files import NodeKind
from virtshim.domain.annotations.parse import _READERS, parse_vm_options
from virtshim.domain.devices.granted import CriDevice
from virtshim.domain.errors import InvalidRequest
from virtshim.preflight import network, virtualization

pytestmark = pytest.mark.operator

ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="session")
def root(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath


@pytest.fixture(scope="session")
def operator(root: Path) -> str:
    return (root / "docs/operator.md").read_text()


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_setting_is_listed_with_its_default(operator: str) -> None:
    listed = {name: json.loads(default.strip("`")) for name, default, _ in ROW.findall(section(operator, "Settings"))}
    tables = json.loads(Settings().model_dump_json())
    assert listed == {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}


def test_every_annotation_is_listed(operator: str) -> None:
    listed = [name for name, _, _ in ROW.findall(section(operator, "Annotations"))]
    assert sorted(listed) == sorted(_READERS)


def test_every_metric_is_listed_as_it_is_described(root: Path) -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.+) \| (.+) \|$", (root / "docs/metrics.md").read_text(), re.MULTILINE
    )
    families = [*CONTAINER_FAMILIES, *POD_FAMILIES]
    assert sorted(listed) == sorted((f.name, f.kind.value, ", ".join(f.labels) or "-", f.help) for f in families)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VirtletCloudInitUserDataSource", "secret/x"),
        ("VirtletCloudInitUserDataSourceKey", "x"),
        ("VirtletCloudInitUserDataSourceEncoding", "plain"),
        ("VirtletSSHKeySource", "secret/x"),
        ("VirtletFilesFromDataSource", "secret/x"),
        ("VirtletLibvirtCPUSetting", "mode: x"),
        ("VirtletChown9pfsMounts", "true"),
    ],
)
def test_what_is_listed_as_refused_is_refused(operator: str, name: str, value: str) -> None:
    (verdict,) = [verdict for listed, _, verdict in ROW.findall(operator) if listed == name]
    assert "refused" in verdict
    with pytest.raises(InvalidRequest, match="not supported yet"):
        parse_vm_options({name: value})


def test_the_apparmor_rules_are_those_that_check_asks_for(operator: str) -> None:
    settings = Settings()
    wrapper = settings.libvirt.vmwrapper
    rules = (
        *virtualization.rules_of_daemon(wrapper),
        *virtualization.rules_of_guests(wrapper, settings.tapmanager.socket),
    )
    for rule in rules:
        assert f"    {rule}\n" in operator


def test_every_kind_of_error_is_listed_with_its_grpc_code(root: Path) -> None:
    text = section((root / "docs/ARCHITECTURE.md").read_text(), "Error kinds")
    listed = dict(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", text, re.MULTILINE))
    assert listed == {kind.name: code.name for kind, code in GRPC_CODES.items()}


def test_every_package_is_in_the_tree(root: Path) -> None:
    tree = section((root / "docs/ARCHITECTURE.md").read_text(), "Tree")
    packages = {path.parent.name for path in (root / "virtshim").glob("*/__init__.py")}
    assert {name for name in packages if f"      {name}/" not in tree} == set()


def test_every_promise_has_a_key_of_its_own(root: Path) -> None:
    keys = re.findall(r"^\|.*\| `([a-z0-9_]+)` \| ", (root / "docs/PROMISES.md").read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys)) == 16


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    for document in (root / "README.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_files_that_the_readme_installs_are_there(root: Path) -> None:
    named = re.findall(r"(?<![\w/])(?:systemd|deploy|docs)/[\w./-]*\w", (root / "README.md").read_text())
    assert {name for name in named if not (root / name).exists()} == set()


def test_the_example_network_is_a_cni_configuration(root: Path) -> None:
    found = network.parsed((root / "deploy/cni/10-virtshim.conflist").read_text())
    assert found.programs == ("bridge", "host-local", "portmap")


def test_the_examples_agree_with_each_other_and_with_the_defaults(root: Path) -> None:
    settings = Settings()
    runtime_class: Any = yaml.safe_load((root / "deploy/runtimeclass.yaml").read_text())
    kubelet: Any = yaml.safe_load((root / "deploy/kubelet/90-virtshim.conf").read_text())
    assert runtime_class["handler"] in settings.cri.runtime_handlers
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{settings.cri_socket}"
    (taint,) = kubelet["registerWithTaints"]
    (toleration,) = runtime_class["scheduling"]["tolerations"]
    assert (toleration["key"], toleration["effect"]) == (taint["key"], taint["effect"])


def test_the_example_pods_are_pods_of_the_runtime_class(root: Path) -> None:
    text = (root / "README.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    pods: list[Any] = [yaml.safe_load(block) for block in blocks if "kind: Pod\n" in block]
    assert len(pods) == 2
    for pod in pods:
        assert pod["spec"]["runtimeClassName"] == "virtshim"
        annotations = pod["metadata"].get("annotations", {})
        annotations.pop("VirtletSSHKeys", None)  # "AAAA..." stands for the reader's key
        parse_vm_options(annotations)


def test_the_wheel_puts_the_commands_where_the_units_look_for_their_links(root: Path) -> None:
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    for name in scripts:
        assert f"ExecStart=/usr/local/bin/{name}" in (root / "systemd" / f"{name}.service").read_text()


def test_every_reason_why_a_vm_cannot_have_a_device_is_explained(root: Path) -> None:
    table = section((root / "docs/devices.md").read_text(), "Before a VM is made")
    listed = re.findall(r"^\| ((?!no:|--).+?) \| .+ \| .+ \|$", table, re.MULTILINE)
    tree = ast.parse((root / "virtshim/devices/attachable.py").read_text())
    made = {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Fault" and isinstance(call.args[0], ast.Constant)
    }
    assert sorted(listed) == sorted(made)


def test_what_is_listed_of_device_nodes_is_what_becomes_of_them(root: Path, tmp_path: Path) -> None:
    host = FakeSysfs(tmp_path)
    host.cdev("vfio3", host.pci("0000:3b:00.0", 17))
    host.node("/dev/sdb", NodeKind.BLOCK)
    table = section((root / "docs/devices.md").read_text(), "What a granted node becomes")
    rows = re.findall(r"^\| (.*`/.+`) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) == 13
    for cells, said in rows:
        for path in re.findall(r"`(/[^`]+)`", cells):
            if path not in ("/dev/vfio", "/dev/sdb", "/dev/vfio/devices/vfio3"):
                host.node(path)
            meaning = classify(CriDevice(path, path), host.files())
            assert isinstance(meaning, Unusable) == said.startswith("refused"), path
            assert isinstance(meaning, NoDevice) == (said == "nothing by itself"), path
