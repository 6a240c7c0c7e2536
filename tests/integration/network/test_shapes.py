"""On each kind of network, a VM is reachable and reaches others as a container would, policies apply, and nothing is
left. The VM is a namespace behind the tap's descriptor, configured as guests are."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import pytest
from packets import Echoes, Place, comes_through, first_that_fails, rule
from shapes import SHAPES, Shape, install
from tap_node import TapNode, until
from vm_pods import HOST, Vm, forwarding_host, marks, plain_container, told_of, vm

pytestmark = pytest.mark.network

POLICY_PORT = 17_171


@dataclass(frozen=True)
class Cluster:
    container: Place
    first: Vm
    second: Vm

    @property
    def places(self) -> tuple[Place, ...]:
        return HOST, self.container, self.first.place, self.second.place


@contextlib.contextmanager
def cluster(node: TapNode, shape: Shape) -> Iterator[Cluster]:
    """One VM is configured by the document for cloud-init, the other gets IPv4 by DHCP."""
    with contextlib.ExitStack() as made:
        made.enter_context(forwarding_host())
        shape.configure(node, 2)
        first = made.enter_context(vm(node, "VM 2"))
        shape.configure(node, 3)
        second = made.enter_context(vm(node, "VM 3", by_dhcp=True))
        shape.configure(node, 4)
        container = made.enter_context(plain_container(node))
        if shape.mtu > 1500:
            # The kernel takes a bridge that was made with another MTU for one of 1500 when it fragments what it has tracked, and
            # drops what is larger: a container's, too.
            for mtu in (1500, shape.mtu):
                subprocess.run(["ip", "link", "set", node.bridge, "mtu", str(mtu)], check=True)
        yield Cluster(container, first, second)


# One network for each way of packets: bridged, routed to the host, through a neighbour's address, and through two
# NICs.
SAMPLE = ("bridge, dual stack", "ptp, dual stack, MTU 1280", "calico", "several")


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (one not in SAMPLE)) for one in SHAPES])
def test_packets_pass_policies_apply_and_nothing_is_left(tap_node: TapNode, name: str) -> None:
    shape = SHAPES[name]
    install(tap_node)
    with contextlib.ExitStack() as extra:
        extra.callback(subprocess.run, ["ip", "link", "del", f"{tap_node.bridge}b"], capture_output=True, check=False)
        with cluster(tap_node, shape) as pods, Echoes(pods.places) as echoes:
            assert (pods.first.place.mtu, pods.second.place.mtu) == (shape.mtu, shape.mtu)
            pairs = [pair for pair in permutations(pods.places, 2) if names_a_vm(pair)]
            assert first_that_fails(echoes, pairs) == ""
            assert passing_policies(pods, echoes, shape) == []
            words = marks([pods.first, pods.second])
            assert told_of(tap_node, words)
        until(lambda: not told_of(tap_node, words), 60, "all of the pods gone")
        assert tap_node.leased() == set()


def names_a_vm(pair: tuple[Place, Place]) -> bool:
    return any(place.name.startswith("VM") for place in pair)


def passing_policies(pods: Cluster, echoes: Echoes, shape: Shape) -> list[str]:
    """The packets that pass although a rule of the node forbids them."""
    first, second, container = pods.first.place, pods.second.place, pods.container
    forward, output = "inet forward", "inet output"
    tried = [(HOST, first, output), (first, HOST, f"netdev ingress device {pods.first.host_link}")]
    if not shape.on_bridge or Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists():
        tried += [(first, second, forward), (second, first, forward)]
        tried += [(container, second, forward), (first, container, forward)]
    found = []
    for sender, target, where in tried:
        for key in ("0/4", "0/6"):
            if key in sender.addresses and key in target.addresses:
                address = target.addresses[key]
                assert comes_through(echoes, sender, address, POLICY_PORT)
                match = f"{'ip6' if ':' in address else 'ip'} daddr {address} udp sport {POLICY_PORT}"
                with rule(f"{match} drop", where):
                    if comes_through(echoes, sender, address, POLICY_PORT):
                        found.append(f"{match} from {sender.name} to {target.name}, at {where}")
    return found
