"""One VM shared by all tests that do not change it; its pod requests everything that they check."""

from __future__ import annotations

import contextlib
import json
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from guest import BOOT, READY, answers
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

NAME = "observed"
MEMORY = 384 << 20  # fifty commands at once: the port of each takes half a MiB
VCPUS = 2
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGxvY2FsaG9zdGxvY2FsaG9zdGxvY2FsaG9zdDEy tester"
HOSTS = "127.0.0.1\tlocalhost\n10.88.0.2\tobserved.db.ns.svc.cluster.local\tobserved\n10.1.2.3\tfoo.local\n"
# kubelet writes a container's preStop hook into its annotations in this form.
PRE_STOP = {"io.kubernetes.container.preStopHandler": json.dumps({"exec": {"command": ["echo", "drained"]}})}
_ANNOTATIONS = {
    "virtshim.io/vnc": "true",
    "VirtletVCPUCount": str(VCPUS),
    "VirtletSSHKeys": KEY,
    "VirtletCloudInitUserData": "write_files:\n- path: /tmp/hello\n  content: |\n    from user-data\n",
}


@dataclass(frozen=True)
class Vm:
    cri: PodClient
    node: Node
    pod: str
    container: str
    ready: str = ""
    """The line on its console with which its guest said that it is up."""

    @property
    def log(self) -> str:
        """The log file."""
        return self.cri.status(self.container).log_path

    @property
    def address(self) -> str:
        return self.cri.pod_ip(self.pod)

    @property
    def qemu(self) -> int:
        """The QEMU process."""
        (pid,) = self.node.qemu_pids()
        return pid

    def run(self, *words: str, timeout: int = 0) -> pb.ExecSyncResponse:
        request = pb.ExecSyncRequest(container_id=self.container, cmd=words, timeout=timeout)
        return self.cri.runtime.ExecSync(request, timeout=120 + timeout)

    def sh(self, script: str, timeout: int = 0) -> tuple[int, bytes, bytes]:
        answer = self.run("sh", "-c", script, timeout=timeout)
        return answer.exit_code, answer.stdout, answer.stderr

    def says(self, script: str) -> str:
        code, out, err = self.sh(script)
        assert code == 0, out + err
        return out.decode().strip()

    def command(self, name: str, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Runs `virtshim NAME` on the VM's node."""
        command = [*VIRTSHIM, name, "--socket", self.node.socket, *words]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)

    @contextlib.contextmanager
    def beside(self, name: str, image: str) -> Iterator[str]:
        """A container of another pod on the same node, created and not started. Its pod is removed afterwards."""
        config = pod_config(name, f"{self.node.directory}/logs/{name}")
        pod = self.cri.run_pod(config)
        try:
            yield self.cri.create(pod, container_config(self.cri.pull(image), memory=64 << 20), config)
        finally:
            self.cri.remove_pod(pod)

    def is_well(self) -> bool:
        """Whether the VM is usable: a failed test may have left it in any state."""
        try:
            wait_until(lambda: answers(self.cri), 60, "the CRI socket serves")
            return self.run("true", timeout=60).exit_code == 0
        except (grpc.RpcError, TimeoutError):
            return False


class RunningVm:
    """The shared VM, which exists from the first test that uses it until the first test that wants the node for itself."""

    def __init__(self, node: Node, image_url: str) -> None:
        self._node = node
        self._image = f"{image_url}/guest.qcow2"
        self._vm: Vm | None = None

    def get(self) -> Vm:
        """The VM, or a new one if it is unusable."""
        if self._vm is not None and not self._vm.is_well():
            self.end()
        if self._vm is None:
            self._vm = self._boot()
        return self._vm

    def end(self) -> None:
        if self._vm is None:
            return
        vm, self._vm = self._vm, None
        with vm.cri:
            wait_until(lambda: answers(vm.cri), 60, "the CRI socket serves")
            vm.cri.remove_pod(vm.pod)

    def _boot(self) -> Vm:
        cri = PodClient(self._node.socket)
        # A directory of its own: an earlier one's log would say "ready" for it.
        logs = f"{self._node.directory}/logs/{NAME}-{uuid.uuid4().hex[:8]}"
        config = pod_config(NAME, logs, annotations=_ANNOTATIONS)
        wanted = container_config(cri.pull(self._image), memory=MEMORY)
        wanted.stdin = True
        wanted.working_dir = "/srv"
        wanted.annotations.update(PRE_STOP)
        wanted.envs.add(key="GREETING", value=b"hello there")
        wanted.envs.add(key="odd.name", value=b"too")
        wanted.mounts.add(container_path="/etc/hosts", host_path=str(self._hosts(config.metadata.uid)))
        pod = cri.run_pod(config)
        try:
            container = cri.create(pod, wanted, config)
            cri.start(container)
            ready = wait_for_log(cri.status(container).log_path, READY, BOOT)
        except BaseException:
            with cri:
                cri.remove_pod(pod)
            raise
        return Vm(cri, self._node, pod, container, ready)

    def _hosts(self, uid: str) -> Path:
        """The pod's /etc/hosts, at kubelet's path."""
        file = Path(f"{self._node.directory}/kubelet/pods/{uid}/etc-hosts")
        file.parent.mkdir(parents=True)
        file.write_text(HOSTS)
        return file
