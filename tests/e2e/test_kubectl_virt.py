"""`kubectl virt` with a real VM: its kubectl's streams are those of the node's streaming server."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from guest import BOOT, READY
from node import Node
from podclient import PodClient, container_config, pod_config, wait_for_log

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.operator]

LIMIT = 60.0
HERE = Path(__file__).resolve().parent
PLUGIN = str(HERE.parents[1] / "deploy/kubectl-virt/kubectl-virt")


def test_the_console_answers_the_screen_shows_and_ssh_gets_through(
    cri: PodClient, node: Node, image_url: str, tmp_path: Path
) -> None:
    config = pod_config("laptop", f"{node.directory}/logs/laptop", annotations={"virtshim.io/vnc": "true"})
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.stdin = True
    vm = cri.create(pod, wanted, config)
    cri.start(vm)
    wait_for_log(cri.status(vm).log_path, READY, BOOT)

    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE}/kubectl_of_a_node.py {node.socket} "$@"\n')
    kubectl.chmod(0o755)
    paths = f"{HERE.parents[1]}:{HERE.parents[1]}/deploy"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": paths}

    on_the_console(environment)
    reaches_the_ssh_server(environment)
    shows_the_screen(environment)
    assert cri.status(vm).state == 1, "it runs on"


def on_the_console(environment: dict[str, str]) -> None:
    ours, its = pty.openpty()
    process = subprocess.Popen([PLUGIN, "console", "laptop"], stdin=its, stdout=its, stderr=its, env=environment)
    seen = b""

    def sees(text: bytes, seconds: float = LIMIT) -> bool:
        nonlocal seen
        until = time.monotonic() + seconds
        while text not in seen:
            if not select.select([ours], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            seen += os.read(ours, 4096)
        return True

    try:
        assert sees(b"ctrl-] leaves"), seen
        for _ in range(30):  # a shell that starts throws away what was typed before its prompt
            os.write(ours, b"echo typ''ed\r")
            if sees(b"typed", 2):
                break
        assert b"typed" in seen, seen
        os.write(ours, b"\x1d")
        assert sees(b"the virtual machine runs on\r\n"), seen
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)


def reaches_the_ssh_server(environment: dict[str, str]) -> None:
    """As ssh does by its ProxyCommand."""
    with subprocess.Popen(
        [PLUGIN, "stdio", "laptop", "22"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(8) == b"SSH-2.0-"
        process.stdin.close()
        assert process.wait(LIMIT) == 0


def shows_the_screen(environment: dict[str, str]) -> None:
    with subprocess.Popen([PLUGIN, "vnc", "laptop"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().partition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as viewer:
            assert viewer.recv(100) == b"RFB 003.008\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
