"""A stop saves the memory of a VM that outlives its pods, and the VM's next pod continues with it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import grpc
import pytest
import uefi_disk
from fakes.background import Background
from fakes.cri import refused
from guest import BOOT, READY, answers, ping
from imageserver import serve_directory
from node import VIRTSHIM
from podclient import container_config, log_lines, pod_config, wait_for_log, wait_until
from test_uefi import RESETS

from criproto.runtime_v1 import api_pb2 as pb

# Seconds, under emulation and beside other tests.
DEBIAN_BOOT = 900
pytestmark = [pytest.mark.e2e, pytest.mark.outlive]

VM = {"virtshim.io/vm": "by-pod-name", "virtshim.io/on-stop": "save"}
COUNTER = "n=0; while sleep 1; do n=$((n+1)); echo count-$n; done"


ONLINE = "until [ -e /sys/devices/system/cpu/cpu1 ]; do sleep 0.2; done; echo 1 > /sys/devices/system/cpu/cpu1/online"

LISTEN = "(nc -l -p 7000 -e cat) </dev/null >/dev/null 2>&1 & until netstat -ltn | grep -q :7000; do sleep 0.2; done"

# Watches the link as systemd-networkd and NetworkManager do. busybox's DHCP client does not.
WATCH_LINK = """
changes() { cat /sys/class/net/eth0/carrier_changes; }
seen=$(changes)
while sleep 0.1; do
  [ "$(changes)" = "$seen" ] || { seen=$(changes); kill -USR1 "$(cat /run/udhcpc.eth0.pid)"; }
done </dev/null >/dev/null 2>&1 &
"""
STOP_AGENT = "(sleep 1; kill -STOP $(pidof qemu-ga)) </dev/null >/dev/null 2>&1 &"


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
        container = container_config(self.image, self.options.get("memory", 128 << 20), attempt=attempt)
        container.command.extend(self.options.get("command", ()))
        for place, host_path in self.options.get("volumes", {}).items():
            container.mounts.add(container_path=place, host_path=str(host_path))
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

    def end(self) -> None:
        """Removes the pod, and then the VM as an operator does."""
        self.remove()
        named = f"default/{self.config.annotations['virtshim.io/vm'].replace('by-pod-name', self.name)}"
        command = [*VIRTSHIM, "vms", "rm", "--socket", self.node.socket, named]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not self.disks()

    def disks(self) -> list[str]:
        """The VMs' directories on the node."""
        return os.listdir(f"{self.node.directory}/state/vms")

    def run(self, *command: str) -> str:
        done = self.cri.exec_sync(self.container, *command)
        assert done.exit_code == 0, done
        return done.stdout.decode()


