"""Documents and examples agree with the code."""

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import phases_plot
from fakes.described_metrics import OF_BOTH, OF_PROCESS, OF_PROXY, RECORDED
from fakes.sysfs import FakeSysfs

from virtshim.annotations.parse import KNOWN, parse_vm_options
from virtshim.cli.help import GROUPS
from virtshim.config.settings import Settings
from virtshim.cri.error_codes import GRPC_CODES
from virtshim.cri.stats import CONTAINER_FAMILIES, POD_FAMILIES
from virtshim.devices.grants import NoDevice, Unusable, classify
from virtshim.devices.host_files import NodeKind
from virtshim.devices.values import CriDevice
from virtshim.metrics.node import CNI_SECONDS, OF_NODE, OF_SCRAPE, OF_VMS
from virtshim.model.errors import InvalidRequest
from virtshim.model.layout import share_dir
from virtshim.model.troubles import TroubleKind
from virtshim.preflight import checks, network, virtualization
from virtshim.store.migrate import HEAD

pytestmark = pytest.mark.operator

ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="session")
def root(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath


def documents(root: Path) -> list[Path]:
    return sorted((*root.glob("*.md"), *(root / "docs").glob("*.md"), *(root / "docs/dev").glob("*.md")))


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_test_that_a_document_names_exists(root: Path) -> None:
    """`file: test`; a test that is named alone is of the file named before it."""
    tests, named, absent = root / "tests", 0, []
    for document in documents(root):
        of_files: dict[str, str] = {}
        file = ""
        for path, name in re.findall(r"`(?:([\w/]+\.py):\s+)?(test_\w+)`", document.read_text()):
            file = path or file
            if file not in of_files:
                of_files[file] = (tests / file).read_text() if file and (tests / file).is_file() else ""
            named += 1
            if f"def {name}(" not in of_files[file]:
                absent.append(f"{document.name}: {file}: {name}")
    assert named > 100
    assert absent == []


def test_every_annotation_is_listed_once(root: Path) -> None:
    listed = [name for name, _, _ in ROW.findall((root / "docs/annotations.md").read_text())]
    assert sorted(listed) == sorted(KNOWN)


def test_every_check_is_listed_by_its_key(root: Path) -> None:
    text = section((root / "docs/commands.md").read_text(), "Check")
    table = re.findall(r"^\| (`\w+`.*?) \| .+ \|$", text, re.MULTILINE)
    listed = [name for cell in table for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(
        ["configuration", "devices", "runtime_class", *(check.__name__ for check in checks.ALL)]
    )


def test_every_command_is_on_the_page_of_commands(root: Path) -> None:
    """The page describes `check` and `diag` in sections of their own, and names those that other pages describe."""
    text = (root / "docs/commands.md").read_text()
    commands = [name for names in GROUPS.values() for name in names]
    assert [name for name in commands if not re.search(rf"virtshim (--)?{name}\b", text)] == []


def test_every_kind_of_trouble_is_listed(root: Path) -> None:
    section = (root / "docs" / "pods.md").read_text().split("\n## Problems of a running VM\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {kind.value for kind in TroubleKind}


def test_every_metric_is_listed_as_it_is_described(root: Path) -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.+) \| (.+) \|$", (root / "docs/metrics.md").read_text(), re.MULTILINE
    )
    described = [(f.name, f.kind, f.labels, f.help) for f in CONTAINER_FAMILIES]
    described += [(f.name, f.kind, f.labels, f.help) for f in POD_FAMILIES]
    own = (
        RECORDED,
        OF_NODE,
        OF_SCRAPE,
        OF_VMS,
        (CNI_SECONDS,),
        OF_PROXY,
        OF_PROCESS,
        OF_BOTH,
    )
    described += [(one.name, one.kind, one.labels, one.help) for group in own for one in group]
    assert sorted(listed) == sorted(
        (name, kind, ", ".join(labels) or "-", text) for name, kind, labels, text in described
    )


def test_settings_listed_as_refused_are_refused(root: Path) -> None:
    name = "VirtletChown9pfsMounts"
    rows = ROW.findall((root / "docs/annotations.md").read_text())
    (verdict,) = [verdict for listed, _, verdict in rows if listed == name]
    assert "refused" in verdict
    with pytest.raises(InvalidRequest, match="not supported yet"):
        parse_vm_options({name: "true"})


def test_the_documented_apparmor_rules_are_those_that_check_requires(root: Path) -> None:
    document = (root / "docs/install.md").read_text()
    settings = Settings()
    wrapper = settings.libvirt.vmwrapper
    rules = (
        *virtualization.rules_of_daemon(wrapper),
        *virtualization.rules_of_guests(
            wrapper, settings.tapmanager.socket, f"{share_dir(settings.layout())}/*/fs.sock"
        ),
    )
    for rule in rules:
        assert f"    {rule}\n" in document


def test_every_kind_of_error_is_listed_with_its_grpc_code(root: Path) -> None:
    text = section((root / "docs/dev/failures.md").read_text(), "Error kinds")
    listed = dict(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", text, re.MULTILINE))
    assert listed == {kind.name: code.name for kind, code in GRPC_CODES.items()}


def test_every_file_that_a_document_names_exists(root: Path) -> None:
    tops = ("criproto", "virtshim", "tapmanager", "vmwrapper", "deploy", "systemd", "tests", "docs")
    files = {
        path.relative_to(root) for top in tops for path in (root / top).rglob("*") if "__pycache__" not in path.parts
    }
    names = {path.name for path in files}
    missing = [
        f"{document.name}: {named}"
        for document in documents(root)
        for named in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|S|c|sh|proto|toml))(?::[\w.]+)?`", document.read_text())
        if not ((root / named).is_file() if "/" in named else named in names or (root / named).is_file())
    ]
    assert missing == []


def test_every_directory_that_a_document_names_exists(root: Path) -> None:
    directory = re.compile(r"`((?:criproto|virtshim|tapmanager|vmwrapper|deploy|tests)/[\w/-]*)`")
    named = [(document, name) for document in documents(root) for name in directory.findall(document.read_text())]
    assert named
    assert [f"{document.name}: {name}" for document, name in named if not (root / name).is_dir()] == []


def test_every_function_that_a_document_names_is_in_its_file(root: Path) -> None:
    named = [
        (document.name, path, name)
        for document in documents(root)
        for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", document.read_text())
    ]
    assert named
    assert [place for place in named if place[2] not in definitions((root / place[1]).read_text())] == []


def definitions(source: str) -> set[str]:
    """What a module and its classes define, by qualified name: `Class.method`."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse(source).body, "")
    return found


def test_every_decision_is_described_in_one_place(root: Path) -> None:
    text = (root / "docs/dev/decisions.md").read_text()
    numbers = sorted(int(number) for number in re.findall(r"^\*\*(\d+)\. ", text, re.MULTILINE))
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 28


def test_the_page_on_upgrades_names_the_schema_of_this_version(root: Path) -> None:
    text = (root / "docs/install.md").read_text()
    assert re.findall(r"This version has the schema `(\d+)`", text) == [HEAD]


def test_every_promise_has_a_unique_key(root: Path) -> None:
    keys = re.findall(r"^\|.*\| `([a-z0-9_]+)` \| ", (root / "docs/PROMISES.md").read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys)) == 33


def test_links_between_documents_work(root: Path) -> None:
    broken = []
    for document in documents(root):
        for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", document.read_text()):
            file = document.parent / target if target else document
            if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
                broken.append(f"{document.name}: {target}#{anchor}")
    assert broken == []


def anchors(text: str) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_names_every_document(root: Path) -> None:
    text = (root / "README.md").read_text()
    unnamed = [
        path.name for path in documents(root) if path.name != "README.md" and f"({path.relative_to(root)})" not in text
    ]
    assert unnamed == []


def test_files_that_the_readme_installs_exist(root: Path) -> None:
    named = re.findall(r"(?<![\w/])(?:systemd|deploy|docs)/[\w./-]*\w", (root / "README.md").read_text())
    assert {name for name in named if not (root / name).exists()} == set()


def test_the_example_network_is_a_cni_configuration(root: Path) -> None:
    found = network.parsed((root / "deploy/cni/10-virtshim.conflist").read_text())
    assert found.programs == ("bridge", "host-local", "portmap")


def test_the_examples_agree_with_each_other_and_with_the_defaults(root: Path) -> None:
    settings = Settings()
    runtime_classes: Any = list(yaml.safe_load_all((root / "deploy/kustomize/base/runtimeclass.yaml").read_text()))
    kubelet: Any = yaml.safe_load((root / "deploy/kubelet/90-virtshim.conf").read_text())
    handlers = {*settings.cri.runtime_handlers, *settings.proxy.pod_handlers}
    assert {one["handler"] for one in runtime_classes} <= handlers
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{settings.cri_socket}"
    (taint,) = kubelet["registerWithTaints"]
    for one in runtime_classes:
        (toleration,) = one["scheduling"]["tolerations"]
        assert (toleration["key"], toleration["effect"]) == (taint["key"], taint["effect"])


def test_the_proxys_examples_agree_with_its_defaults(root: Path) -> None:
    endpoint = f"unix://{Settings().proxy_socket}"
    kubelet: Any = yaml.safe_load((root / "deploy/kubelet/91-virtshim-proxy.conf").read_text())
    crictl: Any = yaml.safe_load((root / "deploy/crictl-proxy.yaml").read_text())
    assert {kubelet["containerRuntimeEndpoint"], crictl["runtime-endpoint"], crictl["image-endpoint"]} == {endpoint}
    shown = (root / "docs/proxy.md").read_text().split("<<'EOF'\n", 1)[1].split("    EOF", 1)[0]
    assert Settings(**tomllib.loads(shown)) == Settings(vm={"require_overhead": True})


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


def test_the_table_of_device_nodes_matches_the_code(root: Path, tmp_path: Path) -> None:
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


def test_the_plot_of_startup_phases_matches_its_numbers(root: Path) -> None:
    numbers = json.loads((root / "docs/dev/startup.json").read_text())
    assert (root / "docs/dev/startup.svg").read_text() == phases_plot.draw(numbers)
