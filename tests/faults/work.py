"""One pod, driven through its life as kubelet does."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fakes.kubelet_writer import WrittenVolume
from mortal_node import MortalNode
from node import VIRTSHIM
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

_numbers = itertools.count(1)


@dataclass
class Work:
    """One pod and the ids that it has so far; `image` is the null guest."""

    node: MortalNode
    cri: PodClient
    image: str
    pod: str = ""
    container: str = ""
    attempt: int = 0
    config: pb.PodSandboxConfig = field(init=False)
    texts: WrittenVolume | None = None

    def __post_init__(self) -> None:
        name = f"pod-{next(_numbers)}"
        self.config = pod_config(name, f"{self.node.settings.paths.state_dir}/../logs/{name}")

    # Each call is repeated as by kubelet: it checks the state first, and uses the next attempt for a failed start.

    def run(self) -> None:
        if any(pod.metadata == self.config.metadata and pod.state == pb.SANDBOX_NOTREADY for pod in self.cri.pods()):
            self.config.metadata.attempt += 1
        self.pod = self.cri.run_pod(self.config)

    def run_lasting(self) -> None:
        """A pod whose VM outlives it."""
        self.config.annotations.update({"virtshim.io/vm": "by-pod-name", "virtshim.io/on-stop": "save"})
        self.run()

    def run_with_state_volume(self) -> None:
        """A pod whose VM may continue on another node."""
        self.node.state_volume.mkdir()
        self.config.annotations["virtshim.io/state-volume"] = "/state"
        self.run_lasting()

    @property
    def has_state_volume(self) -> bool:
        return "virtshim.io/state-volume" in self.config.annotations

    def lose_vm(self) -> None:
        """This node is now one that has never had the VM."""
        self.remove_pod()
        self.remove_vm()
        self.config.metadata.uid += "-elsewhere"
        self.config.log_directory += "-elsewhere"
        self.run()

    @property
    def is_lasting(self) -> bool:
        return "virtshim.io/vm" in self.config.annotations

    def pull(self) -> None:
        self.cri.pull(self.image)

    def remove_image(self) -> None:
        forget_image(self.cri, self.image)

    def create(self) -> None:
        config = container_config(self.image, 64 << 20, attempt=self.attempt)
        if not self.is_lasting:
            config.mounts.add(container_path="/data", host_path=self.node.volume)
            config.mounts.add(container_path="/etc/texts", host_path=self._texts(), readonly=True)
        if self.has_state_volume:
            config.mounts.add(container_path="/state", host_path=str(self.node.state_volume))
        self.container = self.cri.create(self.pod, config, self.config)
        self.node.containers.add(self.container)

    def create_on_volume(self) -> None:
        """Creates the container with the node's block volume as root disk."""
        config = container_config(self.image, 64 << 20, attempt=self.attempt)
        config.devices.add(host_path=self.node.root_volume, container_path="/", permissions="mrw")
        self.container = self.cri.create(self.pod, config, self.config)

    def blank_volume(self) -> None:
        with open(self.node.root_volume, "r+b") as volume:
            volume.write(bytes(1 << 20))  # virtshim reads only this much

    def _texts(self) -> str:
        """A configMap of the pod, as kubelet writes it."""
        if self.texts is None:
            self.texts = WrittenVolume(Path(self.node.volume), self.config.metadata.uid, "configmap", "texts")
            self.texts.write({"text": b"hello"})
        return str(self.texts.path)

    def start(self) -> None:
        if self.cri.status(self.container).state == pb.CONTAINER_EXITED:
            self.attempt += 1
            self.create()
        if self.cri.status(self.container).state == pb.CONTAINER_CREATED:
            self.cri.start(self.container)

    def stop(self) -> None:
        self.cri.stop(self.container, 0)

    def remove(self) -> None:
        self.cri.remove(self.container)

    def boot(self) -> None:
        """Waits until the guest counts as booted. Nothing is saved before."""
        wait_for_log(self.cri.status(self.container).log_path, "null guest", 60)

    def save(self) -> None:
        self.cri.stop(self.container, 30)

    def next_pod(self) -> None:
        """The pod's successor: the same name, another UID."""
        self.remove_pod()
        self.config.metadata.uid += "-next"
        self.config.log_directory += "-next"
        self.run()

    def stop_pod(self) -> None:
        self.cri.stop_pod(self.pod)

    def remove_pod(self) -> None:
        """Removes every attempt of the pod, as kubelet's garbage collection does."""
        for pod in self.cri.pods():
            if pod.metadata.uid == self.config.metadata.uid:
                self.cri.remove_pod(pod.id)

    # The state after a successful call.

    def is_ready(self) -> bool:
        status = self.cri.pod_status(self.pod)
        return status.state == pb.SANDBOX_READY and bool(status.network.ip)

    def is_pulled(self) -> bool:
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=self.image))
        return self.cri.images.ImageStatus(request, timeout=10).HasField("image")

    def is_image_removed(self) -> bool:
        """Whether the image and its disk are gone; the bystander's stays."""
        return not self.is_pulled() and len(self.node.image_files()) == 1

    def is_created(self) -> bool:
        return self.cri.status(self.container).state == pb.CONTAINER_CREATED

    def is_on_volume(self) -> bool:
        """Whether the volume has its header and then the image."""
        with open(self.node.root_volume, "rb") as volume:
            head = volume.read(512 + 512)
        return self.is_created() and head.startswith(b"\x26\x3d\xbe\x52") and head.endswith(b"\x55\xaa")

    def is_running(self) -> bool:
        return self.cri.status(self.container).state == pb.CONTAINER_RUNNING and len(self.node.qemu_pids()) == 2

    def is_stopped(self) -> bool:
        return self.cri.status(self.container).state == pb.CONTAINER_EXITED and len(self.node.qemu_pids()) == 1

    def is_saved(self) -> bool:
        return self.is_stopped() and self.cri.status(self.container).reason == "Saved" and len(self._memory()) == 1

    def is_published(self) -> bool:
        """The volume has all of the VM, and nothing else."""
        found = {path.name for path in self.node.state_volume.glob("virtshim-*/*/*")}
        return self.is_pod_stopped() and {"memory.save", "root.qcow2"} <= found and self._is_tidy()

    def is_fetched(self) -> bool:
        return self.is_created() and len(self._memory()) == 1 and self._is_tidy()

    def is_restored_from_volume(self) -> bool:
        return self.is_restored() and not list(self.node.state_volume.rglob("memory.save")) and self._is_tidy()

    def _is_tidy(self) -> bool:
        vms = Path(f"{self.node.settings.paths.state_dir}/vms")
        return not [*vms.rglob("*.half"), *self.node.state_volume.rglob("*.half")]

    def is_restored(self) -> bool:
        """The null guest shows a line when it boots."""
        booted = any("null guest" in line for line in log_lines(self.cri.status(self.container).log_path))
        return self.is_running() and not booted and not self._memory()

    def is_stopped_or_saved(self) -> bool:
        """The status says whether there is a saved state."""
        is_saved = self.cri.status(self.container).reason == "Saved"
        return self.is_stopped() and [path.name for path in self._memory()] == ["memory.save"] * is_saved

    def is_running_without_state(self) -> bool:
        return self.is_running() and not self._memory()

    def _memory(self) -> list[Path]:
        return list(Path(f"{self.node.settings.paths.state_dir}/vms").glob("*/memory.*"))

    def remove_vm(self) -> None:
        """As an operator does, once its pods are gone."""
        named = f"{self.config.metadata.namespace}/{self.config.metadata.name}"
        command = [*VIRTSHIM, "vms", "rm", "--socket", self.node.settings.cri_socket, named]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def remove_state(self) -> None:
        """As an operator deletes the claim."""
        shutil.rmtree(self.node.state_volume, ignore_errors=True)

    def is_removed(self) -> bool:
        return not [c for c in self.cri.containers() if c.id == self.container]

    def is_pod_stopped(self) -> bool:
        return self.cri.pod_status(self.pod).state == pb.SANDBOX_NOTREADY and len(self.node.qemu_pids()) == 1

    def is_pod_removed(self) -> bool:
        return not [pod for pod in self.cri.pods() if pod.id == self.pod]


@contextlib.contextmanager
def working(node: MortalNode, *prepare: Callable[[Work], None]) -> Iterator[Work]:
    """A pod after those calls; it is removed afterwards, and nothing is left of it."""
    with node.client() as cri:
        forget_image(cri, f"{node.image_url}/null.qcow2")
        before = node.left()
        work = Work(node, cri, f"{node.image_url}/null.qcow2")
        try:
            for step in prepare:
                step(work)
            yield work
        finally:
            for pod in cri.pods():
                if node.bystander is None or pod.id != node.bystander.pod:
                    cri.remove_pod(pod.id)
            if work.is_lasting:  # also after a failure: the next test counts saved states
                work.remove_vm()
            work.remove_state()
        forget_image(cri, work.image)
        try:
            wait_until(lambda: node.left() <= before, 15, "nothing is left")
        except TimeoutError as exc:
            raise AssertionError(f"left behind: {sorted(node.left() - before)}") from exc


def forget_image(cri: PodClient, image: str) -> None:
    cri.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=image)), timeout=20)
