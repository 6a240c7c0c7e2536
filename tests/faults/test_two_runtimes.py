"""Behind `virtshim proxy`, containers of the distribution's containerd and runc run beside VMs, while each of the three
programs is killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from bench.containerd import IMAGE, Containerd
from fakes.processes import hang
from fakes.spdy import close_all, spdy
from guest import BOOT, READY, answers, ping
from imageserver import serve_directory
from leaks import Snapshot
from node import Node, free_cidr
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.proxy, pytest.mark.faults, pytest.mark.e2e]

LIMIT = 60.0


@dataclass
class Both:
    """The node, and a pod of each kind on it."""

    directory: str
    node: Node
    containerd: Containerd
    image_url: str
    cri: PodClient
    proxy: subprocess.Popen[bytes] | None = None
    container: str = ""
    container_pod: str = ""
    vm: str = ""
    vm_pod: str = ""
    vm_log: str = ""

    @property
    def socket(self) -> str:
        return f"{self.node.directory}/run/proxy.sock"

    def start_proxy(self) -> None:
        with open(f"{self.directory}/proxy.log", "ab") as log:
            self.proxy = subprocess.Popen(
                [sys.executable, "-m", "virtshim", "proxy", "--dir", self.node.directory], stdout=log, stderr=log
            )
        self.wait_until_served()

    def wait_until_served(self) -> None:
        """Waits until the proxy and both runtimes serve."""

        def both() -> bool:
            try:
                self.cri.pods()
                status = self.cri.runtime.Status(pb.StatusRequest(), timeout=LIMIT).status
            except grpc.RpcError:
                return False
            return all(one.status for one in status.conditions)

        wait_until(lambda: answers(self.cri) and both(), LIMIT, "both runtimes are listed")

    def end_proxy(self, how: int = signal.SIGTERM) -> None:
        assert self.proxy is not None
        self.proxy.send_signal(how)
        self.proxy.wait(LIMIT)

    def run(self, name: str, handler: str, image: str, *command: str) -> tuple[str, str]:
        """Creates a pod and starts its container."""
        config = pod_config(name, f"{self.directory}/logs/{name}")
        pod = self.cri.run_pod(config, handler)
        wanted = container_config(self.pull(image, config), 128 << 20, name=name)
        wanted.command.extend(command)
        container = self.cri.create(pod, wanted, config)
        self.cri.start(container)
        return pod, container

    def pull(self, image: str, config: pb.PodSandboxConfig) -> str:
        """Pulls as kubelet does: only a missing image, for its pod, without repeating the handler."""
        found = self.cri.images.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=image)), timeout=LIMIT)
        if found.image.id:
            return found.image.id
        request = pb.PullImageRequest(image=pb.ImageSpec(image=image), sandbox_config=config)
        return self.cri.images.PullImage(request, timeout=LIMIT).image_ref

    def address(self, pod: str) -> str:
        return self.cri.pod_ip(pod)

    def check_pair(self) -> None:
        """Checks that both pods are unchanged by every path to them."""
        assert {self.container_pod, self.vm_pod} <= {pod.id for pod in self.cri.pods()}
        for container in (self.container, self.vm):
            status = self.cri.status(container)
            assert (status.state, status.metadata.attempt) == (pb.CONTAINER_RUNNING, 0)
        assert ping(self.address(self.vm_pod))
        assert ping(self.address(self.container_pod))
        assert self.cri.exec_sync(self.container, "/busybox", "echo", "here").stdout == b"here\n"


@pytest.fixture(scope="module")
def both(guest_image: Path, null_image: Path) -> Iterator[Both]:
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="virtshim-two-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    proxy = f'[proxy]\nanswer_timeout = 4\n[proxy.primary]\nsocket = "{directory}/c/containerd.sock"\n'
    node = Node(f"{directory}/n", pod_cidr=free_cidr(), config=proxy)
    try:
        node.up()
        with (
            serve_directory(guest_image.parent) as url,
            Containerd(directory, f"{node.directory}/cni/net.d") as containerd,
            PodClient(f"{node.directory}/run/proxy.sock") as cri,
        ):
            made = Both(directory, node, containerd, url.removeprefix("http://"), cri)
            made.start_proxy()
            try:
                _start_pair(made)
                yield made
            finally:
                made.wait_until_served()
                for pod in made.cri.pods():
                    made.cri.stop_pod(pod.id)
                    made.cri.remove_pod(pod.id)
                made.end_proxy()
    finally:
        node.down()
        left = before.settled(seconds=10)
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
    assert not left, "left behind: " + "; ".join(left)


def _start_pair(both: Both) -> None:
    script = "echo a container speaks; exec /busybox sleep 100000"
    both.container_pod, both.container = both.run("container", "", IMAGE, "/busybox", "sh", "-c", script)
    both.vm_pod, both.vm = both.run("vm", "virtshim", f"{both.image_url}/guest.qcow2")
    both.vm_log = both.cri.status(both.vm).log_path
    wait_for_log(both.vm_log, READY, BOOT)


def test_a_container_and_a_vm_run_side_by_side_on_one_network(both: Both) -> None:
    both.check_pair()
    addresses = {both.address(both.container_pod), both.address(both.vm_pod)}
    assert len(addresses) == 2
    assert all(one.startswith(both.node.pod_cidr.removesuffix("0.0/16")) for one in addresses)
    leases = {path.name for path in Path(both.node.directory, "cni/leases").rglob("10.*")}
    assert leases == addresses
    to_vm = both.cri.exec_sync(both.container, "/busybox", "ping", "-c", "1", "-w", "10", both.address(both.vm_pod))
    assert to_vm.exit_code == 0, to_vm
    to_container = both.cri.exec_sync(both.vm, "ping", "-c", "1", "-w", "10", both.address(both.container_pod))
    assert to_container.exit_code == 0, to_container


def test_a_prefix_of_an_id_is_enough_on_either_runtime(both: Both) -> None:
    for pod, container in ((both.container_pod, both.container), (both.vm_pod, both.vm)):
        assert both.cri.pod_status(pod[:13]).id == pod
        assert both.cri.status(container[:13]).id == container


def test_logs_of_both_runtimes_are_where_kubelet_looks_for_them(both: Both) -> None:
    assert log_lines(both.cri.status(both.container).log_path) == ["a container speaks"]
    assert any(READY in line for line in log_lines(both.vm_log))


@pytest.mark.parametrize(("kind", "shell"), [("container", ["/busybox", "sh"]), ("vm", ["sh"])])
def test_exec_streams_on_either_runtime(both: Both, kind: str, shell: list[str]) -> None:
    """Streams over SPDY as kubelet and crictl do, to the URL of the runtime's own streaming server."""
    command = [*shell, "-c", "read line; echo got $line; exit 7"]
    request = pb.ExecRequest(container_id=getattr(both, kind), cmd=command, stdin=True, stdout=True)
    client = spdy(both.cri.runtime.Exec(request, timeout=LIMIT).url)
    try:
        error, stdin, stdout = (client.open(streamtype=name) for name in ("error", "stdin", "stdout"))
        client.write(stdin, b"what was typed\n", fin=True)
        assert client.read_all(stdout) == b"got what was typed\n"
        client.until(lambda: b'"7"' in client.received[error])
    finally:
        close_all()


