"""Only root sees the screen of a VM, and the screen ends with the VM. Its guest need not boot."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.spdy import close_all, spdy
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, pod_config, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

BANNER = b"RFB 003.008\n"
LIMIT = 60.0


@contextlib.contextmanager
def shown(node: Node, *words: str) -> Iterator[str]:
    """The address at which `virtshim vnc` shows the screen."""
    command = [*VIRTSHIM, "vnc", "--socket", node.socket, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        try:
            assert " is at " in said, said + process.stderr.read()
            yield said.partition(" is at ")[2].partition(";")[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT) == 0


def banner(connected: socket.socket) -> bytes:
    connected.settimeout(LIMIT)
    return connected.recv(100)


def test_only_root_sees_the_screen_which_many_can_share_until_the_pod_ends(
    cri: PodClient, node: Node, null_image: Path, image_url: str, tmp_path: Path
) -> None:
    config = pod_config("shown", f"{node.directory}/logs/shown", annotations={"virtshim.io/vnc": "true"})
    pod = cri.run_pod(config)
    vm = cri.create(pod, container_config(cri.pull(f"{image_url}/{null_image.name}"), 64 << 20), config)
    cri.start(vm)

    # The screen's socket is root's alone; its directory was QEMU's only while it made it.
    path = Path(node.directory, "run/vnc", vm[:20], "vnc.sock")
    above = path.parent.stat()
    assert (above.st_uid, stat.S_IMODE(above.st_mode)) == (0, 0o700)
    assert stat.S_ISSOCK(path.stat().st_mode)

    client = spdy(cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=pod)).url, "portforward.k8s.io")
    client.open(streamtype="error", fin=True, port="5900", requestid="0")
    data = client.open(streamtype="data", port="5900", requestid="0")
    client.until(lambda: bytes(client.received[data]) == BANNER)
    close_all()

    with shown(node, "shown", "--listen", "127.0.0.1:0") as where:
        host, _, port = where.rpartition(":")
        with socket.create_connection((host, int(port))) as one, socket.create_connection((host, int(port))) as other:
            assert banner(one) == banner(other) == BANNER
            one.sendall(BANNER)
            assert one.recv(100) == b"\x01\x01", "no password is asked for"
    with shown(node, "shown", "--unix", str(tmp_path / "screen.sock")) as where:
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(where)
            assert banner(local) == BANNER
        assert stat.S_IMODE(os.stat(where).st_mode) == 0o600
    assert not (tmp_path / "screen.sock").exists()

    cri.remove_pod(pod)
    wait_until(lambda: not path.parent.exists(), 60, "the screen's directory is gone")
