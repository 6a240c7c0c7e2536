"""CDI names stand for the devices of their specifications, and invalid specifications are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from virtshim.devices.cdi_directories import CdiDirectories, CdiGrant
from virtshim.devices.cdi_spec import MAX_BYTES, VERSIONS, CdiSpec, check_name, parse_spec
from virtshim.devices.host_files import HostFiles
from virtshim.devices.values import CriDevice, PciAddress
from virtshim.model.errors import InvalidRequest, ShimError

BDF = "0000:3b:00.1"
NODE = {"path": "/dev/vfio/9"}


def spec(*names: str, kind: str = "intel.com/net-pci", **changes: Any) -> dict[str, Any]:
    devices = [{"name": name, "containerEdits": {"deviceNodes": [{"path": f"/dev/{name}"}]}} for name in names]
    return {"cdiVersion": "0.6.0", "kind": kind, "devices": devices} | changes


def parsed(value: Any) -> CdiSpec:
    return parse_spec(json.dumps(value).encode())


class Node:
    """Two directories below a root, as /etc/cdi and /var/run/cdi."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.directories = CdiDirectories(("/etc/cdi", "/var/run/cdi"), HostFiles(str(root)))

    def write(self, path: str, value: Any) -> None:
        file = self._root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value))

    def find(self, *names: str) -> CdiGrant:
        return self.directories.find(names)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# --- one specification


@pytest.mark.parametrize("version", [*VERSIONS, "v1.0.0"])
def test_every_version_up_to_1_1_0_is_read(version: str) -> None:
    assert parsed(spec("a", cdiVersion=version)).kind == "intel.com/net-pci"


def test_nodes_have_the_hosts_path_and_variables_are_kept(node: Node) -> None:
    edits = {
        "deviceNodes": [{"path": "/dev/vfio/9", "hostPath": "/dev/vfio/noiommu-9", "permissions": "r"}, NODE],
        "env": ["PCIDEVICE_X=0000:3b:00.1,", "EMPTY="],
    }
    (device,) = parsed(spec(devices=[{"name": BDF, "containerEdits": edits}])).devices
    assert device.edits.nodes == (
        CriDevice("/dev/vfio/noiommu-9", "/dev/vfio/9", "r"),
        CriDevice("/dev/vfio/9", "/dev/vfio/9", "rwm"),
    )
    assert device.edits.envs == (("PCIDEVICE_X", "0000:3b:00.1,"), ("EMPTY", ""))


def test_the_annotation_bdf_is_the_devices_address() -> None:
    device = {"name": "gpu0", "annotations": {"bdf": BDF, "clique-id": "0"}, "containerEdits": {}}
    assert parsed(spec(devices=[device])).devices[0].address == PciAddress.parse(BDF)


def test_yaml_and_json_say_the_same() -> None:
    value = spec("a", "b", containerEdits={"env": ["A=b"]})
    assert parse_spec(yaml.safe_dump(value).encode()) == parsed(value)


def test_a_null_field_counts_as_absent() -> None:
    value = spec(devices=[{"name": "a", "annotations": None, "containerEdits": None}], containerEdits=None)
    assert parsed(value).devices[0].name == "a"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cdiVersion": "1.2.0"}, "cdiVersion"),
        ({"cdiVersion": 1.0}, "cdiVersion"),
        ({"kind": "net-pci"}, "kind"),
        ({"kind": "intel.com/net-pci\n"}, "kind"),
        ({"kind": "9intel/net"}, "kind"),
        ({"devices": []}, "devices"),
        ({"devices": [{"name": "-a", "containerEdits": {}}]}, "devices.0.name"),
        ({"devices": [{"name": "a", "containerEdits": {}}] * 2}, "device a is listed twice"),
        ({"devices": [{"name": "a", "annotations": {"bdf": "3b.1"}, "containerEdits": {}}]}, "not a PCI address"),
        ({"containerSpec": {}}, "containerSpec: Extra inputs"),
        ({"containerEdits": {"devicenodes": []}}, "containerEdits.devicenodes"),
        ({"containerEdits": {"deviceNodes": [{"hostPath": "/dev/x"}]}}, "deviceNodes.0.path"),
        ({"containerEdits": {"deviceNodes": [{"path": "/dev/x", "type": "block"}]}}, "type"),
        ({"containerEdits": {"deviceNodes": [{"path": "/dev/x", "permissions": "x"}]}}, "permissions"),
        ({"containerEdits": {"env": ["NOTHING"]}}, "env.0"),
        ({"containerEdits": {"env": ["=x"]}}, "env.0"),
    ],
)
def test_a_violation_of_the_standard_makes_a_specification_invalid_and_says_where(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parsed(spec("a") | change)


def test_many_faults_give_a_short_message() -> None:
    with pytest.raises(InvalidRequest, match="and 7 more") as error:
        parsed(spec("a") | {f"field{n}": 1 for n in range(10)})
    assert len(str(error.value)) < 300


@given(st.binary(max_size=300))
def test_any_bytes_give_a_specification_or_a_readable_error(data: bytes) -> None:
    _value_or_error(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1.0.0", "a.b/c", BDF]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "cdiVersion",
                    "kind",
                    "devices",
                    "name",
                    "containerEdits",
                    "deviceNodes",
                    "env",
                    "path",
                    "annotations",
                    "bdf",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"cdiVersion": st.just("1.0.0"), "kind": st.just("a.b/c"), "devices": JSON, "containerEdits": JSON}
    )
)
@settings(max_examples=40)
def test_any_shape_gives_a_specification_or_a_readable_error(value: Any) -> None:
    _value_or_error(json.dumps(value).encode())
    _value_or_error(yaml.safe_dump(value).encode())


