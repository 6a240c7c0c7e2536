"""Settings of the VMs: how they are run, and what they get."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ByteSize, field_validator, model_validator

from virtshim.annotations.parse import FORWARD_ANNOTATION, VNC_ANNOTATION, is_known, parse_vm_options
from virtshim.annotations.profiles import PROFILE_ANNOTATION
from virtshim.config.texts import PROFILE_NAME, PathText, Section, setting
from virtshim.model.errors import InvalidRequest

# What opens a way to a VM is asked of its pod each time.
_OF_PODS = frozenset({PROFILE_ANNOTATION, VNC_ANNOTATION, FORWARD_ANNOTATION})


class Libvirt(Section):
    """[libvirt]: who runs the VMs, and as whom."""

    uri: str = setting(
        "qemu:///system",
        "qemu:///system, or qemu:///embed?root=DIR",
        allowed="one of these",
        why="the distribution's libvirt, whose VMs virsh shows; embed is for `virtshim up`",
    )
    domain_type: Literal["auto", "kvm", "qemu"] = setting(
        "auto",
        "auto boots a probe guest once to see whether KVM really works; qemu is TCG",
        why="a /dev/kvm that is there may not work: in a VM, or a container",
    )
    emulator: PathText = setting("/usr/bin/qemu-system-x86_64", "the real QEMU", why="where distributions have it")
    vmwrapper: PathText = setting(
        "/usr/libexec/virtshim/vmwrapper", "what libvirt starts in QEMU's place", why="where the package puts it"
    )
    qemu_user: str = setting(
        "",
        "unprivileged user that QEMU runs as; default: the distribution's own",
        allowed="name",
        why="libvirt's packages make one",
    )
    qemu_group: str = setting(
        "",
        "its group, and all VMs'; default: the distribution's own",
        allowed="name",
        why="the group that /dev/kvm belongs to",
    )
    confine: tuple[Literal["landlock", "seccomp", "core-scheduling"], ...] = setting(
        ("landlock", "seccomp", "core-scheduling"),
        "what holds QEMU back, beside its user",
        allowed="landlock, seccomp, core-scheduling",
        why="all there is; what the kernel lacks is left out",
    )
    parts: tuple[PathText, ...] = setting(
        (),
        "what QEMU may read and run besides: for one in an unusual place",
        allowed="absolute paths",
        why="a distribution's QEMU needs nothing more",
    )
    first_vm_uid: int = setting(
        2_130_706_432,
        "first of the VMs' own user ids",
        ge=65_536,
        le=4_000_000_000,
        why="0x7F000000: outside of what distributions, systemd and directories hand out",
    )
    vm_uids: int = setting(
        65_536,
        "how many there are; 0: all VMs run as `qemu_user`",
        unit="user ids",
        ge=0,
        le=1 << 24,
        why="many times the pods of a node, so that an id rests before it is used again",
    )


class VmProfile(Section):
    """[[vm.profiles]]: annotations under a name. Pods ask for one by `virtshim.io/profile`, or have a RuntimeClass that stands
    for it."""

    name: str = setting(
        ...,
        "what pods call it",
        allowed="letters, digits, and between them - _ .",
        pattern=PROFILE_NAME,
        why="there is no other",
    )
    annotations: dict[str, str] = setting(
        {},
        "annotations of VMs, as pods have them; those that a pod has itself count before these",
        allowed="a table of texts",
        reload=True,
        why="an empty one changes nothing",
    )
    handlers: tuple[str, ...] = setting(
        (),
        "handlers whose pods have it without asking",
        allowed="some of cri.runtime_handlers",
        reload=True,
        why="by name alone",
    )

    @model_validator(mode="after")
    def _annotations_are_known(self) -> Self:
        foreign = sorted(name for name in self.annotations if not is_known(name) or name in _OF_PODS)
        if foreign:
            raise ValueError(f"{', '.join(foreign)}: not of VMs, or for a pod alone to say; docs/pods.md lists them")
        try:
            parse_vm_options(self.annotations)
        except InvalidRequest as exc:
            raise ValueError(str(exc)) from exc
        return self


class Vm(Section):
    """[vm]: sizes and limits. A change by reload holds for containers that are created, resized or started after it."""

    default_memory: ByteSize = setting(
        ByteSize(1 << 30),
        "guest memory of a container without a memory limit",
        unit="bytes",
        reload=True,
        why="what cloud images boot in",
    )
    min_memory: ByteSize = setting(
        ByteSize(32 << 20),
        "a smaller memory limit is refused: no guest boots in it",
        unit="bytes",
        reload=True,
        why="the smallest Linux that boots; a kernel that has no memory says nothing",
    )
    max_vcpus: int = setting(
        64,
        "more vCPUs than this are refused",
        unit="vCPUs",
        ge=1,
        le=255,
        reload=True,
        why="beyond it guests gain little, and QEMU's threads crowd the node",
    )
    room_vcpus: int = setting(
        0,
        "vCPUs a VM can be resized to; 0: what it starts with. A pod may override it",
        unit="vCPUs",
        ge=0,
        le=255,
        reload=True,
        why="room costs memory in each guest, and few are ever resized",
    )
    room_memory: ByteSize = setting(
        ByteSize(0),
        "memory a VM can be resized to; 0: what it starts with. A pod may override it",
        unit="bytes",
        reload=True,
        why="a guest's kernel keeps books (1/64) on all it may get",
    )
    max_root_volume: ByteSize = setting(
        ByteSize(0),
        "a larger VirtletRootVolumeSize, or disk of `virtshim.io/disks`, is refused; 0: up to 64 TiB",
        unit="bytes",
        reload=True,
        why="disks are sparse: kubelet's eviction counts what is used",
    )
    disk_iops: int = setting(
        0,
        "requests a second that each root disk serves at most; 0: as many as it can",
        unit="1/s",
        ge=0,
        why="a limit that nobody chose would look like a slow disk",
    )
    disk_bandwidth: ByteSize = setting(
        ByteSize(0),
        "data a second that each root disk reads and writes at most; 0: as much as it can",
        unit="bytes/s",
        why="a limit that nobody chose would look like a slow disk",
    )
    overhead: ByteSize = setting(
        ByteSize(256 << 20),
        "memory for QEMU beside the guest's, for pods without RuntimeClass overhead",
        unit="bytes",
        reload=True,
        why="what `deploy/runtimeclass.yaml` declares; QEMU was measured at 25 to 100 MiB",
    )
    require_overhead: bool = setting(
        False,
        "refuse pods without RuntimeClass overhead that kubelet starts: their VMs lie beside the pods' cgroups, where eviction "
        "does not see them",
        reload=True,
        why="pods without a RuntimeClass go on working; `virtshim setup` turns it on",
    )
    command: Literal["run", "ignore"] = setting(
        "run",
        "a container's command and args: run in the guest by its agent, or ignored. A pod may override it",
        reload=True,
        why="what a pod says is done; ignore is for images without an agent",
    )
    agent_timeout: float = setting(
        300.0,
        "time after its start for the agent of a guest that is to run a command, or a postStart hook, to answer",
        unit="s",
        gt=0,
        reload=True,
        why="a cloud image's first boot under emulation",
    )
    profiles: tuple[VmProfile, ...] = setting(
        (),
        "sets of annotations for pods that are alike",
        allowed="tables, below",
        reload=True,
        why="each pod says its own",
    )

    @field_validator("profiles")
    @classmethod
    def _each_once(cls, profiles: tuple[VmProfile, ...]) -> tuple[VmProfile, ...]:
        for what, found in (
            ("the name", [one.name for one in profiles]),
            ("the handler", [handler for one in profiles for handler in one.handlers]),
        ):
            if twice := sorted({value for value in found if found.count(value) > 1}):
                raise ValueError(f"two profiles have {what} {', '.join(twice)}; give each its own")
        return profiles


class Volumes(Section):
    """[volumes]: what becomes of a VM whose volumes are not where they should be."""

    unconfirmed: Literal["warn", "fail"] = setting(
        "warn",
        "for a container without a command whose guest's agent does not confirm within `vm.agent_timeout` that the writable "
        "volumes are mounted: a trouble is told, or the container ends. A mount that has failed ends it in either case",
        reload=True,
        why="many images have no agent, and cloud-init has mounted their volumes; fail is for nodes whose guests all have one",
    )
