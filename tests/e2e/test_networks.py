"""A pod on two networks has a guest with a NIC on each."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from cluster_networks import leases, networks, own_network
from far_subnet import POD, POD6, beyond, second_network
from guest import boot, console_of_pod, ping
from node import Node
from podclient import log_lines, wait_for_log
from tap_node import until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

BRIDGE = "vst-e2e-net1"
SECOND = "10.90.9"


def test_a_guest_is_on_both_networks_of_its_pod(cri, node: Node, image_url: str, tmp_path: Path):
    blue = {"name": "blue", "type": "bridge", "bridge": BRIDGE, "isGateway": True, "mtu": 1400}
    with networks(node, tmp_path, own_network(node), {**blue, "ipam": leases(tmp_path, f"{SECOND}.0/24")}):
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


@pytest.mark.full
def test_a_guest_answers_on_the_network_of_the_request(cri, node: Node, image_url: str, tmp_path: Path):
    """The agent sets the rules and tables of CNI's sbr; without them, answers would leave by the first network."""
    bridge = "vst-e2e-sbr"
    with beyond(bridge) as far:
        with networks(node, tmp_path, own_network(node), second_network("blue", bridge, tmp_path / "leases")):
            pod, *_ = boot(cri, node, f"{image_url}/guest.qcow2", "routed")
        for address in (POD, POD6):
            until(lambda address=address: far.pings(address), 120, f"an answer of {address}")
        with far.socket(POD, socket.SOCK_STREAM) as web:
            web.settimeout(60)
            web.connect((POD, 80))
            web.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert web.recv(4096).startswith(b"HTTP/1.")
        assert ping(cri.pod_ip(pod)), "the first network is as ever"
        cri.remove_pod(pod)
    assert not [path for path in (tmp_path / "leases").rglob("*") if path.is_file() and path.name[0].isdigit()]
