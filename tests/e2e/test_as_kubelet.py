"""Pods as kubelet runs them: its cgroups, its numbers, its order of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fakes.kubelet_requests import Asked, container_linux, sandbox_linux
from guest import BOOT, READY
from kubelet_cgroups import KubeletCgroups, kubelet_cgroups
from podclient import PodClient, container_config, pod_config, wait_for_log

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

MIB = 1 << 20
# The node's `vm.overhead`.
OVERHEAD = 256 * MIB


@pytest.fixture
def groups() -> Iterator[KubeletCgroups]:
    with kubelet_cgroups() as made:
        yield made


def room(guest_memory: int) -> int:
    """The memory of the cgroup of a guest with that much, in a pod without an overhead."""
    return (guest_memory + OVERHEAD + guest_memory // 64) // 4096 * 4096


def use_all_memory(cri: PodClient, container: str) -> int:
    """The guest's, but for what it needs to answer: held by a file in memory, of so many bytes."""
    script = (
        "mkdir -p /tmp/full && mount -t tmpfs -o size=100% none /tmp/full; "
        "n=$(awk '/MemAvailable/ {print int($2 / 1024) - 16}' /proc/meminfo); "
        "dd if=/dev/zero of=/tmp/full/it bs=1M count=$n 2>/dev/null; stat -c %s /tmp/full/it"
    )
    done = cri.exec_sync(container, "sh", "-c", script, timeout=60)
    assert done.exit_code == 0, done.stderr
    return int(done.stdout)


def test_a_guest_uses_all_of_a_memory_limit_that_has_no_overhead_beside_it(groups, cri, node, image_url):
    asked = Asked(cpu=100, memory=64 * MIB, memory_limit=192 * MIB)
    config = pod_config("limited", f"{node.directory}/logs/limited")
    own = groups.make_pod(config.metadata.uid, asked)
    config.linux.CopyFrom(sandbox_linux(asked, own))
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.linux.resources.CopyFrom(container_linux(asked))
    container = cri.create(pod, wanted, config)
    cri.start(container)
    log = cri.status(container).log_path
    wait_for_log(log, READY, BOOT)

    # Beside the pod's own group, with room for QEMU, and kubelet takes it for no pod's.
    assert groups.memory_limit(own) == 192 * MIB
    group = f"{own.rpartition('/')[0]}/virtshim-{container}"
    (pid,) = node.qemu_pids()
    assert groups.holds(group, pid)
    assert groups.memory_limit(group) == room(192 * MIB)
    assert groups.taken_for_pods() == {config.metadata.uid}
    request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    facts = json.loads(cri.runtime.PodSandboxStatus(request, timeout=20).info["info"])
    assert facts["vmCgroupParent"] == own.rpartition("/")[0]
    assert "no RuntimeClass overhead" in facts["vmCgroupNote"]

    assert use_all_memory(cri, container) > 80 * MIB
    # More than kubelet's limit on the pod is in use now, and stays in use; the numbers say so.
    usage = groups.value(group, "memory", "memory.usage_in_bytes", "memory.current")
    assert int(usage) > 192 * MIB
    (stats,) = cri.runtime.ListPodSandboxStats(pb.ListPodSandboxStatsRequest(), timeout=20).stats
    assert stats.linux.memory.usage_bytes.value > 192 * MIB
    assert cri.exec_sync(container, "md5sum", "/tmp/full/it", timeout=60).exit_code == 0
    assert cri.status(container).state == pb.CONTAINER_RUNNING
    assert node.qemu_pids() == {pid}

    # kubelet removes the pod's own group when the pod's containers are gone, and finds it empty.
    cri.stop_pod(pod)
    assert f"virtshim-{container}" not in groups.children(own.rpartition("/")[0])
    groups.remove_pod(own)
    cri.remove_pod(pod)
