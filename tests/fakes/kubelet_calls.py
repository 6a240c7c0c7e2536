"""kubelet's calls for a pod's sandbox, images and containers, in its order, to the CRI socket of any runtime.

The rules are those of kubelet 1.30 to 1.36: `PreInitRuntimeService` (kubelet.go) and `containerManager.Start` (cm) for a kubelet
that starts; `SyncPod` and `startContainer` (kuberuntime) and `EnsureImageExists` (images/image_manager.go) for pods;
config/config.go for what kubelet writes into a pod's annotations; `detectImages` (images/image_gc_manager.go).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from criproto.runtime_v1 import api_pb2 as pb

_SEEN = "kubernetes.io/config.seen"
_ids = itertools.count(1)
_SECONDS = 60.0


class Kubelet:
    """`runtime`, `image`: stubs of the CRI's two services."""

    def __init__(self, runtime: Any, image: Any) -> None:
        self.runtime = runtime
        self.image = image

    def start(self) -> set[str]:
        """Starts kubelet until its device manager knows what runs: the ids of running containers. An error ends kubelet,
        and its service manager restarts it."""
        self.runtime.Version(pb.VersionRequest(), timeout=_SECONDS)
        self.image.ImageFsInfo(pb.ImageFsInfoRequest(), timeout=_SECONDS)
        try:
            self.runtime.RuntimeConfig(pb.RuntimeConfigRequest(), timeout=_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # as containerd 1.6
                raise
        self.runtime.Version(pb.VersionRequest(version="0.1.0"), timeout=_SECONDS)
        self.runtime.Status(pb.StatusRequest(), timeout=_SECONDS)
        pods = {one.id for one in self.runtime.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=_SECONDS).items}
        listed = self.runtime.ListContainers(pb.ListContainersRequest(), timeout=_SECONDS).containers
        return {one.id for one in listed if one.state == pb.CONTAINER_RUNNING and one.pod_sandbox_id in pods}

    def images_in_use(self) -> set[str]:
        """The ids of images that garbage collection keeps. Since 1.35 it asks for each container's mounts; an error ends
        the collection on the whole node."""
        images = {one.id for one in self.image.ListImages(pb.ListImagesRequest(), timeout=_SECONDS).images}
        self.runtime.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=_SECONDS)
        request = pb.ListContainersRequest(filter=pb.ContainerFilter())
        used = set()
        for container in self.runtime.ListContainers(request, timeout=_SECONDS).containers:
            used.add(container.image_id or container.image_ref)
            question = pb.ContainerStatusRequest(container_id=container.id)
            status = self.runtime.ContainerStatus(question, timeout=_SECONDS).status
            used |= {one.image.image for one in status.mounts if one.image.image in images}
        return used


@dataclass
class KubeletPod:
    """A pod of the API server, or with `source="file"` a static one. `config` is the sandbox's config."""

    kubelet: Kubelet
    name: str
    handler: str = ""
    annotations: dict[str, str] = field(default_factory=dict)
    source: str = "api"
    log_directory: str = "/var/log/pods"
    labels: dict[str, str] = field(default_factory=dict)
    sandbox: str = ""
    attempt: int = 0

    def __post_init__(self) -> None:
        self.uid = f"uid-of-{self.name}"
        # A static pod's uid is the hash of its file.
        self.annotations["kubernetes.io/config.source"] = self.source
        if self.source != "api":
            self.annotations["kubernetes.io/config.hash"] = self.uid
        self.see()

    def see(self) -> None:
        """Sees the pod as a restarted kubelet does."""
        self.annotations[_SEEN] = f"2026-11-22T19:41:16.{next(_ids):09}Z"

    @property
    def config(self) -> pb.PodSandboxConfig:
        return pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=self.name, namespace="default", uid=self.uid, attempt=self.attempt),
            hostname=self.name,
            log_directory=self.log_directory,
            labels={
                **self.labels, "io.kubernetes.pod.name": self.name, "io.kubernetes.pod.namespace": "default",
                "io.kubernetes.pod.uid": self.uid,
            },
            annotations=self.annotations,
        )  # fmt: skip

    def run(self) -> str:
        """Starts the sandbox; kubelet asks for its address at once."""
        request = pb.RunPodSandboxRequest(config=self.config, runtime_handler=self.handler)
        self.sandbox = self.kubelet.runtime.RunPodSandbox(request, timeout=_SECONDS).pod_sandbox_id
        status = pb.PodSandboxStatusRequest(pod_sandbox_id=self.sandbox)
        self.kubelet.runtime.PodSandboxStatus(status, timeout=_SECONDS)
        return self.sandbox

    def ensure_image(self, image: str, *, always: bool = False) -> str:
        """Pulls the image if needed; returns its id. `always`: imagePullPolicy Always, otherwise IfNotPresent. kubelet
        queries a pulled image once more for its size."""
        asked = image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"
        spec = pb.ImageSpec(image=asked, annotations=self.annotations)
        if not always:
            found = self.kubelet.image.ImageStatus(pb.ImageStatusRequest(image=spec), timeout=_SECONDS)
            if found.image.id:
                return str(found.image.id)
        pull = pb.PullImageRequest(image=spec, sandbox_config=self.config)
        pulled = self.kubelet.image.PullImage(pull, timeout=_SECONDS).image_ref
        self.kubelet.image.ImageStatus(pb.ImageStatusRequest(image=spec), timeout=_SECONDS)
        return str(pulled)

    def start(
        self, name: str, image: str, *, command: Sequence[str] = (), target: str = "", volumes: Sequence[str] = ()
    ) -> str:
        """Starts a container; returns its id. `target`: the container whose processes an ephemeral container sees.
        `volumes`: images, which kubelet ensures before any container."""
        mounts = [
            pb.Mount(
                container_path=f"/volume-{number}",
                readonly=True,
                image=pb.ImageSpec(image=self.ensure_image(one), user_specified_image=one),
            )
            for number, one in enumerate(volumes)
        ]
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image=self.ensure_image(image), user_specified_image=image),
            command=command,
            mounts=mounts,
            log_path=f"{name}/0.log",
            labels={"io.kubernetes.container.name": name, "io.kubernetes.pod.uid": self.uid},
        )
        if target:
            config.linux.security_context.namespace_options.pid = pb.TARGET
            config.linux.security_context.namespace_options.target_id = target
        request = pb.CreateContainerRequest(pod_sandbox_id=self.sandbox, config=config, sandbox_config=self.config)
        made = self.kubelet.runtime.CreateContainer(request, timeout=_SECONDS).container_id
        self.kubelet.runtime.StartContainer(pb.StartContainerRequest(container_id=made), timeout=_SECONDS)
        return str(made)