def test_the_next_pod_continues_with_the_memory_of_the_last(cri, node, image_url):
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "lasting", command=("/bin/sh", "-c", COUNTER))
    pods.next()
    pods.start()
    wait_for_log(pods.log, "count-1", BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    pods.run("sh", "-c", f"echo in-memory-only > /tmp/note; {LISTEN}")
    address = cri.pod_status(pods.pod).network.ip
    connection = socket.create_connection((address, 7000), timeout=60)
    connection.sendall(b"before")
    assert connection.recv(100) == b"before"
    status = pods.saved()
    assert "its next pod continues from there" in status.message
    assert not node.qemu_pids()
    reached = int(log_lines(pods.log)[-1].removeprefix("count-"))
    pods.remove()

    pods.next()
    pods.start()
    wait_for_log(pods.log, f"count-{reached + 3}", 60)
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert pods.run("cat", "/tmp/note") == "in-memory-only\n"
    first = next(int(line.removeprefix("count-")) for line in log_lines(pods.log) if line.startswith("count-"))
    assert reached - 1 <= first <= reached + 2
    assert cri.pod_status(pods.pod).network.ip == address, "CNI gave the VM its address again"
    with connection:
        connection.sendall(b"after")
        assert connection.recv(100) == b"after"
    pods.end()


@pytest.mark.parametrize("agent", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_restored_guest_gets_another_address_if_its_own_is_taken(cri, node, image_url, agent):
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "moved-house" if agent else "no-agent")
    pods.next()
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    if not agent:
        pods.run("sh", "-c", WATCH_LINK)
        pods.run("sh", "-c", STOP_AGENT)
    before = cri.pod_status(pods.pod).network.ip
    (lease,) = Path(node.directory).rglob(before)  # of host-local
    pods.saved()
    pods.remove()
    lease.write_text("another pod\r\neth0")
    pods.next()
    pods.start()
    address = cri.pod_status(pods.pod).network.ip
    assert address != before
    wait_until(lambda: ping(address), 120, "the restored guest has the new pod's address")
    pods.end()
    lease.unlink()


STATE = {**VM, "virtshim.io/state-volume": "/state"}


def test_a_vm_continues_on_another_node_with_a_state_volume(cri, node, image_url, other_node, tmp_path):
    other, there = other_node
    volume = tmp_path / "volume"
    volume.mkdir()
    options = {"command": ("/bin/sh", "-c", COUNTER), "volumes": {"/state": volume}}
    here = Pods(cri, node, f"{image_url}/guest.qcow2", "moving", **options)
    here.next(STATE)
    here.start()
    wait_for_log(here.log, "count-1", BOOT)
    boot = here.run("cat", "/proc/sys/kernel/random/boot_id")
    here.run("sh", "-c", "echo in-memory-only > /tmp/note")
    assert "/state" not in here.run("cat", "/proc/mounts")
    here.saved()
    reached = int(log_lines(here.log)[-1].removeprefix("count-"))
    here.remove()

    away = Pods(there, other, f"{image_url}/guest.qcow2", "moving", **options)
    away.next(STATE)
    away.start()
    wait_for_log(away.log, f"count-{reached + 3}", 60)
    first = next(int(line.removeprefix("count-")) for line in log_lines(away.log) if line.startswith("count-"))
    assert reached - 1 <= first <= reached + 2
    assert away.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert away.run("cat", "/tmp/note") == "in-memory-only\n"
    wait_until(lambda: ping(there.pod_status(away.pod).network.ip), 60, "the guest has the other node's address")
    away.run("sh", "-c", "echo on-the-other-node > /tmp/note")
    away.saved()
    away.remove()

    here.next(STATE)
    here.start()
    assert here.run("cat", "/tmp/note") == "on-the-other-node\n"
    here.end()
    away.config.annotations["virtshim.io/vm"] = here.config.annotations["virtshim.io/vm"]
    away.end()


def test_a_restart_in_the_same_sandbox_boots(cri, node, image_url):
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "again")
    pods.next()
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    pods.saved()
    pods.create(attempt=1)
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    assert any("its saved memory is discarded" in line for line in log_lines(pods.log))
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") != boot
    pods.end()


def test_a_running_guest_gets_a_new_qemu_and_keeps_its_connections(cri, node, image_url):
    until = f"{COUNTER.replace('while sleep 1', 'while sleep 1 && [ ! -e /tmp/end ]')}; exit 5"
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "renewed", command=("/bin/sh", "-c", until))
    pods.next({"virtshim.io/vm": "by-pod-name"})
    pods.start()
    wait_for_log(pods.log, "count-1", BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    pods.run("sh", "-c", LISTEN)
    address, before = cri.pod_status(pods.pod).network.ip, node.qemu_pids()
    with socket.create_connection((address, 7000), timeout=60) as connection:
        connection.sendall(b"before")
        assert connection.recv(100) == b"before"
        for _ in range(2):
            command = [*VIRTSHIM, "renew", "--socket", node.socket, pods.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        connection.sendall(b"after")
        assert connection.recv(100) == b"after"
    assert len(node.qemu_pids()) == 1
    assert not node.qemu_pids() & before
    status = cri.status(pods.container)
    assert (status.state, status.metadata.attempt) == (pb.CONTAINER_RUNNING, 0)
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    reached = int(log_lines(pods.log)[-1].removeprefix("count-"))
    wait_for_log(pods.log, f"count-{reached + 3}", 60)
    lines = [line for line in log_lines(pods.log) if line.startswith("count-")]
    assert lines == [f"count-{number}" for number in range(1, len(lines) + 1)]
    pods.run("touch", "/tmp/end")
    wait_until(lambda: cri.status(pods.container).state == pb.CONTAINER_EXITED, 60, "the command ends")
    assert cri.status(pods.container).exit_code == 5
    pods.end()


def test_a_disk_in_a_volume_is_saved_with_its_vm_and_must_not_change(cri, node, image_url, tmp_path):
    claim = tmp_path / "claim"
    claim.mkdir()
    with (claim / "disk.img").open("wb") as file:
        file.truncate(16 << 20)
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "with-data", volumes={"/srv/data": claim})
    more = VM | {"virtshim.io/disk-images": "/srv/data"}
    pods.next(more)
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    for word in ("first", "second"):
        pods.run("sh", "-c", f"echo {word} | dd of=/srv/data conv=sync,notrunc,fsync 2>/dev/null")
        pods.saved()
        pods.remove()
        pods.next(more)
        pods.start()
        assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
        assert pods.run("sh", "-c", f"dd if=/srv/data bs={len(word)} count=1 2>/dev/null") == word
    pods.saved()
    pods.remove()
    with (claim / "disk.img").open("r+b") as file:
        file.write(b"a backup")
    pods.next(more)
    with refused(
        grpc.StatusCode.FAILED_PRECONDITION, "the volume at /srv/data was written to, or restored from a backup"
    ):
        pods.start()
    pods.create(attempt=1)
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    assert any("its saved memory is discarded" in line for line in log_lines(pods.log))
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") != boot
    pods.end()


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
    second.end()


@pytest.mark.full
def test_a_vm_that_was_resized_and_has_more_ports_continues_as_it_was(cri, node, image_url):
    more = VM | {"virtshim.io/max-vcpus": "3", "virtshim.io/max-memory": "256Mi", "virtshim.io/exec-ports": "2"}
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "grown")
    pods.next(more)
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=192 << 20, cpu_quota=200_000, cpu_period=100_000)
    request = pb.UpdateContainerResourcesRequest(container_id=pods.container, linux=resources)
    cri.runtime.UpdateContainerResources(request, timeout=60)
    at_once = [Background(lambda: pods.run("sleep", "3")) for _ in range(3)]  # more than it has ports
    for one in at_once:
        one.done()
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    processors = pods.run("sh", "-c", f"{ONLINE}; nproc")
    pods.saved()
    pods.remove()
    pods.options["memory"] = 192 << 20  # as the pod's template has it by then
    pods.next(more)
    pods.start()
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert pods.run("nproc") == processors == "2\n"
    pods.end()


