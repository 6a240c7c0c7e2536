"""Converts domain values to CRI messages. Pure. Always fills fields without which kubelet would crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.devices.guest_view import normal_path
from virtshim.model.container import Container, ContainerPhase, Mount, Resources
from virtshim.model.image import FilesystemUsage, Image
from virtshim.model.sandbox import Namespaces, NamespaceScope, Sandbox
from virtshim.pods.events import ContainerEvent, EventType
from virtshim.volumes.pod_mounts import known_volumes, there

_CONTAINER_STATE = {
    ContainerPhase.CREATING: pb.CONTAINER_CREATED,
    ContainerPhase.CREATED: pb.CONTAINER_CREATED,
    ContainerPhase.RUNNING: pb.CONTAINER_RUNNING,
    ContainerPhase.EXITED: pb.CONTAINER_EXITED,
    ContainerPhase.UNKNOWN: pb.CONTAINER_UNKNOWN,
}


def sandbox_metadata(sandbox: Sandbox) -> pb.PodSandboxMetadata:
    key = sandbox.key
    return pb.PodSandboxMetadata(name=key.name, uid=key.uid, namespace=key.namespace, attempt=key.attempt)


def sandbox_state(sandbox: Sandbox) -> pb.PodSandboxState.ValueType:
    return pb.SANDBOX_READY if sandbox.is_ready else pb.SANDBOX_NOTREADY


def container_state(container: Container) -> pb.ContainerState.ValueType:
    """The state for callers. A container that is being removed shows its last state: it has an exit, or it never
    ran."""
    if container.phase is ContainerPhase.REMOVING:
        return pb.CONTAINER_EXITED if container.exit else pb.CONTAINER_UNKNOWN
    return _CONTAINER_STATE[container.phase]


def sandbox_item(sandbox: Sandbox) -> pb.PodSandbox:
    return pb.PodSandbox(
        id=sandbox.id.value,
        metadata=sandbox_metadata(sandbox),
        state=sandbox_state(sandbox),
        created_at=sandbox.created_at,
        labels=sandbox.config.labels,
        annotations=sandbox.config.annotations,
        runtime_handler=sandbox.config.runtime_handler,
    )


def sandbox_status(sandbox: Sandbox) -> pb.PodSandboxStatus:
    ips: Sequence[str] = sandbox.network.ips if sandbox.network else ()
    return pb.PodSandboxStatus(
        id=sandbox.id.value,
        metadata=sandbox_metadata(sandbox),
        state=sandbox_state(sandbox),
        created_at=sandbox.created_at,
        network=pb.PodSandboxNetworkStatus(
            ip=ips[0] if ips else "", additional_ips=[pb.PodIP(ip=ip) for ip in ips[1:]]
        ),
        linux=pb.LinuxPodSandboxStatus(namespaces=pb.Namespace(options=_namespaces(sandbox.config.namespaces))),
        labels=sandbox.config.labels,
        annotations=sandbox.config.annotations,
        runtime_handler=sandbox.config.runtime_handler,
    )


def _namespaces(asked: Namespaces) -> pb.NamespaceOption:
    mode = {NamespaceScope.POD: pb.POD, NamespaceScope.CONTAINER: pb.CONTAINER}
    return pb.NamespaceOption(network=mode[asked.network], pid=mode[asked.pid], ipc=mode[asked.ipc])


def container_metadata(container: Container) -> pb.ContainerMetadata:
    return pb.ContainerMetadata(name=container.name.name, attempt=container.name.attempt)


def container_item(container: Container) -> pb.Container:
    return pb.Container(
        id=container.id.value,
        pod_sandbox_id=container.sandbox_id.value,
        metadata=container_metadata(container),
        image=_image_spec(container),
        image_ref=container.spec.image_ref,
        state=container_state(container),
        created_at=container.created_at,
        labels=container.config.labels,
        annotations=container.config.annotations,
        image_id=container.image_id.value,
    )


def _image_spec(container: Container) -> pb.ImageSpec:
    config = container.config
    return pb.ImageSpec(image=config.user_image or config.image, user_specified_image=config.user_image)


def container_status(container: Container) -> pb.ContainerStatus:
    ended = container.exit
    return pb.ContainerStatus(
        id=container.id.value,
        metadata=container_metadata(container),
        state=container_state(container),
        created_at=container.created_at,
        started_at=container.status.started_at,
        finished_at=ended.finished_at if ended else 0,
        exit_code=ended.code if ended else 0,
        image=_image_spec(container),
        image_ref=container.spec.image_ref,
        reason=ended.reason.value if ended else "",
        message=ended.message if ended else container.status.trouble,
        labels=container.config.labels,
        annotations=container.config.annotations,
        mounts=[
            _mount(container, m)
            for m in there(
                container.config.mounts,
                container.config.annotations,
                known_volumes(container),
            )
        ],
        log_path=container.spec.log_file,
        resources=pb.ContainerResources(linux=_resources(container.resources)),
        image_id=container.image_id.value,
        user=_user(container),
        stop_signal=cast("pb.Signal.ValueType", container.config.stop_signal),
    )


def _mount(container: Container, mount: Mount) -> pb.Mount:
    """kubelet's image GC keeps the images whose ids it finds in mounts."""
    found = next(
        (v.image for v in container.spec.volumes if v.image and v.guest == normal_path(mount.container_path)), None
    )
    is_image = mount.image != "" and found is not None
    return pb.Mount(
        container_path=mount.container_path,
        host_path=mount.host_path,
        readonly=mount.readonly,
        recursive_read_only=mount.recursive_read_only,
        propagation=pb.PROPAGATION_HOST_TO_CONTAINER if mount.follows else pb.PROPAGATION_PRIVATE,
        image=pb.ImageSpec(image=found.id.value, image_ref=found.image_ref) if is_image and found else None,
        image_sub_path=mount.image_sub_path,
    )


