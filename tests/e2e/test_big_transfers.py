"""Much data through a real guest, both ways, unchanged, and in memory that does not grow with it. `--long`: a GiB."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.spdy import SpdyClient, close_all, spdy
from guest import BOOT
from node import Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.timeout(3000)]

_PIECE = 1 << 16
# What the daemon may grow by, whatever passes.
_ROOM = 48 << 20


@dataclass
class Vm:
    cri: PodClient
    pod: str
    container: str


@contextlib.contextmanager
def echoing(node: Node, image_url: str, name: str, **annotations: str) -> Iterator[Vm]:
    """A VM whose port 7777 gives back what it gets."""
    with PodClient(node.socket) as cri:
        config = pod_config(name, f"{node.directory}/logs/{name}")
        config.annotations.update(annotations)
        pod = cri.run_pod(config)
        made = cri.create(pod, container_config(cri.pull(f"{image_url}/guest.qcow2"), memory=192 << 20), config)
        cri.start(made)
        serve = "(while nc -l -p 7777 -e cat; do :; done) </dev/null >/dev/null 2>&1 & "
        listens = "until grep -q :1E61 /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done"  # 7777
        echo = ["sh", "-c", serve + listens]
        assert cri.exec_sync(made, *echo, timeout=int(BOOT)).exit_code == 0
        yield Vm(cri, pod, made)
        cri.remove_pod(pod)


@pytest.fixture(scope="module")
def vm(node: Node, image_url: str) -> Iterator[Vm]:
    """Its pod's ports are dialed in the guest."""
    with echoing(node, image_url, "big", **{"virtshim.io/forward": "agent"}) as vm:
        yield vm


@pytest.fixture(scope="module")
def dialed(node: Node, image_url: str) -> Iterator[Vm]:
    """Its pod's ports are dialed from the node."""
    with echoing(node, image_url, "far") as vm:
        yield vm


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    return 1 << 30 if request.config.getoption("--long") else 8 << 20


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    yield
    close_all()


def memory(node: Node) -> int:
    status = Path(f"/proc/{node.daemons()['virtshim']}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def there_and_back(client: SpdyClient, to: int, back: int, size: int, node: Node) -> None:
    """What is sent comes back, and the daemon holds little of it at any time."""
    client.sock.settimeout(600)
    before = most = memory(node)
    block = os.urandom(1 << 20)
    sent, got, count = hashlib.sha256(), hashlib.sha256(), 0
    started = time.monotonic()

    def send() -> None:
        for _ in range(size >> 20):
            sent.update(block)
            for start in range(0, len(block), _PIECE):
                client.write(to, block[start : start + _PIECE])
        client.write(to, b"", fin=True)

    sending = threading.Thread(target=send)
    sending.start()
    looked = 0
    while count < size:
        client.until(lambda: client.received[back] or back in client.finished)
        data, client.received[back] = client.received[back], b""
        got.update(data)
        count += len(data)
        assert data, f"it ended after {count} bytes"
        if count - looked >= 1 << 20:
            looked, most = count, max(most, memory(node))
    sending.join()
    assert (count, got.digest()) == (size, sent.digest())
    assert most - before < _ROOM
    rate = (size >> 20) / (time.monotonic() - started)
    print(f"\n{size >> 20} MiB there and back: {rate:.2f} MiB/s, the daemon grew by {(most - before) >> 20} MiB")


def test_through_a_commands_input_and_output(vm: Vm, node: Node, size: int) -> None:
    request = pb.ExecRequest(container_id=vm.container, cmd=["cat"], stdin=True, stdout=True)
    client = spdy(vm.cri.runtime.Exec(request, timeout=20).url)
    streams = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout")}
    client.until(lambda: client.replied >= set(streams.values()))
    there_and_back(client, streams["stdin"], streams["stdout"], size, node)
    assert b"Success" in client.read_all(streams["error"])


def forwarded(vm: Vm) -> tuple[SpdyClient, int, int]:
    """The client, and its error and data streams to port 7777."""
    request = pb.PortForwardRequest(pod_sandbox_id=vm.pod)
    client = spdy(vm.cri.runtime.PortForward(request, timeout=20).url, "portforward.k8s.io")
    error = client.open(streamtype="error", port="7777", requestid="1")
    data = client.open(streamtype="data", port="7777", requestid="1")
    client.until(lambda: client.replied >= {error, data})
    return client, error, data


def test_through_a_port_of_the_pods_address(dialed: Vm, node: Node, size: int) -> None:
    client, error, data = forwarded(dialed)
    there_and_back(client, data, data, max(size, 256 << 20), node)  # some ten times as fast as the others
    assert client.read_all(error) == b""


def test_through_a_port_of_the_guests_own_loopback(vm: Vm, node: Node, size: int) -> None:
    client, error, data = forwarded(vm)
    there_and_back(client, data, data, size, node)
    assert client.read_all(error) == b""


def test_a_port_of_the_loopback_where_nobody_listens_is_told(vm: Vm) -> None:
    client = spdy(
        vm.cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=vm.pod), timeout=20).url, "portforward.k8s.io"
    )
    error = client.open(streamtype="error", port="7778", requestid="1")
    client.open(streamtype="data", port="7778", requestid="1")
    assert b"refused" in client.read_all(error)