def _value_or_error(data: bytes) -> None:
    try:
        assert isinstance(parse_spec(data), CdiSpec)
    except ShimError as exc:
        assert str(exc)


# --- names


@pytest.mark.parametrize(
    "name", ["intel.com/net-pci=0000:3b:00.1", "nvidia.com/gpu=all", "a/b=0", "k8s.dra.io/claim=u-1.x"]
)
def test_a_qualified_name_is_accepted(name: str) -> None:
    check_name(name)  # raises what it does not like


@pytest.mark.parametrize(
    "name", ["", "gpu=all", "nvidia.com/gpu", "nvidia.com/gpu=", "/x/y=z", "a/b=c=d", "a/b=-c", "1a/b=c", "a/b=c\n"]
)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a CDI device name"):
        check_name(name)


# --- directories


def test_a_device_is_found_in_either_directory_with_its_specifications_edits_once(node: Node) -> None:
    node.write(
        "/etc/cdi/a.json",
        spec("x", "y", containerEdits={"deviceNodes": [{"path": "/dev/vfio/vfio"}], "env": ["QAT0=1"]}),
    )
    node.write("/var/run/cdi/b.yaml", yaml.safe_dump(spec("z", kind="other.com/k")))
    found = node.find("intel.com/net-pci=x", "intel.com/net-pci=y", "other.com/k=z", "intel.com/net-pci=x")
    assert [one.host_path for one in found.nodes] == ["/dev/x", "/dev/y", "/dev/z", "/dev/vfio/vfio"]
    assert found.envs == (("QAT0", "1", "/etc/cdi/a.json"),)
    assert found.faults == ()


def test_the_later_directory_wins(node: Node) -> None:
    node.write(
        "/etc/cdi/a.json", spec(devices=[{"name": "x", "containerEdits": {"deviceNodes": [{"path": "/dev/old"}]}}])
    )
    node.write("/var/run/cdi/a.json", spec("x"))
    assert [one.host_path for one in node.find("intel.com/net-pci=x").nodes] == ["/dev/x"]


def test_a_device_described_twice_in_one_directory_is_an_error_for_that_device_alone(node: Node) -> None:
    node.write("/etc/cdi/a.json", spec("x", "y"))
    node.write("/etc/cdi/b.json", spec("x"))
    found = node.find("intel.com/net-pci=x", "intel.com/net-pci=y")
    assert [one.host_path for one in found.nodes] == ["/dev/y"]
    assert found.faults == (
        "CDI: intel.com/net-pci=x is described twice, by /etc/cdi/a.json and /etc/cdi/b.json; remove one",
    )


def test_reading_many_large_specifications_stops_after_a_few_seconds(node: Node) -> None:
    for number in range(20):
        node.write(f"/etc/cdi/{number:02}.json", json.dumps(spec(f"d{number}")) + " " * (MAX_BYTES - 1000))
    found = node.find("intel.com/net-pci=d0", "intel.com/net-pci=d19")
    assert [one.host_path for one in found.nodes] == ["/dev/d0"]
    assert "/etc/cdi/19.json: beyond the" in found.faults[0]


def test_the_error_for_an_unknown_device_names_directories_and_unusable_files(node: Node) -> None:
    node.write("/etc/cdi/bad.json", spec("x", cdiVersion="9.9.9"))
    (fault,) = node.find("intel.com/net-pci=x").faults
    assert fault.startswith(
        "CDI: no specification in /etc/cdi and /var/run/cdi describes intel.com/net-pci=x; check that"
    )
    assert "/etc/cdi/bad.json: cdiVersion" in fault


