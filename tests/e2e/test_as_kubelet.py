"""Pods run as kubelet runs them, with its cgroups, its numbers and its order of calls."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from fakes.kubelet_requests import (
    NO_MEMORY_LIMIT_V1,
    NO_MEMORY_LIMIT_V2,
    Asked,
    Qos,
    container_linux,
    resize_steps,
    sandbox_linux,
    update_linux,
)
from guest import BOOT, READY
from kubelet_cgroups import KubeletCgroups, kubelet_cgroups
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.system.machine import has_cgroup_v2

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

MIB = 1 << 20
# The node's `vm.overhead`.
OVERHEAD = 256 * MIB


@pytest.fixture
def groups() -> Iterator[KubeletCgroups]:
    with kubelet_cgroups() as made:
        yield made


def room(guest_memory: int, overhead: int = OVERHEAD) -> int:
    """The memory limit of the cgroup of a guest with that much memory."""
    return (guest_memory + overhead) // 4096 * 4096


def use_all_memory(cri: PodClient, container: str) -> int:
    """Fills the guest's memory with a file of so many bytes, except what the guest needs to answer."""
    script = (
        "mkdir -p /tmp/full && mount -t tmpfs -o size=100% none /tmp/full; "
        "n=$(awk '/MemAvailable/ {print int($2 / 1024) - 16}' /proc/meminfo); "
        "dd if=/dev/zero of=/tmp/full/it bs=1M count=$n 2>/dev/null; stat -c %s /tmp/full/it"
    )
    done = cri.exec_sync(container, "sh", "-c", script, timeout=60)
    assert done.exit_code == 0, done.stderr
    return int(done.stdout)


def test_a_guest_can_use_its_whole_memory_limit_without_pod_overhead(groups, cri, node, image_url):
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

    # It is beside the pod's own group, has room for QEMU, and kubelet does not take it for a pod's.
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
    # More than kubelet's limit on the pod is in use now, and stays in use, as the statistics show.
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


# --- every class


ROOM = {"virtshim.io/max-vcpus": "2", "virtshim.io/max-memory": "256Mi"}
# The QoS classes before and after a resize. A pod without limits cannot be resized.
CLASSES = {
    Qos.GUARANTEED: (
        Asked(cpu=1000, cpu_limit=1000, memory=128 * MIB, memory_limit=128 * MIB),
        Asked(cpu=2000, cpu_limit=2000, memory=160 * MIB, memory_limit=160 * MIB),
    ),
    Qos.BURSTABLE: (  # limited in part
        Asked(cpu=200, memory=64 * MIB, memory_limit=128 * MIB),
        Asked(cpu=300, memory=64 * MIB, memory_limit=160 * MIB),
    ),
    Qos.BEST_EFFORT: (Asked(), Asked()),
}
# The overhead of a RuntimeClass, which differs from the node's, and no overhead.
DECLARED: dict[str, int] = {"overhead_cpu": 100, "overhead_memory": 200 * MIB}
NONE: dict[str, int] = {}
# Each pod, and whether the test restarts it.
EVERY = [(qos, overhead, overhead == restarted) for qos, restarted in
         ((Qos.GUARANTEED, NONE), (Qos.BURSTABLE, DECLARED), (Qos.BEST_EFFORT, NONE))
         for overhead in (NONE, DECLARED)]  # fmt: skip
SAMPLE = [(Qos.GUARANTEED, NONE, False), (Qos.BURSTABLE, DECLARED, True), (Qos.BEST_EFFORT, NONE, False)]


@dataclass
class Pod:
    """A pod as kubelet manages it."""

    cri: PodClient
    groups: KubeletCgroups
    asked: Asked
    config: pb.PodSandboxConfig
    own: str
    sandbox: str
    container: str = ""
    attempt: int = 0

    def start(self, image: str) -> None:
        wanted = container_config(image, attempt=self.attempt)
        wanted.linux.resources.CopyFrom(container_linux(self.asked))
        self.container = self.cri.create(self.sandbox, wanted, self.config)
        self.cri.start(self.container)

    def wait_until_up(self) -> None:
        wait_for_log(self.cri.status(self.container).log_path, READY, BOOT)

    @property
    def group(self) -> str:
        """The cgroup of its VM."""
        parent = self.own if self.asked.overhead_memory else self.own.rpartition("/")[0]
        return f"{parent}/virtshim-{self.container}"

    def facts(self) -> dict[str, object]:
        request = pb.ContainerStatusRequest(container_id=self.container, verbose=True)
        found: dict[str, object] = json.loads(self.cri.runtime.ContainerStatus(request, timeout=60).info["info"])
        return found

    def check(self) -> None:
        """Checks that its VM is in the right cgroup with the right limits."""
        assert self.groups.holds(self.group, int(str(self.facts()["qemuPid"])))
        linux = self.cri.status(self.container).resources.linux
        wanted = update_linux(self.asked)
        assert (linux.cpu_quota, linux.cpu_shares) == (wanted.cpu_quota, wanted.cpu_shares)
        assert linux.memory_limit_in_bytes == self.asked.memory_limit
        overhead = self.asked.overhead_memory
        if self.asked.memory_limit:
            assert self.groups.memory_limit(self.group) == room(self.asked.memory_limit, overhead or OVERHEAD)
        milli = self.asked.cpu_limit and self.asked.cpu_limit + self.asked.overhead_cpu
        assert self.groups.quota(self.group) == (milli * 100 or -1)

    def resize(self, after: Asked) -> None:
        """Resizes the pod. kubelet changes the pod's own cgroup after the runtime agrees."""
        none = NO_MEMORY_LIMIT_V2 if has_cgroup_v2() else NO_MEMORY_LIMIT_V1
        for step in resize_steps(self.asked, after, none):
            if isinstance(step, pb.UpdateContainerResourcesRequest):
                step.container_id = self.container
                self.cri.runtime.UpdateContainerResources(step, timeout=60)
            else:
                step.pod_sandbox_id = self.sandbox
                self.cri.runtime.UpdatePodSandboxResources(step, timeout=60)
                self.groups.limit_pod(self.own, after)
        self.asked = after

    def restart(self, image: str) -> None:
        """Starts the next attempt of an ended container in the same sandbox. The last attempt stays for its log."""
        ended, disk, group = self.container, str(self.facts()["rootDisk"]), self.group
        assert os.path.exists(disk)
        self.cri.stop(ended, 0)
        assert self.cri.status(ended).state == pb.CONTAINER_EXITED
        assert not os.path.exists(disk), "an ended container gives its room back"
        assert group.rpartition("/")[2] not in self.groups.children(group.rpartition("/")[0])
        self.attempt += 1
        self.start(image)

    def delete(self) -> None:
        """Deletes the pod; its own cgroup is removed before the sandbox."""
        self.cri.stop(self.container, 0)
        self.cri.stop_pod(self.sandbox)
        self.groups.remove_pod(self.own)
        self.cri.remove_pod(self.sandbox)


