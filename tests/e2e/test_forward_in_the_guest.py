"""A command in the guest dials the pod's ports, with much data. `make test` dials one port in test_debian_guest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from big_transfers import forwarded, serve_echo, there_and_back
from fakes.spdy import close_all, spdy
from guest import boot
from node import Node
from podclient import PodClient
from running_vm import Vm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.full, pytest.mark.timeout(3000)]


@pytest.fixture
def dialing(cri: PodClient, node: Node, image_url: str) -> Iterator[Vm]:
    pod, container, _ = boot(
        cri, node, f"{image_url}/guest.qcow2", "dialing", annotations={"virtshim.io/forward": "agent"}
    )
    yield Vm(cri, node, pod, container)
    close_all()


def test_much_data_passes_and_a_port_without_a_listener_is_reported(dialing: Vm) -> None:
    serve_echo(dialing)
    client, error, data = forwarded(dialing)
    there_and_back(client, data, data, 256 << 20, dialing.node)  # the agent carries 0.6 MiB/s without KVM
    assert client.read_all(error) == b""

    request = pb.PortForwardRequest(pod_sandbox_id=dialing.pod)
    client = spdy(dialing.cri.runtime.PortForward(request, timeout=20).url, "portforward.k8s.io")
    error = client.open(streamtype="error", port="7778", requestid="1")
    client.open(streamtype="data", port="7778", requestid="1")
    assert b"refused" in client.read_all(error)
