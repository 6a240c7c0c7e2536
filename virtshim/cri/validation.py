"""Finds the fields for which a pod is refused, and the fields without effect. Pure.

A field is refused if ignoring it would change the pod's meaning. Invalid names are refused too.
"""

from __future__ import annotations

import ipaddress
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import structlog

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.guest.set_up_scripts import sysctl_problem
from virtshim.model.text import escaped

# Fields without effect, and the log of them. Ordinary pods carry these fields (kubelet fills in most of them), and they
# concern processes on the host. A guest has its own kernel and users, and QEMU's confinement protects the node from the
# guest.

log = structlog.get_logger(__name__)


def without_effect_of_sandbox(config: pb.PodSandboxConfig) -> Mapping[str, str]:
    """Kind of field -> why ignoring it does no harm, or what ignoring it means."""
    context = config.linux.security_context
    found = {
        "privileged": context.privileged,
        "selinux": context.HasField("selinux_options"),
        "users": context.HasField("run_as_user") or len(context.supplemental_groups) > 0,
        "seccomp": context.HasField("seccomp") or context.seccomp_profile_path != "",
        "apparmor": context.HasField("apparmor"),
    }
    return {kind: _WHY[kind] for kind, there in found.items() if there}


def without_effect_of_container(config: pb.ContainerConfig) -> Mapping[str, str]:
    """Like `without_effect_of_sandbox`, for a container."""
    context = config.linux.security_context
    found = {
        "privileged": context.privileged,
        "selinux": context.HasField("selinux_options") or any(mount.selinux_relabel for mount in config.mounts),
        "users": context.HasField("run_as_user")
        or context.run_as_username != ""
        or len(context.supplemental_groups) > 0,
        "seccomp": context.HasField("seccomp") or context.seccomp_profile_path != "",
        "apparmor": context.HasField("apparmor") or context.apparmor_profile != "",
        "capabilities": context.HasField("capabilities") or context.no_new_privs,
        "masked_paths": len(context.masked_paths) > 0 or len(context.readonly_paths) > 0,
        "readonly_rootfs": context.readonly_rootfs,
    }
    return {kind: _WHY[kind] for kind, there in found.items() if there}


_WHY: Final[Mapping[str, str]] = {
    "privileged": "a guest has no rights on the node, privileged or not",
    "selinux": "labels apply to processes and files of the node",
    "users": "commands in the guest run as that user; programs of the guest's init have their own users",
    "seccomp": "QEMU runs in its own seccomp sandbox; the guest's system calls are its kernel's",
    "apparmor": "QEMU runs under libvirt's own profile, if the node has AppArmor",
    "capabilities": (
        "commands cannot gain dropped capabilities if the guest has setpriv; programs of the guest's init can. QEMU has no "
        "capabilities"
    ),
    "masked_paths": "the guest's /proc is its own",
    "readonly_rootfs": "only the container's commands see a read-only root; the disk is the container's own writable copy",
}


