"""`kubectl virt` reaches a real VM. A fake kubectl uses the node's streaming server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running_vm import NAME, Vm
from terminal import LIMIT, terminal

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.operator]

PROJECT = Path(__file__).resolve().parents[3]
PLUGIN = str(PROJECT / "deploy/kubectl-virt/kubectl-virt")
KUBECTL = PROJECT / "tests/e2e/kubectl_of_a_node.py"


def test_kubectl_virt_reaches_console_screen_and_ssh(vm: Vm, tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {KUBECTL} {vm.node.socket} "$@"\n')
    kubectl.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{PROJECT}:{PROJECT}/deploy",
    }  # fmt: skip

    on_the_console(environment)
    reaches_the_ssh_server(environment)
    shows_the_screen(environment)
    assert vm.cri.status(vm.container).state == pb.CONTAINER_RUNNING


def on_the_console(environment: dict[str, str]) -> None:
    with terminal([PLUGIN, "console", NAME], environment) as screen:
        assert screen.sees(b"ctrl-] leaves"), screen.seen
        assert screen.is_answered_by_a_shell(), screen.seen
        screen.press(b"\x1d")
        assert screen.sees(b"the virtual machine keeps running\r\n"), screen.seen
        assert screen.process.wait(LIMIT) == 0


def reaches_the_ssh_server(environment: dict[str, str]) -> None:
    """Connects as ssh does with its ProxyCommand."""
    with subprocess.Popen(
        [PLUGIN, "stdio", NAME, "22"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(8) == b"SSH-2.0-"
        process.stdin.close()
        assert process.wait(LIMIT) == 0


def shows_the_screen(environment: dict[str, str]) -> None:
    with subprocess.Popen([PLUGIN, "vnc", NAME], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().partition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as viewer:
            assert viewer.recv(100) == b"RFB 003.008\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
