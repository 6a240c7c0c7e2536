"""Converts CRI messages to domain values. Pure. One InvalidRequest reports all faults of a message."""

from __future__ import annotations

from collections.abc import Iterable

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import validation
from virtshim.devices.values import CriDevice
from virtshim.guest.command import capability
from virtshim.model.cgroup import parent_path
from virtshim.model.container import ContainerConfig, ContainerName, Mount, Resources, RunAs
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import Credentials
from virtshim.model.network import Dns
from virtshim.model.sandbox import Namespaces, NamespaceScope, PodKey, PortMapping, SandboxConfig
from virtshim.model.sizing import changes_in
from virtshim.model.sizing import faults as resource_faults
from virtshim.model.text import check_path
from virtshim.system import machine

_PROTOCOLS = {pb.TCP: "tcp", pb.UDP: "udp", pb.SCTP: "sctp"}
_SCOPES = {pb.POD: NamespaceScope.POD, pb.CONTAINER: NamespaceScope.CONTAINER}  # other scopes are refused
_MAX_TEXT = 4096
# Bytes of labels and annotations together. Kubernetes allows 256 KiB of annotations. A list must fit into one answer,
# so one pod with more could break the list for all others.
_MAX_METADATA = 512 << 10
_CDI_ANNOTATIONS = "cdi.k8s.io/"
_SECCOMP_PROFILES = ("", "unconfined", "runtime/default", "docker/default")


