"""The container, which is one virtual machine: its record, and which phase may follow which. No I/O."""

from __future__ import annotations

import dataclasses
import enum
import posixpath
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from virtshim.devices.values import CriDevice, GrantedDevices
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId, ImageDigest, ImageId, SandboxId
from virtshim.model.image import ImageConfig
from virtshim.model.troubles import Trouble, text_of_troubles
from virtshim.model.vm import VmSize
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.shares import SharedVolume


class ContainerPhase(enum.Enum):
    """A CREATING row is a journal entry: it is written before disk, seed or domain exist, and callers never see it.
    UNKNOWN: the record cannot be read. Its VM is left alone unless a caller asks for something."""

    CREATING = "creating"
    CREATED = "created"
    RUNNING = "running"
    EXITED = "exited"
    REMOVING = "removing"
    UNKNOWN = "unknown"


_NEXT: Mapping[ContainerPhase, frozenset[ContainerPhase]] = {
    ContainerPhase.CREATING: frozenset({ContainerPhase.CREATED, ContainerPhase.REMOVING}),
    ContainerPhase.CREATED: frozenset({ContainerPhase.RUNNING, ContainerPhase.EXITED, ContainerPhase.REMOVING}),
    ContainerPhase.RUNNING: frozenset({ContainerPhase.EXITED, ContainerPhase.REMOVING}),
    ContainerPhase.EXITED: frozenset({ContainerPhase.REMOVING}),
    ContainerPhase.REMOVING: frozenset({ContainerPhase.REMOVING}),
    ContainerPhase.UNKNOWN: frozenset({ContainerPhase.REMOVING}),
}


