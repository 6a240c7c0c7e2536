"""Pods of a VM and ordinary containers live in kubelet's order of calls, with a real containerd, virtshim, passt and
guest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from bench.containerd import IMAGE
from both_runtimes import LIMIT, Both, node_with_containerd
from fakes.cri import refused
from fakes.kubelet_requests import Asked, container_linux, sandbox_linux
from fakes.processes import hanging
from fakes.spdy import close_all, spdy
from guest import BOOT, READY
from kubelet_cgroups import KubeletCgroups, kubelet_cgroups
from podclient import container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.client import connected

PASST = os.environ.get("VIRTSHIM_TEST_PASST", shutil.which("passt") or "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.proxy,
    pytest.mark.guest,
    pytest.mark.helpers,
    pytest.mark.skipif(not PASST, reason="NOT TESTED: no passt"),
]

HANDLER = "virtshim-pod"
MIB = 1 << 20
GUEST_MEMORY = 128 * MIB
ASKED = Asked(
    cpu=100, memory=GUEST_MEMORY, memory_limit=GUEST_MEMORY + 128 * MIB, overhead_cpu=100, overhead_memory=320 * MIB
)


@dataclass
class Pod:
    """One pod of the API server. `volume`: an emptyDir, which all its containers have at /data."""

    both: Both
    config: pb.PodSandboxConfig
    cgroup: str
    volume: Path
    vm_image: str
    sandbox: str = ""
    attempts: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        self.sandbox = self.both.proxy.run_pod(self.config, HANDLER)

    def helper(self, name: str, script: str, target: str = "") -> str:
        """Starts an ordinary container."""
        wanted = container_config(IMAGE, memory=0, name=name, attempt=self._attempt(name))
        wanted.command.extend(["/busybox", "sh", "-c", script])
        if target:
            wanted.linux.security_context.namespace_options.pid = pb.TARGET
            wanted.linux.security_context.namespace_options.target_id = target
        return self._start(wanted)

    def vm(self) -> str:
        """Starts the VM; returns when the guest is up."""
        wanted = container_config(self.both.proxy.pull(self.vm_image), name="vm", attempt=self._attempt("vm"))
        wanted.image.user_specified_image = self.vm_image
        wanted.linux.resources.CopyFrom(container_linux(Asked(memory=GUEST_MEMORY, memory_limit=GUEST_MEMORY)))
        made = self._start(wanted)
        wait_for_log(self.both.proxy.status(made).log_path, READY, BOOT)
        return made

    def says(self, container: str, script: str) -> str:
        """What the script prints, in a helper or in the guest."""
        shell = ["sh"] if self.status(container).metadata.name == "vm" else ["/busybox", "sh"]
        done = self.both.proxy.exec_sync(container, *shell, "-c", script, timeout=60)
        assert done.exit_code == 0, (done.stdout + done.stderr).decode()
        return done.stdout.decode().strip()

    def status(self, container: str) -> pb.ContainerStatus:
        return self.both.proxy.status(container)

    def wait_until_ended(self, container: str) -> pb.ContainerStatus:
        wait_until(lambda: self.status(container).state == pb.CONTAINER_EXITED, LIMIT, "it has ended")
        return self.status(container)

    def containers(self) -> dict[str, int]:
        """Id and state of each container, from the list of this pod's."""
        wanted = pb.ListContainersRequest(filter=pb.ContainerFilter(pod_sandbox_id=self.sandbox))
        return {one.id: one.state for one in self.both.proxy.runtime.ListContainers(wanted, timeout=LIMIT).containers}

    def end(self) -> None:
        self.both.proxy.stop_pod(self.sandbox)
        self.both.proxy.remove_pod(self.sandbox)

    def _attempt(self, name: str) -> int:
        self.attempts[name] = self.attempts.get(name, -1) + 1
        return self.attempts[name]

    def _start(self, wanted: pb.ContainerConfig) -> str:
        wanted.mounts.add(container_path="/data", host_path=str(self.volume))
        made = self.both.proxy.create(self.sandbox, wanted, self.config)
        self.both.proxy.start(made)
        return made


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with node_with_containerd(f'[shares]\npasst = "{PASST}"\n') as made:
        made.node.make_bridge()
        yield made


