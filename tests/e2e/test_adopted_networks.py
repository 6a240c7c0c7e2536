"""A VM behind passt has the pod's IPv6 address, with and without cloud-init's configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from adopted_pods import ADDRESS, AdoptedPod, others_pod
from guest import BOOT, READY
from node import Node
from others_namespace import PEER, PEER_IPV6
from passt_guest import listener
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.helpers]

IPV6 = "fd00:90::7"
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


@pytest.fixture
def booted(
    cri: PodClient, node: Node, image_url: str, request: pytest.FixtureRequest
) -> Iterator[tuple[AdoptedPod, str]]:
    """A pod with the addresses and annotations of the parameter, and its VM."""
    addresses, annotations = request.param
    config = pod_config("beside", f"{node.directory}/logs/beside")
    config.annotations.update({"virtshim.io/ports": "80", **annotations})
    with others_pod(f"{node.directory}/run/admin.sock", config, *addresses) as pod:
        pod.adopt()
        vm = cri.create(pod.id, container_config(cri.pull(f"{image_url}/guest.qcow2")), config)
        cri.start(vm)
        wait_for_log(cri.status(vm).log_path, READY, BOOT)
        yield pod, vm
        cri.remove_pod(pod.id)


def run(cri: PodClient, vm: str, script: str) -> str:
    done = cri.exec_sync(vm, "sh", "-c", script)
    assert done.exit_code == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def global_addresses(cri: PodClient, vm: str) -> set[str]:
    """Those that are in use: the guest first looks whether another has the same."""
    words = run(cri, vm, "ip -o address show | grep 'scope global' | grep -v tentative || true").split()
    return {word for before, word in pairwise(words) if before in ("inet", "inet6")}


def from_outside(pod: AdoptedPod, address: str) -> str:
    return pod.namespace.run_outside(sys.executable, "-c", FETCH, f"http://{address}/")


def answers_after_a_packet(cri: PodClient, vm: str, pod: AdoptedPod) -> bool:
    """passt of 2023 resets connections until a packet has told it the guest's IPv6 address, and forgets the address when the
    guest looks for duplicates of another one (docs/network.md)."""
    run(cri, vm, f"ping -c1 -W10 {PEER_IPV6}")
    try:
        return "from the guest" in from_outside(pod, f"[{IPV6}]")
    except AssertionError as exc:
        if "Connection reset by peer" not in str(exc):
            raise
        print(run(cri, vm, "date; ip -6 address; ip -6 neighbour; netstat -tan"))  # for the report if it never answers
        return False


@pytest.mark.parametrize(
    "booted",
    [
        ((f"{ADDRESS}/24", f"{IPV6}/64"), {}),
        ((f"{ADDRESS}/24", f"{IPV6}/64"), {"VirtletForceDHCPNetworkConfig": "true"}),
        ((f"{IPV6}/64",), {}),
    ],
    ids=["both", "without-cloud-init", "ipv6-alone"],
    indirect=True,
)
def test_a_guest_has_the_pods_ipv6_address_and_no_other(cri: PodClient, booted: tuple[AdoptedPod, str]) -> None:
    pod, vm = booted
    expected = {f"{IPV6}/64", *([f"{ADDRESS}/24"] if ADDRESS in pod.addresses else [])}
    wait_until(lambda: global_addresses(cri, vm) == expected, 30, "the guest has the pod's addresses")
    run(cri, vm, "mkdir -p /srv/www; echo from the guest > /srv/www/index.html")
    wait_until(lambda: answers_after_a_packet(cri, vm, pod), 60, "the guest answers over IPv6")
    with listener(pod.namespace.outside, 7000, family=10) as server:
        run(cri, vm, f"echo hello | nc {PEER_IPV6} 7000 > /dev/null 2>&1 &")  # it ends when the peer closes
        peer, sender = server.accept()
        with peer:
            assert sender[0] == IPV6
            assert peer.recv(100) == b"hello\n"
    if ADDRESS in pod.addresses:
        assert "from the guest" in from_outside(pod, ADDRESS)
        run(cri, vm, f"ping -c1 -W10 {PEER}")
    assert global_addresses(cri, vm) == expected
