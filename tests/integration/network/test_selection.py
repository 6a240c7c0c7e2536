"""A guest has the MAC and addresses of its pod's network selection (k8s.v1.cni.cncf.io/networks). Multus passes them to
the plugins, the plugins set them on the link, and nothing else can choose them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import pytest
from packets import within
from shapes import install
from tap_node import TapNode, sandbox
from vm_pods import HOST, vm

from tapmanager import protocol

pytestmark = pytest.mark.network

MAC, ADDRESS = "c2:b0:57:49:47:f1", "10.90.62.77"
IPAM = {
    "type": "host-local",
    "ranges": [[{"subnet": "10.90.62.0/24"}]],
}


@pytest.fixture
def second(tap_node: TapNode) -> Iterator[str]:
    """The bridge of a second network, which a pod selects."""
    install(tap_node)
    bridge = f"{tap_node.bridge}b"
    with contextlib.ExitStack() as after:
        after.callback(subprocess.run, ["ip", "link", "del", bridge], capture_output=True, check=False)
        yield bridge


def select(node: TapNode, bridge: str, **selection: object) -> None:
    able = {"mac": True, "ips": True}
    delegate = {"name": "blue", "type": "bridge", "bridge": bridge, "isGateway": True, "capabilities": able}
    ipam = {**IPAM, "dataDir": str(node.leases)}
    delegates = [
        {"name": node.network, **node.bridge_plugin()},
        {**delegate, "ipam": ipam, "selection": selection},
    ]
    node.configure({"type": "meta", "cniDir": str(node.folder / "multus"), "delegates": delegates})


def test_a_guest_always_has_the_mac_and_address_of_its_pods_network_selection(tap_node: TapNode, second: str) -> None:
    select(tap_node, second, mac=MAC, ips=[ADDRESS])
    for name in ("before", "after a new start"):
        with vm(tap_node, name) as made:
            first, blue = made.network.interfaces
            assert (blue.name, blue.mac, blue.addresses) == ("net1", MAC, (f"{ADDRESS}/24",))
            assert first.mac != MAC
            assert first.addresses[0].startswith(f"{tap_node.subnet}.")
            assert within(lambda: HOST.pings(ADDRESS))
            known = subprocess.run(["ip", "neigh", "show", ADDRESS], capture_output=True, text=True, check=True).stdout
            assert MAC in known


def test_without_a_selection_the_networks_plugins_choose(tap_node: TapNode, second: str) -> None:
    select(tap_node, second)
    with vm(tap_node, "any") as made:
        _, blue = made.network.interfaces
        assert blue.mac != MAC
        assert blue.addresses == ("10.90.62.2/24",)


@pytest.mark.parametrize("field", ["mac", "ips", "annotations", "args"])
def test_the_caller_of_attach_cannot_choose_mac_and_address(tap_node: TapNode, field: str) -> None:
    with pytest.raises(protocol.RemoteError, match=rf"{field}: unknown field"):
        tap_node.attach(sandbox(), **{field: MAC})
    assert tap_node.listed() == []
