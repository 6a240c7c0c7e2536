"""A pod on two networks: its guest has a NIC on each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import meta_plugin
from guest import boot, console_of_pod, ping
from node import Node
from podclient import log_lines, wait_for_log

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

BRIDGE = "vst-e2e-net1"
SECOND = "10.90.9"


@contextlib.contextmanager
def two_networks(node: Node, plugins: Path, folder: Path) -> Iterator[None]:
    """The node's own network, and another bridge, by a meta plugin."""
    plugins.mkdir(exist_ok=True)
    plugin = plugins / "meta"
    plugin.write_text(f"#!/bin/sh\nexec {sys.executable} {meta_plugin.__file__}\n")
    plugin.chmod(0o755)
    own = json.loads(next(Path(node.directory, "cni/net.d").glob("*.conflist")).read_text())
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": f"{SECOND}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder / "leases"),
    }
    delegates = [
        {"name": own["name"], **own["plugins"][0]},
        {"name": "blue", "type": "bridge", "bridge": BRIDGE, "isGateway": True, "mtu": 1400, "ipam": ipam},
    ]
    meta = {"type": "meta", "cniDir": str(folder / "multus"), "delegates": delegates}
    first = Path(node.directory, "cni/net.d/00-two.conflist")
    first.write_text(json.dumps({"cniVersion": "1.0.0", "name": "two", "plugins": [meta]}))
    try:
        yield
    finally:
        first.unlink()


def test_a_guest_is_on_both_networks_of_its_pod(cri, node: Node, node_root: str, image_url: str, tmp_path: Path):
    with two_networks(node, Path(node_root, "cni-bin"), tmp_path):
        pod, _container, log = boot(cri, node, f"{image_url}/guest.qcow2", "both")
    address = cri.pod_ip(pod)
    assert address.startswith(node.pod_cidr.removesuffix("0.0/16")), "the first network's"
    assert ping(address)
    assert ping(f"{SECOND}.2")
    console = console_of_pod(cri, node, pod)
    console.type(f"ping -c 1 {SECOND}.1; ip -o link; ip route; echo '<'done'>'")
    wait_for_log(log, "<done>", 30)
    text = "\n".join(log_lines(log))
    assert "1 packets received" in text
    assert text.count("default via") == 1
    assert f"default via {node.pod_cidr.removesuffix('0/16')}1" in text
    assert "mtu 1400" in text
    stats = cri.runtime.PodSandboxStats(pb.PodSandboxStatsRequest(pod_sandbox_id=pod), timeout=10).stats
    network = stats.linux.network
    assert {network.default_interface.name, *(one.name for one in network.interfaces)} == {"eth0", "net1"}
    assert all(one.rx_bytes.value for one in network.interfaces)
    cri.remove_pod(pod)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name.startswith((SECOND, "blue"))]
    subprocess.run(["ip", "link", "del", BRIDGE], check=True)
