"""The guest's script sets sysctls. It runs with its own network and mounts."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from virtshim.guest.set_up_scripts import SYSCTLS_NOT_SET, sysctls_command

pytestmark = [
    pytest.mark.guest,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can set sysctls"),
]

WANTED = {"net.core.somaxconn": "321", "net/ipv4/conf/lo/forwarding": "1", "net.ipv4.ip_local_port_range": "2000 3000"}
LOOK = "cd /proc/sys/net; cat core/somaxconn ipv4/conf/lo/forwarding ipv4/ip_local_port_range"


def run(script: str) -> subprocess.CompletedProcess[str]:
    words = ["unshare", "--net", "--mount", "sh", "-c", f"mount -t tmpfs none /run; {script}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_sysctls_are_set() -> None:
    done = run(f"{shlex.join(sysctls_command(WANTED))} && {LOOK}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["321", "1", "2000", "3000"]


def test_sysctls_that_the_guest_changed_since_its_boot_stay() -> None:
    again = shlex.join(sysctls_command(WANTED))
    done = run(f"{again} && echo 99 > /proc/sys/net/core/somaxconn && {again} && {LOOK}")
    assert (done.returncode, done.stdout.split()[0]) == (0, "99")


def test_failed_sysctls_are_reported_and_retried_and_the_others_are_set() -> None:
    script = shlex.join(sysctls_command({"net.nothing.here": "1", "net.ipv4.tcp_sack": "many", **WANTED}))
    done = run(f"{script}; echo $?; echo 99 > /proc/sys/net/core/somaxconn; {script}; {LOOK}")
    assert done.stdout.split() == [str(SYSCTLS_NOT_SET), "321", "1", "2000", "3000"]
    first, second = done.stderr.splitlines()[:2]
    assert first == "net.nothing.here: the guest's kernel does not have it, or not yet"
    assert second == "net.ipv4.tcp_sack: the guest's kernel does not take many"
