"""Events of a real VM show in its container: reboots, panics, killed QEMUs, full disks, lost networks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from console import SerialConsole
from guest import BOOT, READY, boot, console_of
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

# Longer than the pause between two looks at all pods.
ROUND = 30.0


def ended(cri: PodClient, container: str, seconds: float = 30.0) -> pb.ContainerStatus:
    """The container's status once it is EXITED."""
    wait_until(lambda: cri.status(container).state == pb.CONTAINER_EXITED, seconds, "the container is EXITED")
    return cri.status(container)


def type_and_leave(console: SerialConsole, command: str) -> None:
    """Types a command that ends or resets the guest, after which its shell prints nothing."""
    console.type(f"{{ (sleep 1; {command}) & }}")


@pytest.mark.full  # reboots: test_operator_commands.py; killed QEMUs: test_events.py
def test_a_reboot_does_not_end_the_container_but_a_killed_qemu_does(cri, node, image_url):
    _pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2", "phoenix")
    (before,) = node.qemu_pids()
    started = cri.status(container).started_at
    type_and_leave(console_of(node, container), "reboot")

    def boots() -> int:
        return sum(READY in line for line in log_lines(log))

    wait_until(lambda: boots() == 2, BOOT, "the guest is up again")
    status = cri.status(container)
    assert (status.state, status.started_at, status.message) == (pb.CONTAINER_RUNNING, started, "")
    assert node.qemu_pids() == {before}, "the same QEMU serves on"

    os.kill(before, signal.SIGKILL)
    status = ended(cri, container)
    assert (status.exit_code, status.reason) == (137, "Error")
    assert "QEMU was killed" in status.message


def test_a_panic_ends_the_container_with_code_1(cri, node, image_url):
    _pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2", "panic")
    type_and_leave(console_of(node, container), "echo c > /proc/sysrq-trigger")
    status = ended(cri, container)
    assert (status.exit_code, status.reason) == (1, "Error")
    assert "the guest panicked" in status.message
    assert not node.qemu_pids()
    assert any("sysrq" in line.lower() for line in log_lines(log)), "the console's last words are in the log"


def null_guest(cri: PodClient, node: Node, image_url: str, name: str, memory: int = 64 << 20) -> str:
    """A startable container whose guest needs no time to boot."""
    config = pod_config(name, f"{node.directory}/logs/{name}")
    return cri.create(cri.run_pod(config), container_config(cri.pull(f"{image_url}/null.qcow2"), memory), config)


def test_a_guest_that_has_not_reached_its_kernel_is_killed_at_once(cri, node, image_url):
    config = pod_config("too-soon", f"{node.directory}/logs/too-soon")
    container = cri.create(cri.run_pod(config), container_config(cri.pull(f"{image_url}/guest.qcow2")), config)
    cri.start(container)
    cri.stop(container, 120)
    status = cri.status(container)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 137, "Error")
    assert status.message == "killed: the guest had not begun to boot its kernel"
    assert not node.qemu_pids()


def test_a_qemu_ended_by_a_signal_is_not_completed(cri, node, image_url):
    """Each signal makes QEMU shut down in good order, as after a guest's shutdown."""
    for how in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        container = null_guest(cri, node, image_url, f"told-{how.name.lower()}")
        cri.start(container)
        (qemu,) = node.qemu_pids()
        os.kill(qemu, how)
        status = ended(cri, container)
        assert (status.exit_code, status.reason) == (137, "Error"), how
        assert "externally" in status.message or "QEMU was killed" in status.message


def test_a_failed_start_has_its_reason_and_remedy(cri, node, image_url):
    killed = null_guest(cri, node, image_url, "killed")
    others, is_over = node.qemu_pids(), threading.Event()

    def kill() -> None:
        # Without a pause, which the rest of the start could fit into.
        while not is_over.is_set():
            for pid in node.qemu_pids() - others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(grpc.RpcError) as error:
            cri.start(killed)
    finally:
        is_over.set()
        killer.join()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "killed during its start" in error.value.details()
    assert (ended(cri, killed).exit_code, ended(cri, killed).reason) == (128, "StartError")


def test_a_vm_larger_than_the_node_is_refused(cri, node, image_url):
    with pytest.raises(grpc.RpcError) as error:
        null_guest(cri, node, image_url, "giant", 1 << 42)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes of RAM and swap; ask for less" in error.value.details()


