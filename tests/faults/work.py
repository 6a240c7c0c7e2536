"""One pod, driven through its life as kubelet does."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from adopted_pods import AdoptedPod, others_pod
from fakes.kubelet_writer import WrittenVolume
from guest import BOOT
from mortal_node import MortalNode
from node import VIRTSHIM
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.layout import admin_socket

_numbers = itertools.count(1)


@dataclass
class Work:
    """One pod and the ids that it has so far; `image` is the null guest, unless the pod needs a guest agent."""

    node: MortalNode
    cri: PodClient
    image: str
    # What the test itself has made goes with it.
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pod: str = ""
    container: str = ""
    attempt: int = 0
    config: pb.PodSandboxConfig = field(init=False)
    texts: WrittenVolume | None = None
    # If another runtime made its sandbox.
    others: AdoptedPod | None = None

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

    def run_warm(self) -> None:
        """A pod whose guest may come from a template, and which therefore has an agent."""
        self.image = self.node.guest
        self.config.annotations["virtshim.io/warm-start"] = "true"
        self.run()

    @property
    def is_warm(self) -> bool:
        return "virtshim.io/warm-start" in self.config.annotations

    def forget_templates(self) -> None:
        """Templates are gone when virtshim ends, and what is known of those that could not be made."""
        known = self._templates()
        if known["kept"] or known["making"] or known["unfit"]:
            self.node.restart("virtshim")

    def make_template(self) -> None:
        """Afterwards the node has a template of the pod's machine."""
        if self._templates()["kept"]:
            return
        self.forget_templates()
        self.create()
        self.start_first()
        assert self._templates()["kept"], self._templates()
        self.remove()
        self.attempt += 1

    def start_first(self) -> None:
        """Starts a container of whose machine there is no template: its guest boots, and the template is made meanwhile."""
        self.start()
        wait_until(lambda: not self._templates()["making"], BOOT, "no template is being made")

    def _templates(self) -> dict[str, Any]:
        request = pb.StatusRequest(verbose=True)
        answer = self.cri.runtime.Status(request, timeout=20)
        return dict(json.loads(answer.info["config"])["templates"])

    def others_pod(self) -> None:
        """Another runtime makes the sandbox, with its network namespace."""
        self.others = self.cleanup.enter_context(others_pod(admin_socket(self.node.settings.layout()), self.config))
        self.pod = self.others.id

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
        if self.others is not None:
            self.others.adopt()
        config = container_config(self.image, (128 if self.is_warm else 64) << 20, attempt=self.attempt)
        if self.is_warm:
            config.mounts.add(container_path="/etc/texts", host_path=self._texts(), readonly=True)
        elif not self.is_lasting:
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
        if self.others is not None:
            self.cri.remove_pod(self.pod)
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

    def is_one_of_its_own(self) -> bool:
        """Whether the guest is up and has the pod's name, whether it came from a template or booted."""
        if self.cri.status(self.container).state != pb.CONTAINER_RUNNING:
            return False
        try:
            said = self.cri.exec_sync(self.container, "hostname").stdout.decode()
        except grpc.RpcError:
            return False
        return said.strip() == self.config.metadata.name

    def is_started_first(self) -> bool:
        """Whether nothing is left of a template that was being made."""
        return self.is_one_of_its_own() and self.is_running() and not self.node.half_made_templates()

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
        if self.others is not None:
            is_stopped = self.others.phase() == "not-ready" and not self.node.passt_pids()
        else:
            is_stopped = self.cri.pod_status(self.pod).state == pb.SANDBOX_NOTREADY
        return is_stopped and len(self.node.qemu_pids()) == 1

    def is_pod_removed(self) -> bool:
        if self.others is not None:
            assert os.path.exists(self.others.namespace.path), "the other runtime's namespace was removed"
            return not self.others.phase()
        return not [pod for pod in self.cri.pods() if pod.id == self.pod]


@contextlib.contextmanager
def working(node: MortalNode, *prepare: Callable[[Work], None]) -> Iterator[Work]:
    """A pod after those calls; it is removed afterwards, and nothing is left of it."""
    null = f"{node.image_url}/null.qcow2"
    with node.client() as cri, contextlib.ExitStack() as cleanup:
        forget_image(cri, null)
        before = node.left()
        work = Work(node, cri, null, cleanup)
        try:
            for step in prepare:
                step(work)
            yield work
        finally:
            for pod in cri.pods():
                if node.bystander is None or pod.id != node.bystander.pod:
                    cri.remove_pod(pod.id)
            if work.others is not None:
                cri.remove_pod(work.pod)
                cleanup.close()
            if work.is_lasting:  # also after a failure: the next test counts saved states
                work.remove_vm()
            work.remove_state()
        forget_image(cri, null)
        if work.is_warm:
            wait_until(lambda: not node.half_made_templates(), BOOT, "no template is being made")
        try:
            wait_until(lambda: node.left() <= before, 15, "nothing is left")
        except TimeoutError as exc:
            raise AssertionError(f"left behind: {sorted(node.left() - before)}") from exc


def forget_image(cri: PodClient, image: str) -> None:
    cri.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=image)), timeout=20)
