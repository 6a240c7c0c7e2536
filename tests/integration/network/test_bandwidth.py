"""The distribution's plugin limits bandwidth: the test reads the kernel's settings, and with `--all` measures the
rates."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from socket import SHUT_RDWR, SOCK_STREAM, socket

import pytest
from packets import Place
from tap_node import TapNode, sandbox, until
from vm_pods import vm

from virtshim.annotations.parse import parse_vm_options

pytestmark = pytest.mark.network

BANDWIDTH = {"type": "bandwidth", "capabilities": {"bandwidth": True}}
_WINDOW = 10.0  # seconds


def test_both_directions_are_limited_on_the_nodes_end_of_the_link(tap_node: TapNode) -> None:
    tap_node.configure(tap_node.bridge_plugin(), BANDWIDTH)
    before = limits()
    which = sandbox()
    tap_node.attach(which, bandwidth={"ingress": 1_000_000, "egress": 2_000_000})
    made = sorted(limits().items() - before.items(), key=lambda one: one[1])
    # Bytes a second. What leaves the pod is limited on an ifb, to which its link's frames are led.
    assert [rate for _, rate in made] == [125_000, 250_000]
    assert [name.startswith("veth") for name, _ in made] == [True, False]
    tap_node.release(which)
    until(lambda: limits() == before, what="limits gone with the pod")


def limits() -> dict[str, int]:
    """The rate limits of token buckets in bytes per second, by link."""
    shown = subprocess.run(["tc", "-j", "qdisc"], capture_output=True, text=True, check=True).stdout
    return {one["dev"]: one["options"]["rate"] for one in json.loads(shown or "[]") if one["kind"] == "tbf"}


def test_without_the_plugin_nothing_is_limited_and_a_warning_is_logged(tap_node: TapNode) -> None:
    which = sandbox()
    tap_node.attach(which, bandwidth={"ingress": 1_000_000})
    assert f"pod.bandwidth_unlimited sandbox={which} network={tap_node.network}" in tap_node.log.read_text()
    tap_node.release(which)


def test_bandwidth_each_way_is_what_the_pods_annotations_say(tap_node: TapNode, request: pytest.FixtureRequest) -> None:
    """From the annotations to the kernel's token buckets; with `--all`, bytes over ten seconds each way."""
    tap_node.configure(tap_node.bridge_plugin(), BANDWIDTH)
    asked = {"kubernetes.io/ingress-bandwidth": "1M", "kubernetes.io/egress-bandwidth": "1M"}
    before = limits()
    with vm(tap_node, "web-0", bandwidth=parse_vm_options(asked).bandwidth) as limited:
        assert [rate for name, rate in limits().items() if name not in before] == [125_000, 125_000]
        if request.config.getoption("--all"):
            host = Place("the host", "", {})
            into = megabits(host, limited.place, limited.network.ips[0])
            out = megabits(limited.place, host, f"{tap_node.subnet}.1")
            print(f"1M each way: {into:.2f} Mbit/s into the VM, {out:.2f} out of it")
            assert 0.5 <= into <= 1.2  # less on a busy machine
            assert 0.5 <= out <= 1.2
    until(lambda: limits() == before, 60, what="limits gone with the pod")


def megabits(sender: Place, target: Place, address: str) -> float:
    """The TCP rate in Mbit/s at the receiver, after the initial burst."""
    with target.socket(address, SOCK_STREAM) as listening:
        listening.bind((address, 0))
        listening.listen()
        with sender.socket(address, SOCK_STREAM) as sending:
            sending.settimeout(60)
            sending.connect(listening.getsockname())
            receiving, _ = listening.accept()
            with receiving:
                writer = threading.Thread(target=send_on, args=(sending,))
                writer.start()
                try:
                    received(receiving, 2.0)
                    began = time.monotonic()
                    return received(receiving, _WINDOW) * 8 / (time.monotonic() - began) / 1e6
                finally:
                    receiving.shutdown(SHUT_RDWR)
                    sending.shutdown(SHUT_RDWR)
                    writer.join()


def send_on(sock: socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(bytes(65536))


def received(sock: socket, seconds: float) -> int:
    """The bytes received until then."""
    until, count = time.monotonic() + seconds, 0
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        with contextlib.suppress(TimeoutError):
            count += len(sock.recv(65536))
    return count
