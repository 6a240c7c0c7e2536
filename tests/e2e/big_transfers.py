"""Sends much data through a guest's port 7777, which echoes it, and watches the daemon's memory."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

from fakes.spdy import SpdyClient, spdy
from node import Node
from running_vm import Vm

from criproto.runtime_v1 import api_pb2 as pb

_PIECE = 1 << 16
# The daemon may grow by this much, however much data passes.
_ROOM = 48 << 20
_SERVE = "(while nc -l -p 7777 -e cat; do :; done) </dev/null >/dev/null 2>&1 & echo $! >/run/echo.pid; "
_LISTENS = "until grep -q :1E61 /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done"  # 7777


def serve_echo(vm: Vm) -> None:
    vm.says(_SERVE + _LISTENS)


def end_echo(vm: Vm) -> None:
    vm.says("kill $(cat /run/echo.pid); pkill -x nc; rm /run/echo.pid")


def forwarded(vm: Vm) -> tuple[SpdyClient, int, int]:
    """The client, and its error and data streams to that port."""
    request = pb.PortForwardRequest(pod_sandbox_id=vm.pod)
    client = spdy(vm.cri.runtime.PortForward(request, timeout=20).url, "portforward.k8s.io")
    error = client.open(streamtype="error", port="7777", requestid="1")
    data = client.open(streamtype="data", port="7777", requestid="1")
    client.until(lambda: client.replied >= {error, data})
    return client, error, data


def _memory(node: Node) -> int:
    status = Path(f"/proc/{node.daemons()['virtshim']}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def there_and_back(client: SpdyClient, to: int, back: int, size: int, node: Node) -> None:
    """Checks that the data comes back and that the daemon never holds much of it."""
    client.sock.settimeout(600)
    before = most = _memory(node)
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
            looked, most = count, max(most, _memory(node))
    sending.join()
    assert (count, got.digest()) == (size, sent.digest())
    assert most - before < _ROOM
    rate = (size >> 20) / (time.monotonic() - started)
    print(f"\n{size >> 20} MiB there and back: {rate:.2f} MiB/s, the daemon grew by {(most - before) >> 20} MiB")
