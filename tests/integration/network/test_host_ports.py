"""hostPort works with the distribution's plugin. The guests are namespaces behind the taps' descriptors."""

from __future__ import annotations

import socket

import pytest
from packets import Echoes, Place, answers, within
from shapes import bridged
from tap_node import TapNode, until
from vm_pods import HOST, forwarding_host, marks, told_of, vm

from virtshim.model.sandbox import PortMapping

pytestmark = pytest.mark.network

PORTMAP = {"type": "portmap", "capabilities": {"portMappings": True}}
TCP, UDP = socket.SOCK_STREAM, socket.SOCK_DGRAM
INSIDE = 5353


@pytest.fixture
def local_port() -> int:
    """A free port of the node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_host_port_answers_node_and_pods_and_is_removed_with_its_pod(tap_node: TapNode, local_port: int) -> None:
    tap_node.configure(*bridged("46", hairpinMode=True)(tap_node, 0), PORTMAP)
    mappings = tuple(PortMapping(protocol, INSIDE, local_port, "") for protocol in ("tcp", "udp"))
    with forwarding_host():
        with vm(tap_node, "server", port_mappings=mappings) as server, vm(tap_node, "client") as client:
            with Echoes([server.place], INSIDE):
                asked = [(HOST, "127.0.0.1")]
                asked += [(who, at) for who in (HOST, client.place, server.place) for at in HOST.addresses.values()]
                assert [one for one in asked if not reaches(*one, local_port)] == []
            words = marks([server])
            assert [line for line in told_of(tap_node, words) if "DNAT" in line]
        until(lambda: not told_of(tap_node, words), 60, "rules gone with the pod")
        assert not any(answers(HOST, "127.0.0.1", local_port, kind, b"still?") for kind in (TCP, UDP))


def reaches(sender: Place, address: str, port: int) -> bool:
    return all(within(lambda kind=kind: answers(sender, address, port, kind, b"hello")) for kind in (TCP, UDP))
