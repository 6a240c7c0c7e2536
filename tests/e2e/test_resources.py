"""A VM is in its pod's cgroup, with the pod's limits, and is resized while it runs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from console import SerialConsole
from guest import BOOT, READY
from podclient import container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb
from tapmanager.cgroups import tree as cgroups

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

MIB = 1 << 20
OVERHEAD = 256 * MIB
IN_MEMORY = 192 * MIB
ROOM = {"virtshim.io/max-vcpus": "2", "virtshim.io/max-memory": "256Mi"}


def value(group: str, controller: str, v1: str, v2: str) -> str:
    home = next(one for one in cgroups.hierarchies() if controller in one.controllers)
    return Path(f"{home.root}{group}/{v2 if home.is_v2 else v1}").read_text().split()[0]


def memory_used(group: str) -> int:
    return int(value(group, "memory", "memory.usage_in_bytes", "memory.current"))


def limits(group: str) -> tuple[int, int]:
    """The cgroup's limits: quota in microseconds, memory in bytes."""
    quota = value(group, "cpu", "cpu.cfs_quota_us", "cpu.max")
    return int(quota), int(value(group, "memory", "memory.limit_in_bytes", "memory.max"))


def room(guest_memory: int) -> int:
    """The memory limit of the cgroup of a guest with that much memory."""
    return (guest_memory + OVERHEAD) // 4096 * 4096


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """An emptyDir with `medium: Memory` and a `sizeLimit`, as kubelet creates it."""
    size = f"size={IN_MEMORY}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "virtshim-test", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.volumes
def test_a_vm_is_in_its_pods_cgroup_and_can_be_resized_while_it_runs(cri, node, image_url, pod_cgroup, in_memory):
    config = pod_config("sized", f"{node.directory}/logs/sized", annotations=ROOM)
    config.linux.cgroup_parent = pod_cgroup
    config.linux.overhead.memory_limit_in_bytes = OVERHEAD
    pod = cri.run_pod(config)
    asked = container_config(cri.pull(f"{image_url}/guest.qcow2"), 128 * MIB)
    asked.linux.resources.cpu_quota = 90_000
    asked.linux.resources.cpu_period = 100_000
    asked.linux.resources.cpu_shares = 700
    asked.linux.resources.cpuset_cpus = "0"
    asked.linux.resources.oom_score_adj = 901
    asked.mounts.add(container_path="/cache", host_path=str(in_memory))
    container = cri.create(pod, asked, config)
    cri.start(container)
    log = cri.status(container).log_path
    wait_for_log(log, READY, BOOT)

    # QEMU's cgroup and its limits.
    group = f"{pod_cgroup}/virtshim-{container}"
    (pid,) = node.qemu_pids()
    for one in cgroups.hierarchies():
        if one.is_needed:
            assert str(pid) in Path(f"{one.root}{group}/cgroup.procs").read_text().split(), one.root
    assert limits(group) == (90_000, room(128 * MIB))
    assert value(group, "cpuset", "cpuset.cpus", "cpuset.cpus.effective") == "0"
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "901\n"
    used = memory_used(group)
    assert 64 * MIB < used < room(128 * MIB), "charged from QEMU's first page on, and with room to spare"
    assert value(group, "memory", "memory.failcnt", "memory.events") in ("0", "low")

    # The guest's files in the node's tmpfs are not charged to QEMU.
    full = cri.exec_sync(container, "sh", "-c", "dd if=/dev/zero of=/cache/all bs=64k; df -k /cache")
    assert b"No space left on device" in full.stderr
    assert (in_memory / "all").stat().st_size == IN_MEMORY
    assert memory_used(f"{group}-volumes") > IN_MEMORY
    assert memory_used(group) < used + IN_MEMORY // 2
    # Here and not on the node: virtiofsd keeps a file open, and so its space, for as long as the guest caches its inode.
    assert cri.exec_sync(container, "rm", "/cache/all").exit_code == 0

    def resize(**resources: object) -> None:
        linux = pb.LinuxContainerResources(**resources)
        request = pb.UpdateContainerResourcesRequest(container_id=container, linux=linux)
        cri.runtime.UpdateContainerResources(request, timeout=60)

    def shown() -> tuple[int, int, str]:
        linux = cri.status(container).resources.linux
        return linux.cpu_quota, linux.memory_limit_in_bytes, linux.cpuset_cpus

    # Limits alone.
    resize(cpu_quota=60_000, cpuset_cpus="0-1" if (os.cpu_count() or 1) > 1 else "0")
    assert limits(group) == (60_000, room(128 * MIB))
    assert shown()[:2] == (60_000, 128 * MIB)

    # A second vCPU and more memory; the guest sees both.
    console = SerialConsole(f"{node.directory}/run/vm/{container[:20]}/console.sock")
    resize(cpu_quota=150_000, memory_limit_in_bytes=192 * MIB)
    assert limits(group) == (150_000, room(192 * MIB))
    console.type(
        "until [ -e /sys/devices/system/cpu/cpu1 ]; do sleep 0.2; done; echo 1 > /sys/devices/system/cpu/cpu1/online; "
        "echo cpus'='$(nproc) memory'='$(awk '/MemTotal/ {print $2}' /proc/meminfo)"
    )
    match = re.search(r"cpus=(\d) memory=(\d+)", wait_for_log(log, "cpus=2", 60))
    assert match is not None
    assert 130 << 10 < int(match[2]) <= 192 << 10

    # Back to what it was: memory leaves the guest, the quota bounds what its vCPUs get.
    resize(cpu_quota=90_000, memory_limit_in_bytes=128 * MIB)
    assert limits(group) == (90_000, room(128 * MIB))
    before = (limits(group), shown())

    # Requests that it cannot have.
    for wrong, code, words in (
        ({"cpu_quota": 250_000, "memory_limit_in_bytes": 192 * MIB}, "FAILED_PRECONDITION", "virtshim.io/max-vcpus"),
        ({"cpu_quota": 70_000, "memory_limit_in_bytes": 512 * MIB}, "FAILED_PRECONDITION", "virtshim.io/max-memory"),
        ({"cpu_quota": 70_000, "memory_limit_in_bytes": 40 * MIB}, "FAILED_PRECONDITION", "the guest uses"),
        ({"cpu_quota": 70_000, "cpuset_cpus": "4095"}, "INVALID_ARGUMENT", "linux.cpuset_cpus"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            resize(**wrong)
        assert refused.value.code() is grpc.StatusCode[code], refused.value.details()
        assert words in refused.value.details()
        assert (limits(group), shown()) == before

    # The volume is where it was, also for memory that came later.
    done = cri.exec_sync(
        container, "sh", "-c", "dd if=/dev/zero of=/cache/more bs=1M count=32 && cat /cache/more | wc -c"
    )
    assert (done.stdout, done.exit_code) == (b"33554432\n", 0), done.stderr

    # A guest that QEMU dies under leaves no cgroup, and kubelet's own is left to kubelet.
    os.kill(pid, 9)
    wait_until(lambda: cri.status(container).state == pb.CONTAINER_EXITED, 60, "the container is EXITED")
    wait_until(lambda: not any(os.path.exists(one.root + group) for one in cgroups.hierarchies()), 60, "no cgroup")
    cri.remove_pod(pod)