class ExitReason(enum.Enum):
    """containerd's reasons, which kubelet and users know."""

    COMPLETED = "Completed"
    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    START_ERROR = "StartError"
    NETWORK_LOST = "NetworkLost"
    SAVED = "Saved"
    MOVED = "Moved"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a container ended."""

    code: int
    reason: ExitReason
    # Nanoseconds since the epoch.
    finished_at: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Resources:
    """LinuxContainerResources, CRI units; 0 or "" mean unset."""

    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    memory_limit_bytes: int = 0
    memory_swap_limit_bytes: int = 0
    oom_score_adj: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    hugepage_limits: Mapping[str, int] = field(default_factory=dict)
    unified: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mount:
    container_path: str
    host_path: str
    readonly: bool = False
    # Whether the guest sees what the node mounts below it later.
    follows: bool = False
    # For the status: a read-only volume is always read-only with everything mounted below it, requested or not.
    recursive_read_only: bool = False
    image: str = ""  # a reference, instead of a host path
    image_sub_path: str = ""  # which directory of it, "" for all


@dataclass(frozen=True, slots=True)
class RunAs:
    """The user of commands in the guest."""

    # A number or a name; "" for the agent's own user, root.
    user: str = ""
    # None: the user's primary group.
    group: int | None = None
    supplementary: tuple[int, ...] = ()
    # Whether the groups that the guest's /etc/group lists for the user are added to the `supplementary` ones.
    own_groups: bool = True
    # Capabilities that commands must not have, in lower case and without "cap_", or "all"; and those to keep of "all".
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    no_new_privs: bool = False


@dataclass(frozen=True, slots=True)
class ProcessUser:
    """The user and groups of a process in the guest, as the guest's numbers. The primary group is among the groups."""

    uid: int
    gid: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """ContainerConfig as kubelet sent it, without what other records hold."""

    # The image reference in the request.
    image: str
    # The image as the pod's spec writes it, shown in the status.
    user_image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    working_dir: str = ""
    envs: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    mounts: tuple[Mount, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Relative to the sandbox's log directory.
    log_path: str = ""
    stdin: bool = False
    stdin_once: bool = False
    tty: bool = False
    # CRI's number of the signal, 0 if unset. It is for the command; a guest without a command gets its power button.
    stop_signal: int = 0
    resources: Resources = Resources()
    user: RunAs = RunAs()
    # Applies to the command.
    readonly_root: bool = False
    devices: tuple[CriDevice, ...] = ()
    # Qualified CDI names, from the field and from the annotations that device plugins made.
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerName:
    """The identity of a container that kubelet keeps when it repeats CreateContainer."""

    name: str
    attempt: int  # the restart count

    def __str__(self) -> str:
        return f"{self.name} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The request, and what CreateContainer made of it on this node. It never changes afterwards."""

    id: ContainerId
    sandbox_id: SandboxId
    name: ContainerName
    config: ContainerConfig
    # The digest of the disk that must stay while this record exists.
    image: ImageDigest
    # What CRI shows as image_ref: the repo digest, or the image's id.
    image_ref: str
    # libvirt's UUID of the VM, as `str(uuid)` writes it. Code that compares all records compares these texts.
    domain_uuid: str
    # Nanoseconds since the epoch.
    created_at: int
    # Absolute path of the CRI log, "" for none.
    log_file: str = ""
    # The parent of its VM's cgroup: the sandbox's cgroup, or the one above.
    cgroup_parent: str = ""
    # The name of its root disk, if the disk stays with the pod; "" if the disk is the container's.
    pod_disk: str = ""
    # The container's command in the guest, () if there is none.
    command: tuple[str, ...] = ()
    # The devices in its VM's definition.
    granted: GrantedDevices = GrantedDevices()
    # The user id of its QEMU, which no other VM has; 0 for libvirt's single user.
    uid: int = 0
    # The user id of its passt, which nothing else has; 0 for a VM with taps.
    passt_uid: int = 0
    # Shared volumes, in the order of their numbers in the guest.
    volumes: tuple[SharedVolume, ...] = ()
    # Volumes that the guest has copies of.
    copies: tuple[CopiedVolume, ...] = ()
    # Volumes in the guest's own memory.
    memory_volumes: tuple[MemoryVolume, ...] = ()
    # Empty disks, those of volumes included, in the order of their mounts.
    empty_disks: tuple[EmptyDisk, ...] = ()
    # Defaults from the image that the pod may override; empty if the pod does not want them.
    image_config: ImageConfig = ImageConfig()
    # Whether its VM's cgroup is beside the pod's own. There kubelet may take it for a pod's, by its name.
    beside_pod: bool = False
    # The VM that it runs, if the VM outlives its pods: its name, "" for none.
    vm: str = ""
    # Whether a stop saves its guest's memory.
    save_on_stop: bool = False
    # The path on the node of the volume that its VM is copied to, "" for none.
    state_volume: str = ""
    # The node that its VM is to come from, "" for none.
    restore_from: str = ""
    # Whether its guest may come from a template that has booted already.
    warm_start: bool = False
    # The image of the container; None in records of versions that only stored the image's disk.
    image_id: ImageId | None = None


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """What has become of the container."""

    phase: ContainerPhase = ContainerPhase.CREATING
    # Nanoseconds since the epoch, 0 until it is started.
    started_at: int = 0
    exit: Exit | None = None
    # What the VM has now.
    size: VmSize = VmSize()
    # The resources after UpdateContainerResources.
    changed: Resources | None = None
    # A change of resources that has begun. It is made or undone completely before this is cleared.
    resizing: Resources | None = None
    # For display: what is wrong with a running container (the texts of `troubles`), or why a record cannot be read.
    trouble: str = ""
    # The file of a checkpoint that is under way, during which virtshim may have paused the VM.
    checkpointing: str = ""
    # Whether the guest agent was told to run the command.
    command_begun: bool = False
    # The user that the command started as, None while unknown.
    user: ProcessUser | None = None
    # Whether a caller wants it stopped, and gave its guest time to end by itself.
    stop_asked: bool = False
    # How the container ends. Written when its command has ended, before its devices are taken from it, or when the VM
    # has ended and other programs still have work to do. The VM ends in any case after that.
    ending: Exit | None = None
    # Whether the guest was asked (or is about to be) to freeze its file systems, and has not confirmed the thaw.
    frozen: bool = False
    # Whether an operator has paused its VM, which then waits until it is resumed or stopped.
    paused: bool = False
    # The claims of the devices that it holds now. No other VM may have them.
    claims: tuple[str, ...] = ()
    # The paths of copied volumes that its guest has confirmed.
    copied: tuple[str, ...] = ()
    # Whether its guest has reported that it could not mount the volumes.
    unmounted: bool = False
    # Whether its guest has reported, at least once, that all volumes and empty disks are mounted.
    mounts_confirmed: bool = False
    # Whether its guest's memory is being saved, during which virtshim has paused the VM.
    saving: bool = False
    # Whether the save is for a new QEMU: the VM may be off meanwhile, and the container does not end.
    renewing: bool = False
    # The container that the guest knows, if it was restored: its command was started as that one's.
    known_as: ContainerId | None = None
    # Whether its VM was restored and may still be paused.
    arriving: bool = False
    # The node that its VM has moved to, "" for none. The VM is off here, and the container runs until it is stopped.
    moved_to: str = ""
    # Whether its guest came from a template, so its memory is partly a file that it shares.
    warm_started: bool = False
    # Problems of the running VM, each kind once. Each was reported in the container's log before it was recorded here.
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """Specification and status, and what follows from them. The state database and the metadata of the VM have the
    fields of both side by side in one flat document."""

    spec: ContainerSpec
    status: ContainerStatus = ContainerStatus()

    @property
    def id(self) -> ContainerId:
        return self.spec.id

    @property
    def sandbox_id(self) -> SandboxId:
        return self.spec.sandbox_id

    @property
    def name(self) -> ContainerName:
        return self.spec.name

    @property
    def config(self) -> ContainerConfig:
        return self.spec.config

    @property
    def image(self) -> ImageDigest:
        return self.spec.image

    @property
    def image_id(self) -> ImageId:
        return self.spec.image_id or ImageId(self.spec.image.value)

    @property
    def created_at(self) -> int:
        return self.spec.created_at

    @property
    def granted(self) -> GrantedDevices:
        return self.spec.granted

    @property
    def domain_uuid(self) -> uuid.UUID:
        return uuid.UUID(self.spec.domain_uuid)

    @property
    def domain_name(self) -> str:
        """libvirt's name of the VM, readable and unique by the id in it. systemd's scopes contain it, so it must not
        look like a pod's cgroup (see `virtshim.model.cgroup`)."""
        unique, readable = self.id.value[:12], re.sub(r"[^A-Za-z0-9_.-]", "-", self.name.name)[:30]
        if self.spec.vm:  # the same in each of its pods: libvirt restores no VM under another name
            unique, readable = self.domain_uuid.hex[:12], re.sub(r"[^A-Za-z0-9_.-]", "-", self.spec.vm)[:30]
        if self.spec.beside_pod and "pod" in readable:
            return f"virtshim-{unique}"
        return f"virtshim-{unique}-{readable}"

    @property
    def log_directory(self) -> str:
        """The part of `log_file` that is the sandbox's log directory; "" if there is no log."""
        return self.spec.log_file.removesuffix(posixpath.normpath(self.config.log_path))

    @property
    def phase(self) -> ContainerPhase:
        return self.status.phase

    @property
    def exit(self) -> Exit | None:
        return self.status.exit

    @property
    def claims(self) -> tuple[str, ...]:
        return self.status.claims

    @property
    def resources(self) -> Resources:
        """The resources that apply now. The config stays as kubelet sent it, because a repeated call is compared with
        it."""
        return self.status.changed or self.config.resources

    @property
    def is_visible(self) -> bool:
        return self.phase is not ContainerPhase.CREATING

    @property
    def is_running(self) -> bool:
        return self.phase is ContainerPhase.RUNNING

    @property
    def was_never_created(self) -> bool:
        """Whether its creation, or the rollback of it, is unfinished. No VM has run for it."""
        undone = self.phase is ContainerPhase.REMOVING and not self.status.started_at and self.exit is None
        return self.phase is ContainerPhase.CREATING or undone

    @property
    def may_be_running(self) -> bool:
        """Whether its VM may be running, including one whose removal or failed start could not be completed."""
        failed_start = self.exit is not None and self.exit.reason is ExitReason.START_ERROR
        on = (ContainerPhase.RUNNING, ContainerPhase.REMOVING, ContainerPhase.UNKNOWN)
        return failed_start or self.phase in on

    @property
    def holds_its_claims(self) -> bool:
        return set(self.granted.claims) <= set(self.claims)

    @property
    def owes_devices(self) -> bool:
        """Whether its VM has ended, but its devices are not ready for others. Until then they belong to this
        container."""
        return self.claims != () and self.phase is ContainerPhase.EXITED and not self.may_be_running

    def _with(self, **changes: Any) -> Container:
        return dataclasses.replace(self, status=dataclasses.replace(self.status, **changes))

    def _to(self, phase: ContainerPhase, **changes: Any) -> Container:
        if phase not in _NEXT[self.phase]:
            raise WrongState(f"container {self.id} is {self.phase.value}: it cannot become {phase.value}")
        return self._with(phase=phase, **changes)

    def created(self) -> Container:
        return self._to(ContainerPhase.CREATED)

    def running(self, started_at: int) -> Container:
        """Keeps times in order even if the wall clock was set back."""
        return self._to(ContainerPhase.RUNNING, started_at=max(started_at, self.created_at))

    def with_warm_start(self, *, begun: bool) -> Container:
        """`begun`: whether the guest comes from a template; False after a failed start from one."""
        return self._with(warm_started=begun)

    def exited(self, how: Exit) -> Container:
        """Keeps the claims until the devices are ready for others."""
        return self._to(ContainerPhase.EXITED, exit=self._in_order(how), paused=False)

    def removing(self, how: Exit | None = None) -> Container:
        """`how`: how it ended, if it ran when its removal began."""
        return self._to(ContainerPhase.REMOVING, exit=self._in_order(how) if how else self.exit)

    def _in_order(self, how: Exit) -> Exit:
        return dataclasses.replace(how, finished_at=max(how.finished_at, self.status.started_at, self.created_at))

    def with_troubles(self, troubles: tuple[Trouble, ...]) -> Container:
        return self._with(troubles=troubles, trouble=text_of_troubles(troubles))

    def with_checkpoint(self, location: str) -> Container:
        """Notes a checkpoint that writes to `location`; "" ends it."""
        return self._with(checkpointing=location)

    def with_saving(self, *, saving: bool, renewing: bool = False) -> Container:
        return self._with(saving=saving, renewing=renewing)

    def moved(self, node: str) -> Container:
        """Stays `saving`, so that nobody takes the VM for one that runs or has ended."""
        return self._with(moved_to=node, saving=True)

    def awaited(self) -> Container:
        """The container's guest is on its way from another node."""
        return self._with(arriving=True)

    def arrived(self) -> Container:
        return self._with(arriving=False)

    def continuing(self, known_as: ContainerId, *, command_begun: bool, user: ProcessUser | None) -> Container:
        """The guest is that of an earlier container, whose command continues."""
        return self._with(
            known_as=known_as, command_begun=command_begun, user=user, arriving=True, saving=False, renewing=False
        )

    @property
    def unusable(self) -> str:
        """Why nobody may act on its guest now, "" if that is not so."""
        if self.status.moved_to:
            return f"has moved to node {self.status.moved_to}"
        if self.status.saving:
            return "is being saved or moved; try again later"
        return "is arriving from another node; try again later" if self.status.arriving else ""

    @property
    def guest_id(self) -> ContainerId:
        """The container that its guest knows."""
        return self.status.known_as or self.id

    def with_command_begun(self) -> Container:
        return self._with(command_begun=True)

    def with_ending(self, how: Exit) -> Container:
        return self._with(ending=how)

    def resized(self, resources: Resources, size: VmSize) -> Container:
        return self._with(changed=resources, size=size, resizing=None)

    def with_claims(self, claims: tuple[str, ...]) -> Container:
        """`claims`: the devices that it holds now. If some of its granted devices are missing, its VM is off and must not
        start."""
        return self._with(claims=claims)

    def asked_to_stop(self) -> Container:
        return self._with(stop_asked=True)
