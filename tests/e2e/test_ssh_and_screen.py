"""What people get of a running VM from the node: a login with ssh, and its screen; and what its pod says of names reaches it."""

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
from guest import boot
from node import VIRTSHIM, Node
from podclient import PodClient, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

BANNER = b"RFB 003.008\n"
LIMIT = 60.0


@contextlib.contextmanager
def shown(node: Node, *words: str) -> Iterator[str]:
    """Where `virtshim vnc` shows the screen."""
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


def test_a_person_logs_in_with_a_new_key_and_sees_the_screen(
    cri: PodClient, node: Node, image_url: str, tmp_path: Path
) -> None:
    pod, vm, _log = boot(cri, node, f"{image_url}/guest.qcow2", "seen", annotations={"virtshim.io/vnc": "true"})

    resolver = cri.exec_sync(vm, "cat", "/etc/resolv.conf").stdout.decode().splitlines()
    assert sorted(resolver) == ["nameserver 10.96.0.10", "options ndots:5", "search default.svc.cluster.local"]

    logs_in(node, tmp_path)

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

    with shown(node, "seen", "--listen", "127.0.0.1:0") as where:
        host, _, port = where.rpartition(":")
        with socket.create_connection((host, int(port))) as one, socket.create_connection((host, int(port))) as other:
            assert banner(one) == banner(other) == BANNER
            one.sendall(BANNER)
            assert one.recv(100) == b"\x01\x01", "no password is asked for"
    with shown(node, "seen", "--unix", str(tmp_path / "screen.sock")) as where:
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(where)
            assert banner(local) == BANNER
        assert stat.S_IMODE(os.stat(where).st_mode) == 0o600
    assert not (tmp_path / "screen.sock").exists()

    cri.remove_pod(pod)
    wait_until(lambda: not path.parent.exists(), 60, "the screen's directory is gone")


def logs_in(node: Node, directory: Path) -> None:
    key = directory / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    home = {**os.environ, "HOME": str(directory)}

    def ssh(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*VIRTSHIM, "ssh", "--socket", node.socket, "-i", str(key), *words]
        return subprocess.run(
            command, env=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False
        )

    refused = ssh("seen", "--", "true")
    assert (refused.returncode, "Permission denied" in refused.stderr) == (255, True), refused.stderr
    nobody = ssh("seen", "-l", "nobody-there", "--inject", f"{key}.pub", "--", "true")
    assert "nobody-there" in nobody.stderr
    private = ssh("seen", "--inject", str(key), "--", "true")
    assert "public key" in private.stderr
    done = ssh("seen", "--inject", f"{key}.pub", "--", "echo", "$(hostname)", ";", "exit", "7")
    assert (done.returncode, done.stdout) == (7, "seen\n"), done.stderr