def test_files_that_are_no_specifications_are_not_read(node: Node, tmp_path: Path) -> None:
    node.write("/etc/cdi/a.json", spec("x"))
    node.write("/etc/cdi/a.json.tmp", "{")
    (tmp_path / "etc/cdi/d.json").mkdir()
    node.write("/etc/cdi/long.json", "#" * (MAX_BYTES + 1))
    with capture_logs() as logs:
        assert node.find("intel.com/net-pci=x").faults == ()
    assert [entry["error"] for entry in logs] == [
        "/etc/cdi/d.json: cannot be read: Is a directory",
        f"/etc/cdi/long.json: longer than {MAX_BYTES} bytes",
    ]


def test_reading_a_fifo_does_not_block(node: Node, tmp_path: Path) -> None:
    node.write("/etc/cdi/a.json", spec("x"))
    os.mkfifo(tmp_path / "etc/cdi/b.json")
    assert node.find("intel.com/net-pci=x").faults == ()


NODES = {"deviceNodes": [{"path": "/dev/x"}]}
FOR_CONTAINERS = {
    "hooks": [{"hookName": "createContainer", "path": "/bin/x"}],
    "mounts": [{"hostPath": "/a", "containerPath": "/b"}],
    "additionalGids": [44],
    "intelRdt": {"closID": "a"},
}


def test_edits_of_a_gpus_specification_for_containers_only_are_left_out_and_named(node: Node) -> None:
    devices = [{"name": "x", "containerEdits": NODES | {"hooks": FOR_CONTAINERS["hooks"]}}]
    node.write("/etc/cdi/a.json", spec("x", devices=devices, containerEdits=FOR_CONTAINERS, cdiVersion="1.1.0"))
    found = node.find("intel.com/net-pci=x")
    assert [one.host_path for one in found.nodes] == ["/dev/x"]
    assert found.faults == ()
    assert found.not_given == ("additionalGids and hooks and intelRdt and mounts of /etc/cdi/a.json",)


@pytest.mark.parametrize("field", sorted(FOR_CONTAINERS))
def test_a_device_with_nothing_for_a_vm_is_refused_by_name(node: Node, field: str) -> None:
    devices = [{"name": "x", "containerEdits": {field: FOR_CONTAINERS[field]}}]
    node.write("/etc/cdi/a.json", spec("x", devices=devices, cdiVersion="1.1.0"))
    (fault,) = node.find("intel.com/net-pci=x").faults
    assert f"intel.com/net-pci=x has nothing that a virtual machine can use: only {field} (/etc/cdi/a.json)" in fault


@pytest.mark.parametrize("shared", [False, True])
def test_a_network_interface_of_the_node_is_refused_by_name_and_with_the_remedy(node: Node, shared: bool) -> None:
    edits = NODES | {"netDevices": [{"hostInterfaceName": "eth1", "name": "net1"}]}
    own, common = (NODES, edits) if shared else (edits, {})
    devices = [{"name": "x", "containerEdits": own}]
    node.write("/etc/cdi/a.json", spec("x", devices=devices, containerEdits=common, cdiVersion="1.1.0"))
    (fault,) = node.find("intel.com/net-pci=x").faults
    assert "intel.com/net-pci=x is a network interface of the node (netDevices in /etc/cdi/a.json)" in fault
    assert "vfio-pci" in fault


def test_a_survey_counts_usable_devices_and_names_the_rest(node: Node) -> None:
    node.write("/etc/cdi/a.json", spec("x"))
    node.write("/etc/cdi/b.json", spec("x", "y"))
    node.write("/etc/cdi/c.json", spec("z", cdiVersion="7.0.0"))
    assert node.directories.survey() == (
        2,
        (
            "/etc/cdi/c.json: cdiVersion: '7.0.0' is not a version that virtshim knows (0.1.0 to 1.1.0)",
            "intel.com/net-pci=x is in /etc/cdi/a.json and /etc/cdi/b.json",
        ),
    )


def test_without_a_device_name_no_file_is_read(node: Node) -> None:
    node.write("/etc/cdi/bad.json", "{")
    with capture_logs() as logs:
        assert node.find() == CdiGrant()
    assert logs == []


def test_a_directory_with_the_name_of_a_specification_is_a_fault_and_leaks_no_descriptor(node: Node) -> None:
    node.write("/etc/cdi/a.json/file", "")
    node.directories.survey()
    before = len(os.listdir("/proc/self/fd"))
    _, (fault,) = node.directories.survey()
    assert "/etc/cdi/a.json" in fault
    assert len(os.listdir("/proc/self/fd")) == before
