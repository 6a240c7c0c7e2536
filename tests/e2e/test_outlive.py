"""VMs that outlive their pods: a stop saves the guest's memory, and the VM's next pod continues with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from guest import BOOT, READY, console_of
from podclient import container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.outlive]

VM = {"virtshim.io/vm": "by-pod-name", "virtshim.io/on-stop": "save"}
COUNTER = "n=0; while sleep 1; do n=$((n+1)); echo count-$n; done"


class Pods:
    """Pods of one VM, one after another."""

    def __init__(self, cri, node, image: str, name: str, **options) -> None:
        self.cri, self.node, self.name = cri, node, name
        self.image = cri.pull(image)
        self.options = options
        self.pods = 0

    def next(self, annotations: dict[str, str] | None = None) -> None:
        """As a StatefulSet's controller makes it: the same name, another UID."""
        self.pods += 1
        logs = f"{self.node.directory}/logs/{self.name}-{self.pods}"
        self.config = pod_config(self.name, logs, annotations or VM)
        self.pod = self.cri.run_pod(self.config)
        self.create()

    def create(self, attempt: int = 0) -> None:
        container = container_config(self.image, attempt=attempt)
        container.command.extend(self.options.get("command", ()))
        self.container = self.cri.create(self.pod, container, self.config)

    def start(self) -> None:
        self.cri.start(self.container)
        self.log = self.cri.status(self.container).log_path

    def saved(self) -> pb.ContainerStatus:
        self.cri.stop(self.container, 60)
        status = self.cri.status(self.container)
        assert (status.exit_code, status.reason) == (143, "Saved"), status
        return status

    def remove(self) -> None:
        self.cri.remove_pod(self.pod)

    def run(self, *command: str) -> str:
        done = self.cri.exec_sync(self.container, *command)
        assert done.exit_code == 0, done
        return done.stdout.decode()


def test_the_next_pod_continues_with_the_memory_of_the_last(cri, node, image_url):
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "lasting", command=("/bin/sh", "-c", COUNTER))
    pods.next()
    pods.start()
    wait_for_log(pods.log, "count-3", BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    pods.run("sh", "-c", "echo in-memory-only > /tmp/note")
    status = pods.saved()
    assert "its next pod continues from there" in status.message
    assert not node.qemu_pids()
    reached = int(log_lines(pods.log)[-1].removeprefix("count-"))
    pods.remove()

    pods.next()
    pods.start()
    wait_for_log(pods.log, f"count-{reached + 5}", 60)
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert pods.run("cat", "/tmp/note") == "in-memory-only\n"
    first = next(int(line.removeprefix("count-")) for line in log_lines(pods.log) if line.startswith("count-"))
    assert reached - 1 <= first <= reached + 2
    pods.remove()