def _user(container: Container) -> pb.ContainerUser | None:
    """None for a guest without a command, because virtshim does not know the users of the guest's system."""
    user = container.status.user
    if user is None:
        return None
    return pb.ContainerUser(linux=pb.LinuxContainerUser(uid=user.uid, gid=user.gid, supplemental_groups=user.groups))


def _resources(resources: Resources) -> pb.LinuxContainerResources:
    return pb.LinuxContainerResources(
        cpu_period=resources.cpu_period,
        cpu_quota=resources.cpu_quota,
        cpu_shares=resources.cpu_shares,
        memory_limit_in_bytes=resources.memory_limit_bytes,
        oom_score_adj=resources.oom_score_adj,
        cpuset_cpus=resources.cpuset_cpus,
        cpuset_mems=resources.cpuset_mems,
        hugepage_limits=[
            pb.HugepageLimit(page_size=size, limit=limit) for size, limit in resources.hugepage_limits.items()
        ],
        unified=resources.unified,
        memory_swap_limit_in_bytes=resources.memory_swap_limit_bytes,
    )


_EVENT_TYPE = {
    EventType.CREATED: pb.CONTAINER_CREATED_EVENT,
    EventType.STARTED: pb.CONTAINER_STARTED_EVENT,
    EventType.STOPPED: pb.CONTAINER_STOPPED_EVENT,
    EventType.DELETED: pb.CONTAINER_DELETED_EVENT,
}


def event(change: ContainerEvent) -> pb.ContainerEventResponse:
    return pb.ContainerEventResponse(
        container_id=change.id,
        container_event_type=_EVENT_TYPE[change.kind],
        created_at=change.at,
        pod_sandbox_status=sandbox_status(change.sandbox),
        containers_statuses=[container_status(container) for container in change.containers],
    )


def image_item(image: Image) -> pb.Image:
    """kubelet checks runAsNonRoot against `uid` and `username`, and expects that removing the image frees `size` bytes. CRI
    requires a size above 0."""
    config = image.config
    return pb.Image(
        id=image.id.value,
        repo_tags=image.tags,
        repo_digests=image.repo_digests,
        size=image.taken or image.size,
        spec=pb.ImageSpec(image=image.id.value),
        pinned=image.pinned,
        uid=None if config.uid is None else pb.Int64Value(value=config.uid),
        username=config.user_name,
    )


def image_facts(image: Image) -> Mapping[str, object]:
    """What `crictl inspecti` shows beside the status. The config has OCI's field names."""
    config = image.config
    fields = {
        "User": config.user,
        "Env": list(config.env),
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.cmd),
        "WorkingDir": config.working_dir,
        "StopSignal": config.stop_signal,
    }
    pulled = datetime.fromtimestamp(image.pulled_at / 1e9, tz=UTC)
    disk = {"disk": image.digest.value, "format": image.format.value, "virtualSize": image.virtual_size}
    return {
        **(disk if image.has_disk else {}),
        **({"files": image.tree.value} if image.tree else {}),
        "pulledAt": pulled.isoformat(timespec="seconds"),
        "config": {name: value for name, value in fields.items() if value},
    }


def filesystem_usage(use: FilesystemUsage) -> pb.FilesystemUsage:
    return pb.FilesystemUsage(
        timestamp=use.timestamp,
        fs_id=pb.FilesystemIdentifier(mountpoint=use.mountpoint),
        used_bytes=pb.UInt64Value(value=use.used_bytes),
        inodes_used=pb.UInt64Value(value=use.inodes_used),
    )