@pytest.mark.full
def test_uefi_and_tpm_continue(cri, node, guest_image, tmp_path):
    uefi_disk.make(guest_image, tmp_path / "uefi.qcow2")
    more = VM | {"virtshim.io/firmware": "uefi", "virtshim.io/tpm": "true"}
    with serve_directory(tmp_path) as url:
        pods = Pods(cri, node, f"{url.removeprefix('http://')}/uefi.qcow2", "sealed", memory=256 << 20)
    pods.next(more)
    pods.start()
    wait_for_log(pods.log, READY, 3 * BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    resets = pods.run("sh", "-c", RESETS)
    pods.saved()
    pods.remove()
    pods.next(more)
    pods.start()
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert pods.run("sh", "-c", RESETS) == resets, "the TPM was not reset"
    pods.end()


@pytest.mark.full
@pytest.mark.debian
@pytest.mark.timeout(2 * DEBIAN_BOOT)
def test_a_debian_continues_and_cloud_init_does_not_run_again(cri, node, image_url):
    """With UEFI and a TPM. Its next pod has another address."""
    once = {"VirtletCloudInitUserData": 'runcmd: ["echo ran >> /var/lib/boots"]\n'}
    more = VM | once | {"virtshim.io/firmware": "uefi", "virtshim.io/tpm": "true"}
    options = {"memory": 512 << 20, "command": ("/bin/sh", "-c", COUNTER)}
    pods = Pods(cri, node, f"{image_url}/debian.qcow2", "lasting-debian", **options)
    pods.next(more)
    pods.start()
    wait = "until [ -e /run/cloud-init/result.json ]; do sleep 0.5; done"
    assert cri.exec_sync(pods.container, "sh", "-c", wait, timeout=DEBIAN_BOOT).exit_code == 0
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    before = cri.pod_status(pods.pod).network.ip
    (lease,) = Path(node.directory).rglob(before)  # of host-local
    pods.saved()
    reached = int(log_lines(pods.log)[-1].removeprefix("count-"))
    pods.remove()
    lease.write_text("another pod\r\neth0")
    pods.next(more)
    pods.start()
    wait_for_log(pods.log, f"count-{reached + 5}", 120)
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert pods.run("cat", "/var/lib/boots") == "ran\n"
    assert abs(int(pods.run("date", "+%s")) - time.time()) < 60
    address = cri.pod_status(pods.pod).network.ip
    assert address != before
    wait_until(lambda: ping(address), 120, "the restored Debian has the new pod's address")
    pods.end()
    lease.unlink()


def test_a_saved_vm_survives_the_restart_of_the_node(cri, node, image_url):
    """As a reboot ends everything: no process is left, and no tap."""
    pods = Pods(cri, node, f"{image_url}/guest.qcow2", "rebooted")
    pods.next()
    pods.start()
    wait_for_log(pods.log, READY, BOOT)
    boot = pods.run("cat", "/proc/sys/kernel/random/boot_id")
    pods.saved()
    node.stop()
    node.up()
    wait_until(lambda: answers(cri), 60, "the CRI socket serves")
    pods.remove()
    pods.next()
    pods.start()
    assert pods.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    pods.end()
