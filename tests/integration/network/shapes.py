"""The kinds of pod networks: those of the distribution's CNI plugins, and others that the tests imitate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from fakes import calico_plugin, chain_plugin, meta_plugin, weave_plugin
from tap_node import PLUGINS, TapNode

Plugin = dict[str, object]


@dataclass(frozen=True)
class Shape:
    """`chain` makes a node's plugins for its pod of that number, from 2 on; `more`: keys of the list beside them. `mtu`: of
    pods. `on_bridge`: packets between two of them are bridged by the host, not routed."""

    chain: Callable[[TapNode, int], list[Plugin]]
    version: str
    mtu: int = 1500
    on_bridge: bool = False
    more: tuple[tuple[str, object], ...] = ()

    def configure(self, node: TapNode, number: int) -> None:
        node.configure(*self.chain(node, number), version=self.version, **dict(self.more))


def install(node: TapNode) -> None:
    """Installs the plugins of the tests."""
    programs = {"meta": meta_plugin, "chain": chain_plugin, "calico": calico_plugin, "weave": weave_plugin}
    for name, program in programs.items():
        node.plugin(name, f"exec {sys.executable} {program.__file__}\n")
    # One of CNI 1.1: the distribution's speak 1.0.0 at most.
    node.plugin("newer", f"""
        test $CNI_COMMAND = STATUS && exit 0
        told=$(sed 's/"cniVersion": "1.1.0"/"cniVersion": "1.0.0"/g' | CNI_PATH={PLUGINS} {PLUGINS}/bridge)
        status=$?
        echo "$told" | sed 's/"cniVersion": "1.0.0"/"cniVersion": "1.1.0"/; s/"name": "eth0"/"name": "eth0", "mtu": 1500/'
        exit $status
    """)  # fmt: skip


def subnets(node: TapNode, families: str) -> list[str]:
    third = node.subnet.rsplit(".", 1)[1]
    return [{"4": f"{node.subnet}.0/24", "6": f"fd00:89:{third}::/64"}[family] for family in families]


def leases(node: TapNode, families: str) -> Plugin:
    ranges = [[{"subnet": subnet}] for subnet in subnets(node, families)]
    routes = [{"dst": {"4": "0.0.0.0/0", "6": "::/0"}[family]} for family in families]
    return {"type": "host-local", "dataDir": str(node.leases), "ranges": ranges, "routes": routes}


def bridged(families: str, **more: object) -> Callable[[TapNode, int], list[Plugin]]:
    return lambda node, _: [node.bridge_plugin(ipam=leases(node, families), **more)]


def routed(families: str, **more: object) -> Callable[[TapNode, int], list[Plugin]]:
    return lambda node, _: [{"type": "ptp", "ipMasq": True, "ipam": leases(node, families), **more}]


def calico(node: TapNode, number: int) -> list[Plugin]:
    """Its result has version 0.3.1 without a gateway; later plugins use the chain's version."""
    third = node.subnet.rsplit(".", 1)[1]
    addresses = [f"{node.subnet}.{number}/32", f"fd00:89:{third}::{number}/128"]
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return [{"type": "calico", "addresses": addresses}, ports]


def weave(node: TapNode, number: int) -> list[Plugin]:
    gateway, address = f"{node.subnet}.1/24", f"{node.subnet}.{number}/24"
    return [{"type": "weave", "bridge": node.bridge, "gateway": gateway, "address": address}]


def several(node: TapNode, number: int) -> list[Plugin]:
    """The second network's routes lead to its own network only."""
    second = {"type": "host-local", "dataDir": str(node.leases), "ranges": [[{"subnet": "10.90.61.0/24"}]]}
    delegates = [
        {"name": node.network, **bridged("46")(node, number)[0]},
        {"name": f"{node.network}-1", "type": "bridge", "bridge": f"{node.bridge}b", "mtu": 1400, "ipam": second},
    ]
    return [{"type": "meta", "cniDir": str(node.folder / "multus"), "delegates": delegates}]


SHAPES = {
    "bridge of 0.3.1": Shape(bridged("4", hairpinMode=True), "0.3.1", on_bridge=True),
    "bridge, dual stack": Shape(bridged("46", hairpinMode=True), "1.0.0", on_bridge=True),
    "bridge, IPv6, MTU 1280": Shape(bridged("6", mtu=1280), "0.4.0", mtu=1280, on_bridge=True),
    "bridge, MTU 9000": Shape(bridged("46", mtu=9000, ipMasq=False), "1.0.0", mtu=9000, on_bridge=True),
    "bridge of 1.1.0": Shape(
        lambda node, number: [{**bridged("46")(node, number)[0], "type": "newer"}],
        "0.4.0", on_bridge=True, more=(("cniVersions", ["1.0.0", "1.1.0", "9.0.0"]),),
    ),
    "ptp, dual stack, MTU 1280": Shape(routed("46", mtu=1280), "0.4.0", mtu=1280),
    "calico": Shape(calico, "1.0.0"),
    "weave": Shape(weave, "0.3.0", on_bridge=True),
    "several": Shape(several, "1.0.0", on_bridge=True),
}  # fmt: skip
