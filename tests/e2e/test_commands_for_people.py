"""The commands for people without kubectl, on a real VM."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time

import pytest
from guest import BOOT, READY
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, pod_config, wait_for_log

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

LIMIT = 60.0


def ran(node: Node, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    name, *rest = words
    command = [*VIRTSHIM, name, "--socket", node.socket, *rest]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=LIMIT, check=False)


def test_a_person_lists_the_vms_runs_commands_and_types_on_the_console(cri: PodClient, node: Node, image_url: str):
    config = pod_config("people", f"{node.directory}/logs/people")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.stdin = True
    vm = cri.create(pod, wanted, config)
    assert b"is created, not running" in ran(node, "exec", "people", "--", "id").stderr
    cri.start(vm)

    listed = ran(node, "ps").stdout.decode().splitlines()
    assert listed[0].split()[:2] == ["POD", "POD"]
    words = listed[1].split()
    assert words[0] == "default/people"
    assert vm[:12] in words
    assert "running" in words
    assert any(word.startswith(node.pod_cidr.split(".0.")[0]) for word in words), "its address"

    done = ran(node, "exec", "default/people", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    data = os.urandom(300_000)
    done = ran(node, "exec", "-i", vm[:10], "--", "cat", stdin=data)
    assert (done.returncode, done.stdout) == (0, data)
    assert ran(node, "exec", "people", "--", "no-such-program").returncode == 127
    done = ran(node, "exec", "nobody", "--", "id")
    assert (done.returncode, b"virtshim ps" in done.stderr) == (66, True)

    wait_for_log(cri.status(vm).log_path, READY, BOOT)
    on_the_console(node)
    assert cri.status(vm).state == 1, "it runs on"


def on_the_console(node: Node) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*VIRTSHIM, "console", "--socket", node.socket, "people"], stdin=slave, stdout=slave, stderr=slave
    )
    seen = b""

    def sees(text: bytes, seconds: float = LIMIT) -> bool:
        nonlocal seen
        until = time.monotonic() + seconds
        while text not in seen:
            if not select.select([master], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            seen += os.read(master, 4096)
        return True

    try:
        assert sees(b"ctrl-] leaves"), seen
        for _ in range(30):  # a shell that starts throws away what was typed before its prompt
            os.write(master, b"echo typ''ed\r")
            if sees(b"typed", 2):
                break
        assert b"typed" in seen, seen
        os.write(master, b"\x1d")
        assert sees(b"the VM keeps running"), seen
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
