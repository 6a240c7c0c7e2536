"""A person can log in by ssh through the node, and the guest resolves names by its pod's name servers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from node import VIRTSHIM
from running_vm import NAME, Vm

pytestmark = [pytest.mark.e2e, pytest.mark.guest]


def test_the_guest_asks_the_name_servers_of_its_pod(vm: Vm) -> None:
    resolver = vm.says("cat /etc/resolv.conf").splitlines()
    assert sorted(resolver) == ["nameserver 10.96.0.10", "options ndots:5", "search default.svc.cluster.local"]


def test_a_person_logs_in_with_a_new_key(vm: Vm, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    home = {**os.environ, "HOME": str(tmp_path)}

    def ssh(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*VIRTSHIM, "ssh", "--socket", vm.node.socket, "-i", str(key), *words]
        return subprocess.run(
            command, env=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )

    refused = ssh(NAME, "--", "true")
    assert (refused.returncode, "Permission denied" in refused.stderr) == (255, True), refused.stderr
    assert f"virtshim ssh {NAME} --inject" in refused.stderr
    nobody = ssh(NAME, "-l", "nobody-there", "--inject", f"{key}.pub", "--", "true")
    assert "nobody-there" in nobody.stderr
    private = ssh(NAME, "--inject", str(key), "--", "true")
    assert "public key" in private.stderr
    done = ssh(NAME, "--inject", f"{key}.pub", "--", "echo", "$(hostname)", ";", "exit", "7")
    assert (done.returncode, done.stdout) == (7, f"{NAME}\n"), done.stderr