@contextlib.contextmanager
def small_disk(cri: PodClient, node: Node, mebibytes: int) -> Iterator[str]:
    """Containers created inside the block keep their files on a file system of that size; yields its path. The
    containers are removed."""
    path = f"{node.directory}/state/containers"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0711", "small", path], check=True)
    try:
        yield path
    finally:
        for pod in cri.pods():
            cri.remove_pod(pod.id)
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_pauses_the_vm_until_there_is_space(cri, node, image_url):
    with small_disk(cri, node, 24) as files:
        big = {"VirtletRootVolumeSize": "200Mi"}
        _pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2", "hoarder", annotations=big)
        mebibyte = "dd if=/dev/zero bs=1M count=1 2>/dev/null | tr '\\0' x > /tmp/m"
        write = "for i in $(seq 0 39); do cat /tmp/m; done | dd of=/dev/vda bs=1M seek=100 conv=fsync,notrunc"
        console_of(node, container).type(f"{mebibyte}; {{ ({write}; echo wrote-$?-all) & }}")
        wait_until(
            lambda: "file system is full" in cri.status(container).message, 60, "the container tells of the full disk"
        )
        status = cri.status(container)
        assert status.state == pb.CONTAINER_RUNNING
        request = pb.ContainerStatusRequest(container_id=container, verbose=True)
        info = json.loads(cri.runtime.ContainerStatus(request, timeout=10).info["info"])
        assert info["trouble"] == status.message
        assert not any("wrote-0-all" in line for line in log_lines(log))

        subprocess.run(["mount", "-o", "remount,size=400m", files], check=True)
        wait_for_log(log, "wrote-0-all", ROUND + 30)
        wait_until(lambda: cri.status(container).message == "", ROUND, "all is well again")


def test_a_qemu_that_the_kernel_kills_for_memory_is_oom_killed(cri, node, image_url):
    _pod, container, _log = boot(cri, node, f"{image_url}/guest.qcow2", "glutton")
    unified = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    group = Path(f"/sys/fs/cgroup{'' if unified else '/memory'}/virtshim/virtshim-{container}")
    limit, anonymous = ("memory.max", "anon") if unified else ("memory.limit_in_bytes", "rss")
    used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Not by what is charged in all: the page cache in it would make room for the guest.
    room = int(used[anonymous]) + int(used.get("shmem", 0)) + (4 << 20)
    (group / limit).write_text(str(room))
    type_and_leave(console_of(node, container), "dd if=/dev/urandom of=/dev/shm/x bs=1M count=40")
    status = ended(cri, container, 60)
    assert (status.exit_code, status.reason) == (137, "OOMKilled")
    assert "memory" in status.message


def delete_tap(pod: str) -> str:
    """Deletes the link of the VM in the pod's network namespace; returns its name."""
    netns = f"virtshim-{pod[:20]}"
    listed = subprocess.run(["ip", "-n", netns, "-br", "link"], capture_output=True, text=True, check=True).stdout
    (tap,) = [line.split()[0] for line in listed.splitlines() if line.startswith("tap")]
    subprocess.run(["ip", "-n", netns, "link", "delete", tap], check=True)
    return tap


def test_a_sandbox_whose_network_or_namespace_was_deleted_is_not_ready(cri, node, null_image, image_url):
    digest = cri.pull(f"{image_url}/{null_image.name}")
    config = pod_config("cut-off", f"{node.directory}/logs/cut-off")
    pod = cri.run_pod(config)
    homeless = cri.run_pod(pod_config("homeless", f"{node.directory}/logs/homeless"))
    other = cri.run_pod(pod_config("connected", f"{node.directory}/logs/connected"))
    container = cri.create(pod, container_config(digest, 64 << 20), config)
    cri.start(container)
    tap = delete_tap(pod)
    subprocess.run(["ip", "netns", "delete", f"virtshim-{homeless[:20]}"], check=True)
    for lost in (pod, homeless):
        wait_until(
            lambda lost=lost: cri.pod_status(lost).state == pb.SANDBOX_NOTREADY, ROUND, "the sandbox is NOTREADY"
        )
    request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    info = json.loads(cri.runtime.PodSandboxStatus(request, timeout=10).info["info"])
    assert tap in info["reason"]
    assert cri.pod_status(other).state == pb.SANDBOX_READY
    # What kubelet does then.
    cri.stop(container, 0)
    for lost in (pod, homeless):
        cri.stop_pod(lost)
        cri.remove_pod(lost)
