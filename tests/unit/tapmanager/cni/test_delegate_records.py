"""tapmanager reads the records of a meta plugin as untrusted files."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager.cni import delegate_records
from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.delegate_records import Delegate
from tapmanager.fields import BadField

SANDBOX, OTHER = "ab" * 32, "cd" * 32
VF = "0000:3b:02.1"
RESULT = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "net1", "mac": "0a:58:0a:01:00:07", "sandbox": "/run/netns/x"}],
    "ips": [{"address": "10.1.0.7/24", "gateway": "10.1.0.1", "interface": 0}],
}
SRIOV = {"type": "sriov", "name": "fast", "deviceID": VF, "pciBusID": VF}


def record(**changes: object) -> dict[str, object]:
    conf = changes.pop("conf", SRIOV)
    config = conf if isinstance(conf, str) else base64.b64encode(json.dumps(conf).encode()).decode()
    return {
        "kind": "cniCacheV1",
        "containerId": SANDBOX,
        "config": config,
        "ifName": "net1",
        "networkName": "fast",
        "netns": "/run/netns/x",
        "cniArgs": [["K8S_POD_NAME", "web-0"]],
        "result": RESULT,
        **changes,
    }


def parsed(name: str = f"fast-{SANDBOX}-net1", **changes: object) -> Delegate:
    return delegate_records.parse(json.dumps(record(**changes)).encode(), name, SANDBOX)


class Node:
    """A node with Multus on it. `keep` is what libcni does."""

    def __init__(self, folder: Path) -> None:
        self.results = folder / "results"
        self.results.mkdir()
        self.conf = NetworkConf("n", "1.0.0", ({"type": "multus", "cniDir": str(folder)},))

    def keep(self, network: str = "fast", sandbox: str = SANDBOX, interface: str = "net1", **changes: object) -> Path:
        path = self.results / f"{network}-{sandbox}-{interface}"
        whole = record(networkName=network, containerId=sandbox, ifName=interface, **changes)
        path.write_text(json.dumps(whole))
        path.chmod(0o600)
        return path

    def read(self) -> list[str]:
        return sorted(delegate.interface for delegate in delegate_records.read(self.conf, SANDBOX))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_record_has_the_network_interface_addresses_and_device() -> None:
    found = parsed()
    assert (found.network, found.interface, found.device, found.kinds) == ("fast", "net1", VF, ("sriov",))
    assert [ip.address for ip in found.result.ips] == ["10.1.0.7/24"]


def test_the_device_of_a_chain_is_that_of_its_first_plugin_that_has_one() -> None:
    found = parsed(conf={"name": "fast", "plugins": [{"type": "tuning"}, {"type": "sriov", "deviceID": VF.upper()}]})
    assert (found.device, found.kinds) == (VF, ("tuning", "sriov"))


def test_a_device_from_the_pods_annotation_is_not_read() -> None:
    found = parsed(conf={"type": "bridge"}, capabilityArgs={"deviceID": "0000:00:1f.0"})
    assert found.device == ""


def test_addresses_without_an_interface_belong_to_the_records_interface() -> None:
    """host-device with a device at VFIO."""
    found = parsed(result={"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.7/24", "interface": 0}]})
    assert [(ip.address, ip.interface) for ip in found.result.ips] == [("10.1.0.7/24", None)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "other"}, "kind"),
        ({"kind": None}, "kind"),
        ({"containerId": OTHER}, "attachment does not match"),
        ({"networkName": "slow"}, "attachment does not match"),
        ({"ifName": "net2"}, "attachment does not match"),
        ({"ifName": "../net1"}, "interface name"),
        ({"ifName": ""}, "interface name"),
        ({"conf": "%%%"}, "base64"),
        ({"conf": base64.b64encode(b"[]").decode()}, "an object"),
        ({"conf": base64.b64encode(b"{").decode()}, "not JSON"),
        ({"conf": {"plugins": [1]}}, "an object"),
        ({"conf": {"deviceID": 7}}, "a string"),
        ({"result": []}, "an object"),
        ({"result": 7}, "an object"),
        ({"result": {"ips": [{"address": "nowhere"}]}}, "address"),
    ],
)
def test_the_error_for_a_bad_record_says_where(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BadField, match=words):
        parsed(**changes)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'"\xff"'])
def test_a_malformed_record_is_a_bad_field(data: bytes) -> None:
    with pytest.raises(BadField):
        delegate_records.parse(data, f"fast-{SANDBOX}-net1", SANDBOX)


@given(raw=st.dictionaries(st.sampled_from(sorted(record())), st.none() | st.text(max_size=5) | st.integers()))
def test_any_json_is_a_record_or_a_bad_field(raw: dict[str, object]) -> None:
    with contextlib.suppress(BadField):
        delegate_records.parse(json.dumps({**record(), **raw}).encode(), f"fast-{SANDBOX}-net1", SANDBOX)


def test_only_this_sandboxs_records_are_read(node: Node) -> None:
    node.keep(interface="net1")
    node.keep("with-dashes", interface="net2")
    node.keep(sandbox=OTHER, interface="net3")
    assert node.read() == ["net1", "net2"]


def test_an_unusable_file_hides_no_other_file(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.keep(interface="net1")
    node.keep(interface="net2").write_text("{")
    assert node.read() == ["net1"]
    assert f"record.not_used sandbox={SANDBOX}" in caplog.text
    assert "net2 error=record: not JSON" in caplog.text


def test_a_huge_file_is_not_taken_into_memory(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with node.keep().open("ab") as file:
        file.truncate(1 << 40)
    assert node.read() == []
    assert "more than" in caplog.text


def test_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    target = node.keep()
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    assert node.read() == []


def test_reading_a_pipe_does_not_block(node: Node) -> None:
    os.mkfifo(node.results / f"fast-{SANDBOX}-net1")
    assert node.read() == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_other_users_may_write_is_ignored(node: Node, mode: int) -> None:
    node.keep().chmod(mode)
    assert node.read() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_ignored(node: Node) -> None:
    os.chown(node.keep(), 65534, 65534)
    assert node.read() == []


def test_records_beyond_the_number_of_pci_slots_are_not_read(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(70):
        node.keep(interface=f"net{number}")
    assert len(node.read()) == 64
    assert "records.too_many" in caplog.text


def test_an_interface_of_two_networks_belongs_to_the_first(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A pod's author may ask twice for one name; without links nothing stops that."""
    node.keep("blue")
    node.keep("green")
    (found,) = delegate_records.read(node.conf, SANDBOX)
    assert found.network == "blue"
    assert "interface net1 also belongs to network blue" in caplog.text


@pytest.mark.parametrize("plugin", [{"type": "bridge"}, {"type": "multus", "cniDir": "relative"}])
def test_plugins_that_keep_no_records_have_none(plugin: dict[str, object]) -> None:
    assert delegate_records.read(NetworkConf("n", "1.0.0", (plugin,)), SANDBOX) == ()


def test_a_meta_plugins_delegates_are_the_plugins_that_work_in_the_namespace(node: Node) -> None:
    conf = NetworkConf("n", "1.0.0", (*node.conf.plugins, {"type": "portmap"}))
    assert delegate_records.kinds(conf, SANDBOX) == {"multus", "portmap"}
    node.keep(conf={"plugins": [{"type": "bridge"}, {"type": "tuning"}]})
    node.keep("fast", interface="net2", conf=SRIOV)
    assert delegate_records.kinds(conf, SANDBOX) == {"portmap", "bridge", "tuning", "sriov"}