class LogOnce:
    """Logs each kind once for the life of the process, because a line for each pod would be noise. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def log(self, fields: Mapping[str, str]) -> None:
        """`fields`: kind -> why."""
        for kind, why in fields.items():
            with self._lock:
                if kind in self._logged:
                    continue
                self._logged.add(kind)
            log.info("pod.field.without_effect", field=kind, why=why)


_CONTEXT: Final = "config.linux.security_context"
_SHARED: Final = {"network": "hostNetwork", "pid": "hostPID", "ipc": "hostIPC"}

# Bytes of names and values, which are words of one command in the guest.
_MOST_SYSCTLS: Final = 64 << 10

# Names that tapmanager may put into CNI_ARGS, which separates by ";" and "=". Kubernetes allows even fewer names.
_POD_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,252}")
_DOMAIN: Final = re.compile(r"\.|[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# `NAME` or `NAME:VALUE`, as in resolv.conf(5).
_OPTION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(:[A-Za-z0-9._-]{1,64})?")


def sandbox_faults(config: pb.PodSandboxConfig) -> Sequence[str]:
    """Why a sandbox is refused; each fault names its field and the remedy."""
    linux = config.linux
    context = linux.security_context
    return [
        *_windows(config),
        *_namespaces(context.namespace_options),
        *_profiles(context.privileged, context.seccomp, context.seccomp_profile_path, context.apparmor, ""),
        *_group_alone(context.HasField("run_as_group"), context.HasField("run_as_user")),
        *(
            f"config.linux.sysctls[{escaped(name, 200)}] (securityContext.sysctls) {wrong}"
            for name, value in sorted(linux.sysctls.items())
            if (wrong := sysctl_problem(name, value))
        ),
        *_too_many(linux.sysctls),
    ]


def _too_many(sysctls: Mapping[str, str]) -> Iterator[str]:
    size = sum(len(name) + len(value) for name, value in sysctls.items())
    if size > _MOST_SYSCTLS:
        yield f"config.linux.sysctls (securityContext.sysctls) hold {size} bytes; at most {_MOST_SYSCTLS} are allowed: set fewer"


def container_faults(config: pb.ContainerConfig) -> Sequence[str]:
    """Like `sandbox_faults`, for a container."""
    context = config.linux.security_context
    has_user = context.HasField("run_as_user") or context.run_as_username != ""
    return [
        *_windows(config),
        *_ambient(context.capabilities),
        *_namespaces(context.namespace_options),
        *_profiles(
            context.privileged,
            context.seccomp,
            context.seccomp_profile_path,
            context.apparmor,
            context.apparmor_profile,
        ),
        *_group_alone(context.HasField("run_as_group"), has_user),
        *(fault for mount in config.mounts for fault in _mount(mount)),
        *(
            f"config.{name} has a NUL character, which no program can receive; remove it"
            for name, words in (
                ("command", config.command),
                ("args", config.args),
                ("working_dir", (config.working_dir,)),
            )
            if any("\0" in word for word in words)
        ),
    ]


def _windows(config: pb.PodSandboxConfig | pb.ContainerConfig) -> Iterator[str]:
    if config.HasField("windows"):
        yield "config.windows is for nodes that run Windows; remove it (a guest may run Windows without it)"


def _ambient(capabilities: pb.Capability) -> Iterator[str]:
    if capabilities.add_ambient_capabilities:
        yield (
            f"{_CONTEXT}.capabilities.add_ambient_capabilities: commands in a guest have their user's capabilities; remove them, "
            "or run as root and drop what is not needed"
        )


def _namespaces(options: pb.NamespaceOption) -> Iterator[str]:
    where = f"{_CONTEXT}.namespace_options"
    for field, pod_field in _SHARED.items():
        mode = getattr(options, field)
        if mode == pb.NODE:
            yield f"{where}.{field} is NODE: a virtual machine cannot share the host's; remove {pod_field} from the pod"
        elif mode == pb.TARGET:
            yield (
                f"{where}.{field} is TARGET: nothing can be started beside the guest (kubectl debug --target); "
                "use the guest's console or kubectl exec"
            )
    users = options.userns_options
    if options.HasField("userns_options") and (users.mode != pb.NODE or users.uids or users.gids):
        yield (
            f"{where}.userns_options: user namespaces do not apply to a virtual machine, whose users are its own; "
            "remove hostUsers: false from the pod"
        )


def _profiles(
    privileged: bool,
    seccomp: pb.SecurityProfile,
    seccomp_path: str,
    apparmor: pb.SecurityProfile,
    path: str,
) -> Iterator[str]:
    """Profiles do not apply to a privileged container (CRI, `privileged` of both security contexts)."""
    if privileged:
        return
    for kind, profile, old in (("seccomp", seccomp, seccomp_path), ("apparmor", apparmor, path)):
        if profile.profile_type == pb.SecurityProfile.Localhost or old.startswith("localhost/"):
            name = profile.localhost_ref or old.removeprefix("localhost/")
            yield (
                f"{_CONTEXT}.{kind}: the profile {name[:200]!r} of the node cannot be applied inside a guest; "
                "use RuntimeDefault: QEMU runs confined in any case"
            )


def _group_alone(group: bool, user: bool) -> Iterator[str]:
    if group and not user:
        yield f"{_CONTEXT}.run_as_group is set without run_as_user; set runAsUser too, or remove runAsGroup"


def _mount(mount: pb.Mount) -> Iterator[str]:
    where = f"config.mounts[{mount.container_path[:200]}]"
    if mount.propagation == pb.PROPAGATION_BIDIRECTIONAL:
        yield f"{where}.propagation: mounts do not propagate out of a virtual machine; set mountPropagation: HostToContainer"
    if mount.uidMappings or mount.gidMappings:
        yield f"{where}.uidMappings: user namespaces do not apply to a virtual machine; remove hostUsers: false"
    if mount.recursive_read_only and not mount.readonly:
        yield f"{where}.recursive_read_only is set without readonly; set readOnly: true, or remove recursiveReadOnly"
    if mount.recursive_read_only and mount.propagation != pb.PROPAGATION_PRIVATE:
        yield (
            f"{where}.recursive_read_only: the guest could write to mounts that the node adds later; remove mountPropagation "
            "or recursiveReadOnly"
        )
    yield from _image(mount)
    if mount.mount_options:
        yield f"{where}.mount_options cannot be applied in a virtual machine; remove them"


def _image(mount: pb.Mount) -> Iterator[str]:
    """A mount of an image instead of a node's path, which is always read-only."""
    where = f"config.mounts[{escaped(mount.container_path, 200)}]"
    if not mount.image.image:
        if mount.image_sub_path:
            yield f"{where}.image_sub_path is set without image; set image, or remove image_sub_path"
        elif not mount.host_path:
            yield f"{where}.host_path and image are both empty; set one of them"
        return
    if mount.host_path:
        yield f"{where}.host_path and image are both set; remove one"
    if not mount.readonly:
        yield f"{where}.readonly is false: an image volume cannot be written; set readOnly: true"
    below = mount.image_sub_path
    if below.startswith("/") or ".." in below.split("/") or "\0" in below:
        yield f"{where}.image_sub_path {escaped(below, 200)} is not a path inside the image; use one without .. and leading /"