@pytest.fixture
def groups() -> Iterator[KubeletCgroups]:
    with kubelet_cgroups() as made:
        yield made


@pytest.fixture
def pod(both: Both, groups: KubeletCgroups, image_url: str, tmp_path: Path) -> Iterator[Pod]:
    """A pod that is not made yet. It is removed at the end, and nothing of it is left then."""
    annotations = {"virtshim.io/ports": "80"}
    config = pod_config("helped", f"{both.node.directory}/logs/{tmp_path.name}", annotations)
    cgroup = groups.make_pod(config.metadata.uid, ASKED)
    config.linux.CopyFrom(sandbox_linux(ASKED, cgroup))
    os.makedirs(config.log_directory)
    volume = Path(both.node.directory, "volumes", config.metadata.uid)
    volume.mkdir(parents=True)
    volume.parent.chmod(0o755)
    volume.chmod(0o777)
    before = set(os.listdir("/run/netns"))
    made = Pod(both, config, cgroup, volume, f"virtlet.cloud/{image_url}/guest.qcow2")
    yield made
    for one in both.proxy.pods():
        both.proxy.stop_pod(one.id)
        both.proxy.remove_pod(one.id)
    assert both.proxy.containers() == both.virtshim.pods() == []
    assert not passts(both)
    assert not both.node.qemu_pids()
    assert set(os.listdir("/run/netns")) <= before
    groups.remove_pod(cgroup)
    shutil.rmtree(volume)


