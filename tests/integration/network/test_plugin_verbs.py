"""tapmanager uses STATUS and GC of CNI 1.1, and refuses an address that a plugin assigns twice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tap_node import TapNode, sandbox, until

from tapmanager import protocol

pytestmark = pytest.mark.network

# A plugin that attaches with an address from a file, and records other calls.
PLUGIN = """
config=$(cat)
echo "$CNI_COMMAND" >> {folder}/asked
case $CNI_COMMAND in
STATUS) test ! -e {folder}/trouble || {{ cat {folder}/trouble; exit 1; }} ;;
GC) echo "$config" > {folder}/gc ;;
ADD)
  host=pv$(echo $CNI_CONTAINERID | cut -c1-9)
  ip link add $host type veth peer $CNI_IFNAME netns $(basename $CNI_NETNS)
  ip -n $(basename $CNI_NETNS) addr add $(cat {folder}/address) dev $CNI_IFNAME
  echo '{{"cniVersion": "1.0.0", "interfaces": [{{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}}],
         "ips": [{{"address": "'$(cat {folder}/address)'", "interface": 0}}]}}' ;;
DEL) ip link del pv$(echo $CNI_CONTAINERID | cut -c1-9) 2>&- || true ;;
esac
"""


@pytest.fixture
def node_1_1(quiet_node: TapNode) -> TapNode:
    quiet_node.plugin("told", PLUGIN.format(folder=quiet_node.folder))
    quiet_node.configure({"type": "told"}, version="1.1.0")
    give(quiet_node, "10.90.41.2/24")
    return quiet_node


def give(node: TapNode, address: str) -> None:
    (node.folder / "address").write_text(address)


def asked(node: TapNode) -> list[str]:
    path = node.folder / "asked"
    return path.read_text().split() if path.exists() else []


def reason(node: TapNode) -> str:
    return str(node.call("status")["reason"])


def test_a_plugins_status_error_is_reported_without_waiting_for_the_plugin(node_1_1: TapNode) -> None:
    (node_1_1.folder / "trouble").write_text(json.dumps({"code": 50, "msg": "the controller is away"}))
    node_1_1.start()
    until(lambda: "the controller is away (CNI error 50)" in reason(node_1_1), 60)
    count = len(asked(node_1_1))
    for _ in range(5):
        reason(node_1_1)
    assert len(asked(node_1_1)) == count, "asked by who only reads"
    node_1_1.configure({"type": "told", "changed": True}, version="1.0.0")
    assert reason(node_1_1) == "", "of a version that has no STATUS"
    (node_1_1.folder / "trouble").unlink()
    node_1_1.configure({"type": "told", "changed": 2}, version="1.1.0")
    reason(node_1_1)
    until(lambda: len(asked(node_1_1)) > count, 60, "a changed configuration is asked about at once")
    assert reason(node_1_1) == ""


def test_gc_runs_only_if_enabled_and_lists_all_attachments(node_1_1: TapNode) -> None:
    node_1_1.start()
    which = sandbox()
    node_1_1.attach(which)
    node_1_1.stop()
    node_1_1.start("--cni-gc", "true")
    told = json.loads((node_1_1.folder / "gc").read_text())
    assert told["cni.dev/valid-attachments"] == [{"containerID": which, "ifname": "eth0"}]
    assert asked(node_1_1).count("GC") == 1
    assert asked(node_1_1).count("CHECK") == 0
    node_1_1.release(which)


def test_a_network_can_disable_gc(node_1_1: TapNode) -> None:
    node_1_1.configure({"type": "told"}, version="1.1.0", disableGC=True)
    node_1_1.start("--cni-gc", "true")
    assert "GC" not in asked(node_1_1)
    assert f"cni.not_collected network={node_1_1.network}" in node_1_1.log.read_text()


def test_an_address_of_another_pod_is_refused_with_both_names(node_1_1: TapNode) -> None:
    node_1_1.start()
    first, second = sandbox(), sandbox()
    node_1_1.attach(first, name="web-0")
    node_1_1.stop()
    node_1_1.start()
    with pytest.raises(
        protocol.RemoteError, match=rf"10\.90\.41\.2, which pod default/web-0 \(sandbox {first[:20]}\)"
    ) as told:
        node_1_1.attach(second, name="web-1")
    assert told.value.kind == "already-exists"
    assert node_1_1.listed() == [first]
    node_1_1.release(first)
    assert node_1_1.attach(second, name="web-1")["ips"] == ["10.90.41.2"]
    node_1_1.release(second)


def test_an_address_whose_pod_lost_its_namespace_may_be_reused(node_1_1: TapNode) -> None:
    node_1_1.start()
    first, second = sandbox(), sandbox()
    node_1_1.attach(first)
    namespace = Path(node_1_1.netns_of(first))
    node_1_1.inside(first, "ip", "link", "del", "eth0")
    subprocess.run(["ip", "netns", "del", namespace.name], check=True)
    node_1_1.attach(second)
    node_1_1.release(first)
    node_1_1.release(second)
