"""Which of a pod's fields a virtual machine cannot honour, and which are accepted without effect. Pure.

Refused is what changes the pod's meaning: its author would get something else than asked for. Accepted without effect is
what ordinary pods carry (kubelet fills most of it in) and what speaks of processes on the host: the guest has a kernel and
users of its own, and what stands between it and the node is QEMU's own confinement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.guest.termination_message import termination_file

_CONTEXT: Final = "config.linux.security_context"
_SHARED: Final = {"network": "hostNetwork", "pid": "hostPID", "ipc": "hostIPC"}

# Where kubelet mounts what every pod gets.
_SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_OF_EVERY_POD: Final = (_SERVICE_ACCOUNT, "/etc/hosts")


def sandbox_faults(config: pb.PodSandboxConfig) -> Sequence[str]:
    """What to refuse a sandbox for: each names its field and the remedy."""
    linux = config.linux
    context = linux.security_context
    return [
        *_namespaces(context.namespace_options),
        *_profiles(context.seccomp, context.seccomp_profile_path, context.apparmor, ""),
        *_group_alone(context.HasField("run_as_group"), context.HasField("run_as_user")),
        *(
            f"config.linux.sysctls[{name}] cannot be set from outside a virtual machine; remove it from "
            "securityContext.sysctls, and set it in the guest (write_files or bootcmd in VirtletCloudInitUserData)"
            for name in sorted(linux.sysctls)
        ),
    ]


def container_faults(config: pb.ContainerConfig) -> Sequence[str]:
    """As `sandbox_faults`."""
    context = config.linux.security_context
    has_user = context.HasField("run_as_user") or context.run_as_username != ""
    return [
        *_namespaces(context.namespace_options),
        *_profiles(context.seccomp, context.seccomp_profile_path, context.apparmor, context.apparmor_profile),
        *_group_alone(context.HasField("run_as_group"), has_user),
        *(fault for mount in config.mounts for fault in _mount(mount)),
    ]


def unimplemented(config: pb.ContainerConfig) -> str:
    """What is asked for and may come, "" if nothing: to be told apart from what no VM can have."""
    volumes = [mount.container_path for mount in config.mounts if mount.image.image or mount.image_sub_path]
    if not volumes:
        return ""
    named = ", ".join(f"config.mounts[{path[:200]}].image" for path in volumes[:10])
    return f"{named}: image volumes are not supported yet; put the files into the VM's image"


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


def _profiles(seccomp: pb.SecurityProfile, seccomp_path: str, apparmor: pb.SecurityProfile, path: str) -> Iterator[str]:
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
    if mount.propagation != pb.PROPAGATION_PRIVATE:
        yield f"{where}.propagation: mounts do not propagate into or out of a virtual machine; set mountPropagation: None"
    if mount.uidMappings or mount.gidMappings:
        yield f"{where}.uidMappings: user namespaces do not apply to a virtual machine; remove hostUsers: false"
    if mount.recursive_read_only:
        yield f"{where}.recursive_read_only cannot be guaranteed for a virtual machine; remove recursiveReadOnly"
    if mount.mount_options:
        yield f"{where}.mount_options cannot be passed on to a virtual machine; remove them"


def sandbox_without_effect(config: pb.PodSandboxConfig) -> Mapping[str, str]:
    """What is taken without effect: kind -> why that does no harm, or what it means."""
    context = config.linux.security_context
    found = {
        "privileged": context.privileged,
        "selinux": context.HasField("selinux_options"),
        "users": context.HasField("run_as_user") or len(context.supplemental_groups) > 0,
        "seccomp": context.HasField("seccomp") or context.seccomp_profile_path != "",
        "apparmor": context.HasField("apparmor"),
    }
    return {kind: _WHY[kind] for kind, there in found.items() if there}


def container_without_effect(config: pb.ContainerConfig) -> Mapping[str, str]:
    """As `sandbox_without_effect`."""
    context = config.linux.security_context
    message_file = termination_file(config.annotations, config.mounts)
    taken = {message_file.host} if message_file else set()
    mounts = [mount.container_path for mount in config.mounts if mount.host_path not in taken]
    found = {
        "privileged": context.privileged,
        "selinux": context.HasField("selinux_options"),
        "users": context.HasField("run_as_user")
        or context.run_as_username != ""
        or len(context.supplemental_groups) > 0,
        "seccomp": context.HasField("seccomp") or context.seccomp_profile_path != "",
        "apparmor": context.HasField("apparmor") or context.apparmor_profile != "",
        "capabilities": context.HasField("capabilities"),
        "no_new_privs": context.no_new_privs,
        "masked_paths": len(context.masked_paths) > 0 or len(context.readonly_paths) > 0,
        "readonly_rootfs": context.readonly_rootfs,
        "kubelet_mounts": any(path in _OF_EVERY_POD for path in mounts),
        "mounts": any(path not in _OF_EVERY_POD for path in mounts),
    }
    return {kind: _WHY[kind] for kind, there in found.items() if there}


_WHY: Final[Mapping[str, str]] = {
    "privileged": "a guest has no rights on the node, privileged or not",
    "selinux": "labels apply to processes and files of the node",
    "users": "commands run in the guest run as that user; what the guest's init starts has its own users",
    "seccomp": "QEMU runs in its own seccomp sandbox; the guest's system calls are its kernel's",
    "apparmor": "QEMU runs under libvirt's own profile, if the node has AppArmor",
    "capabilities": "QEMU has none; those inside the guest are the guest's",
    "no_new_privs": "QEMU gains none; processes in the guest are the guest's",
    "masked_paths": "the guest's /proc is its own",
    "readonly_rootfs": "the disk is writable, but it is this container's own copy-on-write disk: the image never changes",
    "kubelet_mounts": "the service account token and /etc/hosts are not passed to the guest",
    "mounts": "host directories are not passed to the guest yet",
}