def passts(both: Both) -> list[int]:
    """The processes of this node's VMs' networks."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"/passt"):
                found.append(int(entry))
    return found


def test_a_pods_life_with_an_init_container_a_sidecar_and_a_vm(both: Both, groups: KubeletCgroups, pod: Pod) -> None:
    pod.run()
    address = both.proxy.pod_ip(pod.sandbox)
    fetch = pod.helper("fetch", "echo fetched > /data/fetched")
    assert pod.wait_until_ended(fetch).exit_code == 0
    sidecar = pod.helper("sidecar", "echo serving; exec /busybox httpd -f -p 127.0.0.1:7000 -h /data")
    vm = pod.vm()

    # the volume
    assert pod.says(vm, "cat /data/fetched; echo from the guest > /data/answer") == "fetched"
    assert pod.says(sidecar, "/busybox cat /data/answer") == "from the guest"

    # the network: one address, and each other's loopback
    assert address in pod.says(vm, "ip address")
    pod.says(vm, "mkdir -p /srv/www; echo a page > /srv/www/page")
    for host in (address, "127.0.0.1"):
        assert pod.says(sidecar, f"/busybox wget -q -O - http://{host}/page") == "a page"
    assert pod.says(vm, "wget -q -O - http://169.254.7.1:7000/fetched") == "fetched"

    # what kubelet sees
    assert pod.containers() == {
        fetch: pb.CONTAINER_EXITED, sidecar: pb.CONTAINER_RUNNING, vm: pb.CONTAINER_RUNNING,
    }  # fmt: skip
    assert [one.id for one in both.proxy.pods()] == [pod.sandbox]
    assert "serving" in log_lines(pod.status(sidecar).log_path)
    wanted = pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(pod_sandbox_id=pod.sandbox))
    stats = {one.attributes.id: one for one in both.proxy.runtime.ListContainerStats(wanted, timeout=LIMIT).stats}
    assert {vm, sidecar} <= set(stats)
    assert stats[vm].memory.working_set_bytes.value > stats[sidecar].memory.working_set_bytes.value
    asked = pb.PodSandboxStatsRequest(pod_sandbox_id=pod.sandbox)
    whole = both.proxy.runtime.PodSandboxStats(asked, timeout=LIMIT).stats.linux
    assert {vm, sidecar} <= {one.attributes.id for one in whole.containers}
    # kubelet ranks the pod for eviction by its cgroup, which the VM is in.
    (qemu,) = both.node.qemu_pids()
    (passt,) = passts(both)
    usage = int(groups.value(pod.cgroup, "memory", "memory.usage_in_bytes", "memory.current"))
    assert usage > stats[vm].memory.working_set_bytes.value
    assert all(_is_below(pid, pod.cgroup) for pid in (qemu, passt))

    # the VM ends before the sidecar
    both.proxy.stop(vm, 30)
    assert pod.status(sidecar).state == pb.CONTAINER_RUNNING
    both.proxy.stop(sidecar, 1)
    pod.end()


def _is_below(pid: int, cgroup: str) -> bool:
    return f"{cgroup}/" in Path(f"/proc/{pid}/cgroup").read_text()


def test_the_vm_and_the_containers_start_again_beside_each_other(both: Both, pod: Pod) -> None:
    pod.run()
    sidecar = pod.helper("sidecar", "exec /busybox httpd -f -p 127.0.0.1:7000 -h /data")
    vm = pod.vm()
    both.proxy.stop(vm, 30)
    assert pod.status(sidecar).state == pb.CONTAINER_RUNNING
    again = pod.vm()
    both.proxy.stop(sidecar, 1)
    assert pod.status(again).state == pb.CONTAINER_RUNNING
    (pod.volume / "page").write_text("a new sidecar")
    pod.helper("sidecar", "exec /busybox httpd -f -p 127.0.0.1:7000 -h /data")
    reads = "wget -q -O - http://169.254.7.1:7000/page"
    wait_until(lambda: pod.says(again, f"{reads} || true") == "a new sidecar", LIMIT, "the new sidecar serves")


def test_a_pod_whose_pause_process_dies_continues_in_the_next_sandbox_with_its_disk(both: Both, pod: Pod) -> None:
    pod.config.annotations.update({"virtshim.io/root-disk": "pod", "VirtletRootVolumeSize": "64Mi"})
    pod.run()
    vm, first = pod.vm(), pod.sandbox
    pod.says(vm, "echo kept | dd of=/dev/vda bs=512 count=1 seek=100000 conv=sync,notrunc,fsync 2>/dev/null")
    question = pb.PodSandboxStatusRequest(pod_sandbox_id=first, verbose=True)
    told = both.containerd.runtime.PodSandboxStatus(question, timeout=LIMIT)
    os.kill(json.loads(told.info["info"])["pid"], signal.SIGKILL)
    wait_until(lambda: both.proxy.pod_status(first).state == pb.SANDBOX_NOTREADY, LIMIT, "containerd has noticed")
    # kubelet ends what is left, keeps no dead container, and goes on in another sandbox
    both.proxy.stop(vm, 0)
    both.proxy.stop_pod(first)
    both.proxy.remove(vm)
    pod.config.metadata.attempt = 1
    pod.run()
    both.proxy.remove_pod(first)
    again = pod.vm()
    assert pod.says(again, "dd if=/dev/vda bs=512 count=1 skip=100000 2>/dev/null | head -c 4") == "kept"


def test_a_pod_that_containerd_ends_by_itself_loses_its_vm_too(both: Both, pod: Pod) -> None:
    pod.run()
    vm = pod.vm()
    both.containerd.stop_pod(pod.sandbox)
    both.containerd.remove_pod(pod.sandbox)
    ended = pod.wait_until_ended(vm)
    assert (ended.exit_code, ended.reason) == (137, "NetworkLost")
    both.proxy.remove(vm)
    wait_until(lambda: not _known(both), LIMIT, "virtshim has forgotten the sandbox")


def _known(both: Both) -> list[str]:
    """The sandboxes that virtshim knows, adopted ones included."""
    with connected(both.node.socket) as known:
        return [one.id for one in known.pods()]


def test_a_killed_containerd_disturbs_neither_the_vm_nor_the_containers(both: Both, pod: Pod) -> None:
    pod.run()
    vm, sidecar = pod.vm(), pod.helper("sidecar", "exec /busybox httpd -f -p 127.0.0.1:7000 -h /data")
    (pod.volume / "page").write_text("here")
    before = (passts(both), both.node.qemu_pids())
    os.kill(both.node.daemons()["containerd"], signal.SIGKILL)  # `up` starts it again
    wait_until(lambda: _runs(pod, vm) and _runs(pod, sidecar), LIMIT, "both runtimes serve again")
    assert (passts(both), both.node.qemu_pids()) == before
    assert pod.says(vm, "wget -q -O - http://169.254.7.1:7000/page") == "here"
    pod.end()


def test_a_debug_container_runs_beside_the_vm_but_cannot_see_its_processes(both: Both, pod: Pod) -> None:
    pod.run()
    vm = pod.vm()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "leave --target out"):
        pod.helper("debugger-1", "exec /busybox sleep 1000", target=vm)
    debugger = pod.helper("debugger-2", "exec /busybox sleep 1000")
    pod.says(vm, "mkdir -p /srv/www; echo a page > /srv/www/page")
    assert pod.says(debugger, "/busybox wget -q -O - http://127.0.0.1/page") == "a page"


def test_a_host_port_and_a_forwarded_port_reach_the_guest(both: Both, pod: Pod) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host_port = free.getsockname()[1]
    pod.config.port_mappings.add(container_port=80, host_port=host_port)
    pod.run()
    pod.says(pod.vm(), "mkdir -p /srv/www; echo a page > /srv/www/page")
    with urllib.request.urlopen(f"http://127.0.0.1:{host_port}/page", timeout=LIMIT) as answer:
        assert answer.read() == b"a page\n"
    request = pb.PortForwardRequest(pod_sandbox_id=pod.sandbox)
    client = spdy(both.proxy.runtime.PortForward(request, timeout=LIMIT).url, "portforward.k8s.io")
    error, data = (client.open(streamtype=kind, port="80", requestid="1") for kind in ("error", "data"))
    client.until(lambda: client.replied >= {error, data})
    client.write(data, b"GET /page HTTP/1.0\r\n\r\n")
    assert client.read_all(data).endswith(b"a page\n")
    close_all()


def test_while_virtshim_does_not_answer_containers_run_on_and_the_pod_does_not_end(both: Both, pod: Pod) -> None:
    pod.run()
    vm = pod.vm()
    sidecar = pod.helper("sidecar", "exec /busybox sleep 1000")
    with hanging(both.node.daemons()["virtshim"]):
        both.proxy.pods()  # by now the proxy knows that virtshim is down
        assert pod.says(sidecar, "echo here") == "here"
        with refused(grpc.StatusCode.UNAVAILABLE, "the runtime virtlet.cloud"):
            both.proxy.runtime.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod.sandbox), timeout=15)
        other = pod_config("another", f"{both.node.directory}/logs/another")
        with refused(grpc.StatusCode.UNAVAILABLE):
            both.proxy.run_pod(other, HANDLER)
        assert pod.status(sidecar).state == pb.CONTAINER_RUNNING
    wait_until(lambda: _answers(pod, vm), LIMIT, "virtshim is heard again, and its VM runs")


def _answers(pod: Pod, vm: str) -> bool:
    """Unlike a status, a command needs virtshim itself."""
    try:
        return pod.both.proxy.exec_sync(vm, "true", timeout=10).exit_code == 0
    except grpc.RpcError:
        return False


def _runs(pod: Pod, container: str) -> bool:
    try:
        return pod.status(container).state == pb.CONTAINER_RUNNING
    except grpc.RpcError:
        return False


def test_all_daemons_may_be_started_again_while_the_pod_runs(both: Both, pod: Pod) -> None:
    pod.run()
    vm, sidecar = pod.vm(), pod.helper("sidecar", "exec /busybox httpd -f -p 127.0.0.1:7000 -h /data")
    (pod.volume / "page").write_text("here")
    before = passts(both)
    both.node.stop()
    both.node.up("--with-containerd")
    wait_until(lambda: _runs(pod, vm) and _runs(pod, sidecar), LIMIT, "both runtimes serve again")
    assert passts(both) == before
    assert pod.says(vm, "wget -q -O - http://169.254.7.1:7000/page") == "here"


def test_a_pod_that_cannot_have_a_vm_is_refused_before_containerd_makes_it(both: Both, pod: Pod) -> None:
    pod.config.annotations["virtshim.io/ports"] = "22,22"
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "virtshim.io/ports"):
        pod.run()
    pod.config.annotations["virtshim.io/ports"] = "80"
    pod.config.linux.security_context.namespace_options.pid = pb.CONTAINER
    pod.config.linux.security_context.namespace_options.network = pb.NODE
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "network"):
        pod.run()
    pod.config.linux.security_context.namespace_options.network = pb.POD
    pod.config.linux.ClearField("overhead")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "overhead"):
        pod.run()
    assert both.containerd.pods() == []