class _Faults(list[str]):
    """Collects faults and raises them together."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    def require(self, condition: object, fault: str) -> None:
        if not condition:
            self.append(fault)

    def done(self) -> None:
        if self:
            raise InvalidRequest(f"{self._call}: " + "; ".join(self))


def sandbox_key(config: pb.PodSandboxConfig) -> PodKey:
    faults = _Faults("RunPodSandbox")
    faults.require(
        config.HasField("metadata"), "config.metadata is missing (name, namespace, uid and attempt are needed)"
    )
    faults.done()
    meta = config.metadata
    faults.extend(validation.metadata_faults(meta))
    faults.done()
    return PodKey(meta.namespace, meta.name, meta.uid, meta.attempt)


def sandbox_config(config: pb.PodSandboxConfig, runtime_handler: str) -> SandboxConfig:
    """Raises InvalidRequest for what a virtual machine cannot do."""
    faults = _Faults("RunPodSandbox")
    faults.extend(validation.sandbox_faults(config))
    faults.extend(validation.dns_faults(config))
    directory = config.log_directory
    faults.require(
        not directory or directory.startswith("/"), f"config.log_directory is not absolute: {directory[:200]!r}"
    )
    try:
        check_path(directory, "config.log_directory")
    except InvalidRequest as wrong:
        faults.append(str(wrong))
    _check_metadata_size(config, faults)
    ports = tuple(_port(mapping, faults) for mapping in config.port_mappings)
    try:
        parent_path(config.linux.cgroup_parent)
    except InvalidRequest as wrong:
        faults.append(str(wrong))
    overhead = _resources(config.linux.overhead, "config.linux.overhead", faults)
    sums = _resources(config.linux.resources, "config.linux.resources", faults)
    faults.done()
    dns = config.dns_config
    return SandboxConfig(
        hostname=config.hostname,
        log_directory=directory,
        dns=Dns(tuple(dns.servers), tuple(dns.searches), tuple(dns.options)),
        port_mappings=ports,
        labels=dict(config.labels),
        annotations=dict(config.annotations),
        cgroup_parent=config.linux.cgroup_parent,
        namespaces=_namespaces(config.linux.security_context),
        runtime_handler=runtime_handler,
        overhead=overhead,
        resources=sums,
        sysctls=dict(config.linux.sysctls),
    )


def _namespaces(context: pb.LinuxSandboxSecurityContext) -> Namespaces:
    if not context.HasField("namespace_options"):
        return Namespaces()
    asked = context.namespace_options
    return Namespaces(_SCOPES[asked.network], _SCOPES[asked.pid], _SCOPES[asked.ipc])


def _check_metadata_size(config: pb.PodSandboxConfig | pb.ContainerConfig, faults: _Faults) -> None:
    size = sum(
        len(name.encode()) + len(text.encode())
        for notes in (config.labels, config.annotations)
        for name, text in notes.items()
    )
    faults.require(
        size <= _MAX_METADATA,
        f"config.labels and config.annotations hold {size} bytes, but only {_MAX_METADATA} are allowed; shorten them",
    )


def _check_seccomp(context: pb.LinuxContainerSecurityContext, faults: _Faults) -> None:
    """Refuses an invalid profile, as other runtimes do, although no profile reaches the guest."""
    profile = context.seccomp_profile_path
    faults.require(
        profile in _SECCOMP_PROFILES or profile.startswith("localhost/"),
        f"config.linux.security_context.seccomp_profile_path is not a valid profile: {profile[:200]!r}",
    )


def _port(mapping: pb.PortMapping, faults: _Faults) -> PortMapping:
    for field in ("container_port", "host_port"):
        value = getattr(mapping, field)
        faults.require(0 <= value <= 65535, f"config.port_mappings.{field} {value} is not a port")
    faults.extend(validation.host_address_faults(mapping.host_ip))
    protocol = _PROTOCOLS.get(mapping.protocol)
    faults.require(protocol, f"config.port_mappings.protocol {mapping.protocol} is unknown")
    return PortMapping(protocol or "tcp", mapping.container_port, mapping.host_port, mapping.host_ip)


def container_name(config: pb.ContainerConfig) -> ContainerName:
    faults = _Faults("CreateContainer")
    faults.require(config.HasField("metadata"), "config.metadata is missing (name and attempt are needed)")
    faults.done()
    name = config.metadata.name
    faults.require(name, "config.metadata.name is empty")
    faults.require(len(name) <= _MAX_TEXT and "\0" not in name, "config.metadata.name is too long or holds NUL")
    faults.done()
    return ContainerName(name, config.metadata.attempt)


def container_config(config: pb.ContainerConfig) -> ContainerConfig:
    """Raises InvalidRequest for what a virtual machine cannot do (see `virtshim.cri.validation`)."""
    faults = _Faults("CreateContainer")
    faults.require(config.image.image, "config.image.image is empty")
    faults.extend(validation.container_faults(config))
    _check_seccomp(config.linux.security_context, faults)
    _check_metadata_size(config, faults)
    mounts = tuple(_mount(mount, faults) for mount in config.mounts)
    user = _run_as(config.linux.security_context, faults)
    devices = tuple(_device(device, faults) for device in config.devices)
    resources = _resources(config.linux.resources, "config.linux.resources", faults)
    faults.done()
    return ContainerConfig(
        image=config.image.image,
        user_image=config.image.user_specified_image,
        command=tuple(config.command),
        args=tuple(config.args),
        working_dir=config.working_dir,
        envs=tuple((env.key, env.value) for env in config.envs),
        mounts=mounts,
        labels=dict(config.labels),
        annotations=dict(config.annotations),
        log_path=config.log_path,
        stdin=config.stdin,
        stdin_once=config.stdin_once,
        tty=config.tty,
        stop_signal=config.stop_signal,
        resources=resources,
        user=user,
        readonly_root=config.linux.security_context.readonly_rootfs,
        devices=devices,
        cdi=_cdi(config),
    )


def _device(device: pb.Device, faults: _Faults) -> CriDevice:
    host, inside = device.host_path, device.container_path or device.host_path
    for field, value in (("host_path", host), ("container_path", inside)):
        fine = value.startswith("/") and len(value) <= _MAX_TEXT and value.isprintable()
        faults.require(fine, f"config.devices[{host[:200]}].{field} is not an absolute path: {value[:200]!r}")
    known = set(device.permissions) <= set("rwm")
    faults.require(
        known, f"config.devices[{host[:200]}].permissions may be r, w, m only, not {device.permissions[:20]!r}"
    )
    return CriDevice(host, inside, device.permissions)


def _cdi(config: pb.ContainerConfig) -> tuple[str, ...]:
    """CDI names, each once: first the field's, then those in the container's annotations (older kubelets and plugins).
    The sandbox's annotations do not count: a pod's author writes them, but only kubelet and device plugins write a
    container's."""
    names = [device.name for device in config.CDI_devices]
    for key in sorted(config.annotations):
        if key.startswith(_CDI_ANNOTATIONS):
            names += [name.strip() for name in config.annotations[key].split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _run_as(context: pb.LinuxContainerSecurityContext, faults: _Faults) -> RunAs:
    name = context.run_as_username
    user = name or (str(context.run_as_user.value) if context.HasField("run_as_user") else "")
    group = context.run_as_group.value if context.HasField("run_as_group") else None
    where = "config.linux.security_context"
    faults.require("\0" not in user and ":" not in user and len(user) <= 256, f"{where}.run_as_username is not a name")
    for number in (context.run_as_user.value, group or 0, *context.supplemental_groups):
        faults.require(0 <= number < 1 << 32, f"{where}: {number} is not a valid user or group ID")
    merged = context.supplemental_groups_policy == pb.Merge
    dropped, added = (
        _capabilities(names, f"{where}.capabilities.{field}", faults)
        for field, names in (
            ("drop_capabilities", context.capabilities.drop_capabilities),
            ("add_capabilities", context.capabilities.add_capabilities),
        )
    )
    return RunAs(
        user,
        group,
        tuple(context.supplemental_groups),
        own_groups=merged,
        dropped=() if context.privileged else dropped,
        added=() if context.privileged else added,
        no_new_privs=context.no_new_privs,
    )


def _capabilities(names: Iterable[str], where: str, faults: _Faults) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        try:
            found.append(capability(name))
        except InvalidRequest as wrong:
            faults.append(f"{where}: {wrong}")
    return tuple(dict.fromkeys(found))


def _mount(mount: pb.Mount, faults: _Faults) -> Mount:
    faults.require(mount.container_path, "config.mounts.container_path is empty")
    follows = mount.propagation == pb.PROPAGATION_HOST_TO_CONTAINER
    return Mount(
        mount.container_path,
        mount.host_path,
        mount.readonly,
        follows,
        mount.recursive_read_only,
        mount.image.image,
        mount.image_sub_path,
    )


def resources(message: pb.LinuxContainerResources, call: str, where: str) -> Resources:
    """Reads the resources of an update. Raises InvalidRequest, starting with the call's name."""
    faults = _Faults(call)
    changes = changes_in(_read_resources(message))
    faults.extend(_faults_of(changes, where))
    faults.done()
    return changes


def _resources(resources: pb.LinuxContainerResources, where: str, faults: _Faults) -> Resources:
    read = _read_resources(resources)
    faults.extend(_faults_of(read, where))
    return read


def _faults_of(resources: Resources, where: str) -> Iterable[str]:
    return resource_faults(resources, where, cpus=machine.cpus(), mems=machine.memory_nodes())


def _read_resources(resources: pb.LinuxContainerResources) -> Resources:
    return Resources(
        cpu_shares=resources.cpu_shares,
        cpu_quota=resources.cpu_quota,
        cpu_period=resources.cpu_period,
        memory_limit_bytes=resources.memory_limit_in_bytes,
        memory_swap_limit_bytes=resources.memory_swap_limit_in_bytes,
        oom_score_adj=resources.oom_score_adj,
        cpuset_cpus=resources.cpuset_cpus,
        cpuset_mems=resources.cpuset_mems,
        hugepage_limits={limit.page_size: limit.limit for limit in resources.hugepage_limits},
        unified=dict(resources.unified),
    )


def credentials(auth: pb.AuthConfig) -> Credentials:
    return Credentials(
        username=auth.username,
        password=auth.password,
        auth=auth.auth,
        server_address=auth.server_address,
        identity_token=auth.identity_token,
        registry_token=auth.registry_token,
    )