def test_pods_of_every_class_are_run_resized_restarted_and_deleted(groups, cri, node, image_url, request):
    image = cri.pull(f"{image_url}/guest.qcow2")
    pods, again = [], []
    for qos, overhead, is_restarted in EVERY if request.config.getoption("--all") else SAMPLE:
        asked = dataclasses.replace(CLASSES[qos][0], **overhead)
        assert asked.qos is qos
        name = f"{qos.name.lower().replace('_', '-')}-{len(pods)}"
        config = pod_config(name, f"{node.directory}/logs/{name}", annotations=ROOM)
        own = groups.make_pod(config.metadata.uid, asked)
        config.linux.CopyFrom(sandbox_linux(asked, own))
        pods.append(Pod(cri, groups, asked, config, own, cri.run_pod(config)))
        pods[-1].start(image)
        if is_restarted:
            again.append(pods[-1])
    for pod in pods:
        pod.wait_until_up()
        pod.check()
    # kubelet finds its pods, and no other group that it would take for a pod's and kill.
    assert groups.taken_for_pods() == {pod.config.metadata.uid for pod in pods}

    for pod in pods:
        after = CLASSES[pod.asked.qos][1]
        if pod.asked.qos is not Qos.BEST_EFFORT:
            pod.resize(dataclasses.replace(after, **(DECLARED if pod.asked.overhead_memory else {})))
        pod.check()

    # The restarted container has the resized values.
    for pod in again:
        pod.restart(image)
    for pod in again:
        pod.wait_until_up()
        pod.check()

    for pod in pods:
        pod.delete()
    assert groups.taken_for_pods() == set()
    for qos in Qos:
        assert {name for name in groups.children(groups.root + qos.value) if name.startswith("virtshim-")} == set()


# --- every restart policy


def begins_again(policy: str, status: pb.ContainerStatus) -> bool:
    """kubelet's rule (ShouldContainerBeRestarted) for a container that has ended."""
    assert status.state == pb.CONTAINER_EXITED
    return policy == "Always" or (policy == "OnFailure" and status.exit_code != 0)


@pytest.mark.full  # ends by the power button and by a stop: test_events.py, test_pod_lifecycle.py
def test_ended_containers_restart_as_the_restart_policy_says(groups, cri, node, image_url):
    image = cri.pull(f"{image_url}/guest.qcow2")
    asked = Asked(cpu=100, memory=128 * MIB, memory_limit=128 * MIB)
    config = pod_config("policies", f"{node.directory}/logs/policies")
    own = groups.make_pod(config.metadata.uid, asked)
    config.linux.CopyFrom(sandbox_linux(asked, own))
    pod = Pod(cri, groups, asked, config, own, cri.run_pod(config))

    # A guest that shuts itself down has completed.
    pod.start(image)
    pod.wait_until_up()
    with contextlib.suppress(grpc.RpcError):  # nobody is left to answer
        cri.exec_sync(pod.container, "poweroff")
    wait_until(lambda: cri.status(pod.container).state == pb.CONTAINER_EXITED, BOOT, "the guest has shut down")
    done = cri.status(pod.container)
    assert (done.exit_code, done.reason) == (0, "Completed")
    assert [begins_again(policy, done) for policy in ("Always", "OnFailure", "Never")] == [True, False, False]

    # A guest killed for its liveness probe has not completed: a Job restarts it.
    pod.attempt += 1
    pod.start(image)
    pod.wait_until_up()
    cri.stop(pod.container, 30)
    killed = cri.status(pod.container)
    assert (killed.exit_code, killed.reason) == (143, "Error")
    assert [begins_again(policy, killed) for policy in ("Always", "OnFailure", "Never")] == [True, True, False]

    # A guest of a drained node has not completed, either.
    pod.attempt += 1
    pod.start(image)
    pod.wait_until_up()
    cri.stop(pod.container, 30)
    cri.stop_pod(pod.sandbox)
    drained = cri.status(pod.container)
    assert (drained.exit_code, drained.reason) == (143, "Error")
    groups.remove_pod(own)
    cri.remove_pod(pod.sandbox)
    assert groups.taken_for_pods() == set()