def metadata_faults(meta: pb.PodSandboxMetadata) -> Iterator[str]:
    """Faults of the names that become CNI arguments."""
    for field in ("name", "namespace", "uid"):
        value = getattr(meta, field)
        if not value:
            yield f"config.metadata.{field} is empty"
        elif not _POD_NAME.fullmatch(value):
            yield f"config.metadata.{field} {value[:80]!r}: it must be 1 to 253 letters, digits or . _ : @ -"


def host_address_faults(host_ip: str) -> Iterator[str]:
    """Faults of `host_ip`, the node's address for a pod's port; "" means all addresses."""
    if host_ip and not _is_address(host_ip):
        yield f"config.port_mappings.host_ip {host_ip[:80]!r} is not an IP address"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def dns_faults(config: pb.PodSandboxConfig) -> Iterator[str]:
    """Faults of the hostname and the resolver's settings, which become lines of files in the guest."""
    if config.hostname and not _HOSTNAME.fullmatch(config.hostname):
        yield f"config.hostname {config.hostname[:80]!r} is not a host name: use letters, digits, '-' and '.'"
    dns = config.dns_config
    for at, server in enumerate(dns.servers):
        if not _is_address(server):
            yield f"config.dns_config.servers[{at}] {server[:80]!r} is not an IP address"
    for at, search in enumerate(dns.searches):
        if not _DOMAIN.fullmatch(search):
            yield f"config.dns_config.searches[{at}] {search[:80]!r} is not a domain name"
    for at, option in enumerate(dns.options):
        if not _OPTION.fullmatch(option):
            yield f"config.dns_config.options[{at}] {option[:80]!r} is not a resolver option; use NAME or NAME:VALUE"