def test_a_node_of_both_runtimes_is_ready_and_lists_its_handlers(both: Both) -> None:
    status = both.cri.runtime.Status(pb.StatusRequest(verbose=True), timeout=LIMIT)
    assert {one.type: one.status for one in status.status.conditions} == {
        "RuntimeReady": True, "NetworkReady": True,
        "virtlet.cloud/RuntimeReady": True, "virtlet.cloud/NetworkReady": True,
    }  # fmt: skip
    assert "virtshim" in {one.name for one in status.runtime_handlers}
    mounts = both.cri.images.ImageFsInfo(pb.ImageFsInfoRequest(), timeout=LIMIT).image_filesystems
    assert len(mounts) == 2
    assert len(both.cri.runtime.ListContainerStats(pb.ListContainerStatsRequest(), timeout=LIMIT).stats) == 2


def test_pods_of_either_runtime_end_and_their_images_are_collected(both: Both) -> None:
    made = {
        kind: both.run(f"short-{kind}", handler, image)
        for kind, handler, image in (("c", "", IMAGE), ("v", "virtshim", f"{both.image_url}/null.qcow2"))
    }
    addresses = {both.address(pod) for pod, _ in made.values()}
    for pod, container in made.values():
        both.cri.stop(container, 0)
        assert both.cri.status(container).state == pb.CONTAINER_EXITED
        both.cri.stop_pod(pod)
        both.cri.remove_pod(pod)
        with pytest.raises(grpc.RpcError) as error:
            both.cri.pod_status(pod)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    leases = {path.name for path in Path(both.node.directory, "cni/leases").rglob("10.*")}
    assert leases & addresses == set()
    both.check_pair()  # neither clean-up has freed the other's leases
    assert {both.address(both.container_pod), both.address(both.vm_pod)} <= leases
    listed = both.cri.images.ListImages(pb.ListImagesRequest(), timeout=LIMIT).images
    (unused,) = [one.id for one in listed if any("null.qcow2" in tag for tag in one.repo_tags)]
    assert any(IMAGE in tag for one in listed for tag in one.repo_tags)
    both.cri.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=unused)), timeout=LIMIT)
    left = both.cri.images.ListImages(pb.ListImagesRequest(), timeout=LIMIT).images
    assert {one.id for one in left} == {one.id for one in listed} - {unused}


def test_vms_and_containers_keep_running_while_containerd_is_dead(both: Both) -> None:
    both.containerd.signal(signal.SIGKILL)
    assert both.cri.status(both.vm).state == pb.CONTAINER_RUNNING
    for call in (both.cri.pods, lambda: both.cri.status(both.container)):
        with pytest.raises(grpc.RpcError, match=r"the runtime containerd at .* is not available") as error:
            call()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    both.containerd.start()
    both.wait_until_served()
    both.check_pair()


def test_containers_keep_running_while_virtshim_is_stopped_and_then_killed(both: Both) -> None:
    both.check_pair()  # lists, as kubelet does each second
    before = {one.id: one.state for one in both.cri.containers()}
    virtshim = both.node.daemons()["virtshim"]
    hang(virtshim)
    status = both.cri.runtime.Status(pb.StatusRequest(), timeout=LIMIT).status
    assert {one.type: one.status for one in status.conditions} == {
        "RuntimeReady": True, "NetworkReady": True, "virtlet.cloud/RuntimeReady": False,
    }  # fmt: skip
    assert both.cri.exec_sync(both.container, "/busybox", "true").exit_code == 0
    assert {one.id: one.state for one in both.cri.containers()} == before
    assert before[both.vm] == pb.CONTAINER_RUNNING
    os.kill(virtshim, signal.SIGKILL)  # `up` starts it again
    both.wait_until_served()
    both.check_pair()


def test_a_killed_proxy_affects_no_pod(both: Both) -> None:
    both.end_proxy(signal.SIGKILL)
    both.start_proxy()
    both.check_pair()
