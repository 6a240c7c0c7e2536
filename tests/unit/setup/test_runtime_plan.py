"""Set-up copies containerd's default OCI runtime into an entry for pods with containers beside their VM."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from fakes.sysfs import FakeSysfs

from virtshim.neighbours.runtimes import CONTAINERD_FILE, read
from virtshim.setup.changes import FilePlan
from virtshim.setup.facts import NodeFacts
from virtshim.setup.runtime_plan import plan
from virtshim.setup.units import pending

pytestmark = [pytest.mark.operator, pytest.mark.helpers]

V2 = 'plugins."io.containerd.grpc.v1.cri".containerd'
V3 = "plugins.'io.containerd.cri.v1.runtime'.containerd"


@pytest.fixture
def node(tmp_path: Path) -> FakeSysfs:
    node = FakeSysfs(tmp_path)
    node.write("/usr/bin/containerd", "")
    return node


def planned(node: FakeSysfs, *handlers: str) -> FilePlan:
    (runtime,) = read(node.files())
    texts = {CONTAINERD_FILE: node.path(CONTAINERD_FILE).read_text()} if node.path(CONTAINERD_FILE).exists() else {}
    return plan(runtime, handlers or ("virtshim-pod",), texts)


def written(found: FilePlan) -> str:
    assert found.problems == ()
    (file,) = found.files
    return file.content.decode()


def runtimes(text: str, plugin: str = "io.containerd.grpc.v1.cri") -> Any:
    return tomllib.loads(text)["plugins"][plugin]["containerd"]["runtimes"]


@pytest.mark.parametrize(
    "before", ["", "version = 2\n[plugins]\n  [plugins.'io.containerd.grpc.v1.cri'.cni]\n    bin_dir = '/x'\n"]
)
def test_containerds_own_default_gets_a_table_too(node: FakeSysfs, before: str) -> None:
    """Without it containerd 1 would have no runtime but the added one."""
    if before:
        node.write(CONTAINERD_FILE, before)
    text = written(planned(node))
    assert text.startswith(before or "version = 2\n")
    runc = {"runtime_type": "io.containerd.runc.v2"}
    assert runtimes(text) == {"runc": runc, "virtshim-pod": runc}


def test_the_default_runtime_is_copied_with_its_options(node: FakeSysfs) -> None:
    options = 'SystemdCgroup = true\nBinaryName = "/opt/crun"\nIoUid = 0'
    node.write(
        CONTAINERD_FILE,
        f"""version = 2
[{V2}]
default_runtime_name = "crun"
[{V2}.runtimes.crun]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["one", "two.*"]
[{V2}.runtimes.crun.options]
{options}
""",
    )
    found = runtimes(written(planned(node)))
    assert found["virtshim-pod"] == found["crun"]
    assert found["crun"]["options"] == {"SystemdCgroup": True, "BinaryName": "/opt/crun", "IoUid": 0}
    assert set(found) == {"crun", "virtshim-pod"}


def test_a_file_of_version_3_and_a_handler_of_the_operators_choice(node: FakeSysfs) -> None:
    node.write(CONTAINERD_FILE, f"version = 3\n[{V3}.runtimes.runc.options]\nSystemdCgroup = true\n")
    found = runtimes(written(planned(node, "vm.and-more")), "io.containerd.cri.v1.runtime")
    assert found["vm.and-more"] == {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True}}


def test_an_entry_of_the_operators_own_is_kept(node: FakeSysfs) -> None:
    node.write(CONTAINERD_FILE, f"version = 2\n[{V2}.runtimes.virtshim-pod]\nruntime_type = 'x'\n")
    assert planned(node) == FilePlan()


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("[debug]\nlevel = 'warn'\n", "does not say version = 2 or 3"),
        (f"version = 2\n[{V2}]\ndefault_runtime_name = 'kata'\n", "does not set its default runtime kata"),
        ("version = 2\nplugins = {}\n", "in a form that cannot be extended"),
        (
            "version = 2\nimports = ['/etc/containerd/more/*.toml']\n",
            "settings of CRI are in /etc/containerd/more/cri.toml",
        ),
    ],
)
def test_a_file_that_cannot_be_extended_is_left_to_the_operator(node: FakeSysfs, before: str, says: str) -> None:
    node.write(CONTAINERD_FILE, before)
    node.write("/etc/containerd/more/cri.toml", f"[{V2}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n")
    found = planned(node)
    assert found.files == ()
    (problem,) = found.problems
    assert says in problem
    assert "containerd has no OCI runtime virtshim-pod" in problem
    assert "by hand, and restart containerd" in problem


def test_crio_gets_no_entry_because_the_proxy_would_refuse_the_vms(tmp_path: Path) -> None:
    node = FakeSysfs(tmp_path)
    node.write("/usr/bin/crio", "")
    node.write("/etc/crio/crio.conf.d/10-crio.conf", "[crio.runtime.runtimes.crun]\nruntime_path = '/usr/bin/crun'\n")
    assert planned(node) == FilePlan()


def test_containerd_is_restarted_if_its_file_has_changed() -> None:
    installed = NodeFacts(units=frozenset({"containerd.service", "crio.service"}))
    assert pending({CONTAINERD_FILE}, installed) == [("try-restart", "containerd.service")]
    assert pending({CONTAINERD_FILE}, NodeFacts()) == []
