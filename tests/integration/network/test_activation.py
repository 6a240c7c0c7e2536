"""tapmanager serves a socket that another process opened, as systemd does for tapmanager.socket."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tap_node import PLUGINS, TapNode, until

pytestmark = pytest.mark.network

# Becomes tapmanager with the socket as descriptor 3; sd_listen_fds(3).
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-m", "tapmanager", *sys.argv[2:]])
"""


def activated(node: TapNode, sock: socket.socket, path: str = "") -> subprocess.Popen[bytes]:
    arguments = [
        "--socket", path or node.socket, "--state-dir", str(node.ledger), "--netns-dir", str(node.netns_dir),
        "--cni-conf-dir", str(node.conf_dir), "--cni-bin-dir", PLUGINS,
    ]  # fmt: skip
    with node.log.open("ab") as log:
        command = [sys.executable, "-c", ACTIVATE, str(sock.fileno()), *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[sock.fileno()])


def test_calls_wait_while_tapmanager_restarts_and_its_socket_stays(quiet_node: TapNode) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, ThreadPoolExecutor(1) as pool:
        sock.bind(quiet_node.socket)
        os.chmod(quiet_node.socket, 0o600)
        sock.listen(16)
        for _ in range(2):
            waiting = pool.submit(quiet_node.call, "list")
            quiet_node.process = activated(quiet_node, sock)
            assert waiting.result(60) == {"sandboxes": []}
            assert stat.S_IMODE(os.stat(quiet_node.socket).st_mode) == 0o660
            assert quiet_node.stop() == 0
            assert os.path.exists(quiet_node.socket)


def test_a_socket_that_differs_from_the_settings_is_refused_by_both_names(quiet_node: TapNode) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(quiet_node.socket)
        sock.listen(16)
        process = activated(quiet_node, sock, f"{quiet_node.socket}2")
        assert process.wait(60) == 1
    until(
        lambda: f"is {quiet_node.socket}, but tapmanager.socket is {quiet_node.socket}2" in quiet_node.log.read_text()
    )
