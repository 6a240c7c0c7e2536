"""kubelet's requests for the pod of a manifest, with its mounts, devices and variables.

The rules are those of its `kubelet_pods.go` and `kuberuntime_container.go`. A CRI proxy has removed `virtlet.cloud/`
from the image names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fakes.kubelet_requests import Asked, container_linux, sandbox_linux

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.text import parse_bytes

PODS: Final = "/var/lib/kubelet/pods"
_RUNTIME: Final = "virtlet.cloud/"


@dataclass(frozen=True)
class PodOfManifest:
    """`flex_options`: a flexVolume's directory -> its options: kubelet calls its driver for what a container mounts."""

    config: pb.PodSandboxConfig
    container: pb.ContainerConfig
    flex_options: Mapping[str, Mapping[str, str]]


def pod_of(documents: Sequence[Any], log_directory: str) -> PodOfManifest:
    """The pod of a manifest: a Pod, or the first one of a Deployment or StatefulSet, with one container."""
    objects = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    (owner,) = [one for (kind, _), one in objects.items() if kind in ("Pod", "Deployment", "StatefulSet")]
    name = (
        owner["metadata"]["name"] + {"Pod": "", "Deployment": "-5d59d67564-x2vqk", "StatefulSet": "-0"}[owner["kind"]]
    )
    pod = owner if owner["kind"] == "Pod" else owner["spec"]["template"]
    annotations, spec = pod["metadata"]["annotations"], pod["spec"]
    uid = f"uid-of-{name}"
    (asked,) = spec["containers"]
    memory = parse_bytes(asked.get("resources", {}).get("limits", {}).get("memory", "0"))
    resources = Asked(memory=memory, memory_limit=memory)
    config = pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=name, namespace="default", uid=uid),
        hostname=name,
        log_directory=f"{log_directory}/default_{name}_{uid}",
        annotations={
            **annotations,
            "kubernetes.io/config.seen": "2026-11-23T00:00:00Z",
            "kubernetes.io/config.source": "api",
        },
        dns_config=pb.DNSConfig(servers=["10.96.0.10"], searches=["default.svc.cluster.local"], options=["ndots:5"]),
        linux=sandbox_linux(resources),
    )
    image = asked["image"].removeprefix(_RUNTIME)
    container = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name=asked["name"]),
        image=pb.ImageSpec(image=image, user_specified_image=image),
        log_path=f"{asked['name']}/0.log",
        stdin=asked.get("stdin", False),
        tty=asked.get("tty", False),
        envs=[
            pb.KeyValue(key="KUBERNETES_SERVICE_HOST", value=b"10.96.0.1"),
            pb.KeyValue(key="KUBERNETES_SERVICE_PORT", value=b"443"),
        ],
        annotations={"io.kubernetes.container.terminationMessagePath": "/dev/termination-log"},
        linux=pb.LinuxContainerConfig(resources=container_linux(resources)),
    )
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    flex_options = {}
    for mount in asked.get("volumeMounts", ()):
        volume = volumes[mount["name"]]
        host = _directory(uid, volume, objects)
        container.mounts.add(container_path=mount["mountPath"], host_path=host)
        if "flexVolume" in volume:
            flex_options[host] = volume["flexVolume"]["options"]
    for number, device in enumerate(asked.get("volumeDevices", ()), start=7):
        container.devices.add(
            container_path=device["devicePath"], host_path=f"/dev/block/{number}:0", permissions="mrw"
        )
    _what_every_pod_has(container, uid)
    return PodOfManifest(config, container, flex_options)


def _directory(uid: str, volume: Mapping[str, Any], objects: Mapping[tuple[str, str], Any]) -> str:
    """The directory at which kubelet has mounted it."""
    volumes = f"{PODS}/{uid}/volumes"
    if "flexVolume" in volume:
        return f"{volumes}/{volume['flexVolume']['driver'].replace('/', '~')}/{volume['name']}"
    claim = volume["persistentVolumeClaim"]["claimName"]
    (pv,) = [one for (kind, _), one in objects.items() if kind == "PersistentVolume" and _claim(one) == claim]
    if "hostPath" in pv["spec"]:
        path: str = pv["spec"]["hostPath"]["path"]
        return path
    assert "nfs" in pv["spec"], "another kind of volume"
    return f"{volumes}/kubernetes.io~nfs/{pv['metadata']['name']}"


def _claim(volume: Mapping[str, Any]) -> Any:
    return volume["spec"]["claimRef"]["name"]


def _what_every_pod_has(container: pb.ContainerConfig, uid: str) -> None:
    name = container.metadata.name
    container.mounts.add(
        container_path="/var/run/secrets/kubernetes.io/serviceaccount",
        host_path=f"{PODS}/{uid}/volumes/kubernetes.io~projected/kube-api-access",
        readonly=True,
    )
    container.mounts.add(container_path="/etc/hosts", host_path=f"{PODS}/{uid}/etc-hosts")
    container.mounts.add(container_path="/dev/termination-log", host_path=f"{PODS}/{uid}/containers/{name}/01234567")
