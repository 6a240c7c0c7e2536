"""Which of a pod's fields are accepted without effect, and the log of them.

They are what ordinary pods carry (kubelet fills most of it in) and what speaks of processes on the host: the guest has a kernel
and users of its own, and what stands between it and the node is QEMU's own confinement.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

import structlog

from criproto.runtime_v1 import api_pb2 as pb

log = structlog.get_logger(__name__)


def of_sandbox(config: pb.PodSandboxConfig) -> Mapping[str, str]:
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


def of_container(config: pb.ContainerConfig) -> Mapping[str, str]:
    """As `of_sandbox`."""
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
    "users": "commands run in the guest run as that user; what the guest's init starts has its own users",
    "seccomp": "QEMU runs in its own seccomp sandbox; the guest's system calls are its kernel's",
    "apparmor": "QEMU runs under libvirt's own profile, if the node has AppArmor",
    "capabilities": "commands cannot gain them where the guest has setpriv; what its init starts can. QEMU has none",
    "masked_paths": "the guest's /proc is its own",
    "readonly_rootfs": "for commands of the container only; else the disk is writable, as this container's own copy of it",
}


class LogOnce:
    """Each kind once for the life of the process; a line for each pod would help nobody. Thread-safe."""

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
