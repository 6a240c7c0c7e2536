"""VMs that outlive their pods: a stop saves the guest's memory, and the VM's next pod continues with it."""

from __future__ import annotations

import grpc
import pytest
from fakes.cri import refused
from guest import BOOT, READY, ping
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
    address = cri.pod_status(pods.pod).network.ip
    wait_until(lambda: ping(address), 30, "the restored guest has the new pod's address")
    pods.remove()


def test_a_restart_in_the_same_sandbox_boots(cri, node, image_url):
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "again")
    pods.next()
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    pods.run("sh", "-c", "echo on-disk > /note; echo in-memory > /tmp/note; sync")
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    pods.saved()
    pods.create(attempt=1)
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    assert any("its saved memory is discarded" in line for line in log_lines(pods.log))
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") != boot
    assert pods.run("sh", "-c", "cat /note; ls /tmp") == "on-disk\n"
    pods.remove()


def test_two_live_pods_of_one_vm_are_refused(cri, node, image_url):
    named = {"virtshim.io/vm": "only-one"}
    first, second = (Pods(cri, node, f"{image_url}/null.qcow2", name) for name in ("first", "second"))
    first.next(named)
    first.start()
    with refused(grpc.StatusCode.ALREADY_EXISTS, "virtual machine only-one runs in pod default/first"):
        second.next(named)
    second.remove()
    first.remove()
    second.next(named)
    second.start()
    second.remove()
