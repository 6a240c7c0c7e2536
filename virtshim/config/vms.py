"""Settings of VMs: how they run, and what they get."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ByteSize, field_validator, model_validator

from virtshim.annotations.beside_containers import VM_CONTAINER_ANNOTATION
from virtshim.annotations.parse import FORWARD_ANNOTATION, KNOWN, VNC_ANNOTATION, parse_vm_options
from virtshim.annotations.profiles import PROFILE_ANNOTATION
from virtshim.config.texts import PROFILE_NAME, PathText, Section, setting
from virtshim.model.errors import InvalidRequest

# Each pod must set these itself: they open a way into the VM, name a profile, or are for `virtshim proxy`, which has no profiles.
_OF_PODS = frozenset({PROFILE_ANNOTATION, VNC_ANNOTATION, FORWARD_ANNOTATION, VM_CONTAINER_ANNOTATION})


class Libvirt(Section):
    """[libvirt]: how libvirt runs the VMs, and as which users."""

    uri: str = setting(
        "qemu:///system",
        "libvirt's URI: qemu:///system, or qemu:///embed?root=DIR",
        allowed="one of these",
        why="the distribution's libvirt, so that virsh shows the VMs; embed is for `virtshim up`",
    )
    domain_type: Literal["auto", "kvm", "qemu"] = setting(
        "auto",
        "auto boots a probe guest once, to find out whether KVM works; qemu means TCG",
        why="in a VM or a container, /dev/kvm may exist but not work",
    )
    emulator: PathText = setting(
        "/usr/bin/qemu-system-x86_64", "the QEMU program that vmwrapper starts", why="the path in distributions"
    )
    vmwrapper: PathText = setting(
        "/usr/libexec/virtshim/vmwrapper",
        "the program that libvirt starts in place of QEMU",
        why="the path in the package",
    )
    qemu_user: str = setting(
        "",
        "unprivileged user that QEMU runs as; default: the distribution's user for QEMU",
        allowed="name",
        why="libvirt's packages create one",
    )
    qemu_group: str = setting(
        "",
        "group of that user and of all VMs; default: the distribution's group for QEMU",
        allowed="name",
        why="the group that /dev/kvm belongs to",
    )
    confine: tuple[Literal["landlock", "seccomp", "core-scheduling"], ...] = setting(
        ("landlock", "seccomp", "core-scheduling"),
        "how QEMU is confined, in addition to its user",
        allowed="landlock, seccomp, core-scheduling",
        why="every mechanism that exists; virtshim skips what the kernel lacks",
    )
    parts: tuple[PathText, ...] = setting(
        (),
        "additional paths that QEMU may read and run, for a QEMU in an unusual place",
        allowed="absolute paths",
        why="a distribution's QEMU needs nothing more",
    )
    first_vm_uid: int = setting(
        2_130_706_432,
        "first user id of VMs",
        ge=65_536,
        le=4_000_000_000,
        why="0x7F000000: outside the ranges that distributions, systemd and directory services assign",
    )
    vm_uids: int = setting(
        65_536,
        "number of user ids for VMs; 0: all VMs run as `qemu_user`",
        unit="user ids",
        ge=0,
        le=1 << 24,
        why="many times the pods of a node, so that an id is not reused soon",
    )


class VmProfile(Section):
    """[[vm.profiles]]: a named set of annotations. A pod selects a profile with `virtshim.io/profile`, or through the handler of
    its RuntimeClass."""

    name: str = setting(
        ...,
        "the profile's name in pods",
        allowed="letters, digits, and between them - _ .",
        pattern=PROFILE_NAME,
        why="each profile needs a name",
    )
    annotations: dict[str, str] = setting(
        {},
        "annotations as in pods; a pod's own annotations take precedence",
        allowed="a table of texts",
        reload=True,
        why="an empty profile changes nothing",
    )
    handlers: tuple[str, ...] = setting(
        (),
        "RuntimeClass handlers whose pods get the profile automatically",
        allowed="some of cri.runtime_handlers and pod_handlers",
        reload=True,
        why="pods select the profile by name",
    )

    @model_validator(mode="after")
    def _annotations_are_known(self) -> Self:
        if foreign := sorted(name for name in self.annotations if name not in KNOWN):
            raise ValueError(f"{', '.join(foreign)}: not an annotation of VMs; docs/annotations.md lists them")
        if own := sorted(_OF_PODS & self.annotations.keys()):
            raise ValueError(
                f"{', '.join(own)}: only pods may set this; remove it here, and set it in each pod that needs it"
            )
        try:
            parse_vm_options(self.annotations)
        except InvalidRequest as exc:
            raise ValueError(str(exc)) from exc
        return self


class Vm(Section):
    """[vm]: sizes and limits. A reload affects containers that are created, resized or started after it."""

    default_memory: ByteSize = setting(
        ByteSize(1 << 30),
        "guest memory of a container without a memory limit",
        unit="bytes",
        reload=True,
        why="cloud images boot with it",
    )
    min_memory: ByteSize = setting(
        ByteSize(32 << 20),
        "smallest memory limit; a container with a smaller one is refused",
        unit="bytes",
        reload=True,
        why="the smallest Linux boots with it; a kernel with too little memory does not even print an error",
    )
    max_vcpus: int = setting(
        64,
        "largest number of vCPUs; a container with more is refused",
        unit="vCPUs",
        ge=1,
        le=255,
        reload=True,
        why="more vCPUs help guests little, and QEMU's threads crowd the node",
    )
    room_vcpus: int = setting(
        0,
        "maximum number of vCPUs that a VM can be resized to; 0: the number that it starts with. A pod may override it",
        unit="vCPUs",
        ge=0,
        le=255,
        reload=True,
        why="each possible vCPU costs memory in the guest, and few VMs are ever resized",
    )
    room_memory: ByteSize = setting(
        ByteSize(0),
        "maximum memory that a VM can be resized to; 0: the amount that it starts with. A pod may override it",
        unit="bytes",
        reload=True,
        why="a guest's kernel takes 1/64 of this maximum to manage the memory, even while the VM has less",
    )
    max_root_volume: ByteSize = setting(
        ByteSize(0),
        "largest VirtletRootVolumeSize and largest disk of `virtshim.io/disks`; 0: 64 TiB",
        unit="bytes",
        reload=True,
        why="disks are sparse, and kubelet's eviction counts only the used space",
    )
    disk_iops: int = setting(
        0,
        "maximum requests per second of each root disk; 0: no limit",
        unit="1/s",
        ge=0,
        why="a limit that nobody chose would look like a slow disk",
    )
    disk_bandwidth: ByteSize = setting(
        ByteSize(0),
        "maximum data per second that each root disk reads and writes; 0: no limit",
        unit="bytes/s",
        why="a limit that nobody chose would look like a slow disk",
    )
    overhead: ByteSize = setting(
        ByteSize(256 << 20),
        "memory for QEMU in addition to the guest's memory, for pods without RuntimeClass overhead",
        unit="bytes",
        reload=True,
        why="the overhead in `deploy/kustomize/base/runtimeclass.yaml`; measurements of QEMU gave 25 to 100 MiB",
    )
    require_overhead: bool = setting(
        False,
        "refuse kubelet's pods without RuntimeClass overhead: their VMs run outside the pods' cgroups, where kubelet's eviction "
        "does not see them",
        reload=True,
        why="pods without a RuntimeClass keep working; `virtshim setup` turns this on",
    )
    command: Literal["run", "ignore"] = setting(
        "run",
        "a container's command and args: the guest agent runs them, or virtshim ignores them. A pod may override it",
        reload=True,
        why="virtshim does what the pod's spec says; ignore is for images without an agent",
    )
    agent_timeout: float = setting(
        300.0,
        "time after the start within which a guest agent that must run a command or a postStart hook has to answer",
        unit="s",
        gt=0,
        reload=True,
        why="enough for a cloud image's first boot under emulation",
    )
    profiles: tuple[VmProfile, ...] = setting(
        (),
        "named sets of annotations for similar pods",
        allowed="tables, below",
        reload=True,
        why="each pod sets its own annotations",
    )

    @field_validator("profiles")
    @classmethod
    def _each_once(cls, profiles: tuple[VmProfile, ...]) -> tuple[VmProfile, ...]:
        for what, found in (
            ("the name", [one.name for one in profiles]),
            ("the handler", [handler for one in profiles for handler in one.handlers]),
        ):
            if twice := sorted({value for value in found if found.count(value) > 1}):
                raise ValueError(f"two profiles have {what} {', '.join(twice)}; give each profile its own")
        return profiles


class Volumes(Section):
    """[volumes]: what happens to a VM whose volumes are not mounted as they should be."""

    unconfirmed: Literal["warn", "fail"] = setting(
        "warn",
        "for a container without a command, if the guest agent does not confirm within `vm.agent_timeout` that the writable "
        "volumes are mounted: warn reports a problem, fail ends the container. A failed mount always ends the container",
        reload=True,
        why="many images have no agent, and cloud-init mounts their volumes; fail is for nodes whose guests all have an agent",
    )


class Templates(Section):
    """[templates]: guests that have booted, from which pods with virtshim.io/warm-start start."""

    max_bytes: ByteSize = setting(
        ByteSize(0),
        "maximum size of all templates of the node, memory and disk together; 0: pods with virtshim.io/warm-start boot",
        reload=True,
        why="each template takes memory of the node, about as much as its guest has, and pods of several tenants share its pages",
    )


class Saved(Section):
    """[saved]: memory of VMs that outlive their pods (virtshim.io/on-stop: save)."""

    keep: float = setting(
        86400.0,
        "how long a saved state is kept; after that, the VM's next pod boots",
        unit="s",
        ge=60,
        le=31536000,
        reload=True,
        why="a drain, or a node's maintenance, takes less than a day; a saved state that nobody continues takes disk space",
    )
    max_bytes: ByteSize = setting(
        ByteSize(0),
        "maximum size of all saved states of the node; a guest whose state does not fit is shut down instead",
        allowed="0 for as much as the file system of paths.state_dir has",
        reload=True,
        why="a saved state takes at most the guest's memory, and the file system is checked before each",
    )
    key_file: str = setting(
        "",
        "file with the key that seals states on volumes (virtshim.io/state-volume): 32 bytes or more of random data, the same on "
        "all nodes, mode 0600; empty: pods with such a volume are refused",
        allowed="absolute path, or empty",
        reload=True,
        pattern="^(/|$)",
        why="tenants may write to the volume, so a node only continues a state that a node of its cluster has sealed",
    )
