"""Set-up proposes the networks from which no image should be fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from virtshim.config.settings import Settings
from virtshim.devices.host_files import HostFiles
from virtshim.setup.facts import look
from virtshim.setup.plan import OwnSettings, plan

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
cni0\t0001F40A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""
NOWHERE = "0" * 32
# Routes of eth0: its own network, link-local, its address, a network behind a router, multicast, loopback.
ROUTES6 = f"""20010db8000000070000000000000000 40 {NOWHERE} 00 {NOWHERE} 00000100 00000001 00000000 00000001     eth0
fe800000000000000000000000000000 40 {NOWHERE} 00 {NOWHERE} 00000100 00000001 00000000 00000001     eth0
20010db8000000070000000000000009 80 {NOWHERE} 00 {NOWHERE} 00000000 00000003 00000000 80200001     eth0
20010db8001100000000000000000000 30 {NOWHERE} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0
ff000000000000000000000000000000 08 {NOWHERE} 00 {NOWHERE} 00000100 00000003 00000000 00000001     eth0
00000000000000000000000000000001 80 {NOWHERE} 00 {NOWHERE} 00000000 00000003 00000000 80200001       lo
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\ncgroupDriver: systemd\nclusterDNS: [10.96.0.10]\n",
        "etc/kubernetes/manifests/kube-apiserver.yaml": "    - --service-cluster-ip-range=10.96.0.0/12,fd00:10:96::/112\n",
        "etc/kubernetes/manifests/kube-controller-manager.yaml": "    - --cluster-cidr=10.244.0.0/16\n",
        "etc/cni/net.d/10-pods.conflist": json.dumps(
            {"name": "pods", "plugins": [{"type": "bridge", "ipam": {"ranges": [[{"subnet": "10.244.1.0/24"}]]}}]}
        ),
        "proc/net/route": ROUTES,
        "proc/net/ipv6_route": ROUTES6,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def steps(root: Path, *said: str) -> str:
    own = OwnSettings(Settings.model_construct(), frozenset(said))
    return "\n".join(plan(look(HostFiles(str(root)), ()), own).steps)


def test_networks_of_services_pods_and_nodes_are_proposed(root: Path) -> None:
    """Not link-local ones, which are forbidden anyway, nor all the world; one within another is left out."""
    wanted = '["10.96.0.0/12", "10.244.0.0/16", "192.168.0.0/24", "2001:db8:0:7::/64", "fd00:10:96::/112"]'
    assert f"images.forbidden_networks = {wanted}" in steps(root)
    assert "services" not in steps(root)


def test_a_worker_proposes_known_networks_and_says_that_the_service_network_is_missing(root: Path) -> None:
    for manifest in (root / "etc/kubernetes/manifests").iterdir():
        manifest.unlink()
    assert 'images.forbidden_networks = ["10.244.1.0/24", "192.168.0.0/24", "2001:db8:0:7::/64"]' in steps(root)
    assert "add the network of the cluster's services, which contains 10.96.0.10" in steps(root)


@pytest.mark.parametrize("dns", ["[169.254.20.10]", "[none]", "[]", "[[]]", "{}"])
def test_a_local_resolver_or_a_malformed_address_gives_no_service_network(root: Path, dns: str) -> None:
    for manifest in (root / "etc/kubernetes/manifests").iterdir():
        manifest.unlink()
    (root / "var/lib/kubelet/config.yaml").write_text(f"kind: KubeletConfiguration\nclusterDNS: {dns}\n")
    assert "services" not in steps(root)


def test_no_networks_are_proposed_if_they_are_set_or_unknown(root: Path) -> None:
    assert "forbidden_networks" not in steps(root, "images.forbidden_networks")
    (root / "proc/net/route").unlink()
    (root / "proc/net/ipv6_route").write_text("not a route\n")
    (root / "etc/cni/net.d/10-pods.conflist").write_text("{not JSON")
    for manifest in (root / "etc/kubernetes/manifests").iterdir():
        manifest.write_text("--cluster-cidr=300.1.2.3/99,")
    assert "forbidden_networks" not in steps(root)
