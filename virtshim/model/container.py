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
from virtshim.model.troubles import Trouble, told_together
from virtshim.model.vm import VmSize
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.shares import SharedVolume


class ContainerPhase(enum.Enum):
    """CREATING rows are a journal: written before disk, seed or domain exist, never shown to callers. UNKNOWN: the record
    cannot be read. Its VM is left alone except for what a caller asks for."""

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
    """containerd's reason texts, which kubelet and users know."""

    COMPLETED = "Completed"
    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    START_ERROR = "StartError"
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
    # What the node mounts below it later is seen, too.
    follows: bool = False
    # For the status: what is read-only is so with all that is mounted below it, asked for or not.
    recursive_read_only: bool = False
    image: str = ""  # a reference, in place of a host path
    image_sub_path: str = ""  # which directory of it, "" for all


@dataclass(frozen=True, slots=True)
class RunAs:
    """Who commands run as in the guest."""

    # A number or a name; "" for the agent's own, root.
    user: str = ""
    # None: the user's own.
    group: int | None = None
    supplementary: tuple[int, ...] = ()
    # Whether the groups that the guest's /etc/group gives the user come beside the `supplementary` ones.
    own_groups: bool = True
    # Capabilities, in lower case and without "cap_", or "all": what commands must not have, and what is left of "all".
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    no_new_privs: bool = False


@dataclass(frozen=True, slots=True)
class ProcessUser:
    """Who a process in the guest is, in the guest's own numbers. The groups begin with the group: a process is in it, too."""

    uid: int
    gid: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """ContainerConfig as kubelet sent it, without what the other records hold."""

    # The reference in the request.
    image: str
    # The text of the pod spec, shown in status.
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
    # CRI's number for it, 0 if unset. It is for the command; a guest without one gets its power button.
    stop_signal: int = 0
    resources: Resources = Resources()
    user: RunAs = RunAs()
    # For the command.
    readonly_root: bool = False
    devices: tuple[CriDevice, ...] = ()
    # Qualified CDI names, from the field and from the annotations that device plugins made.
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerName:
    """What kubelet repeats when it repeats CreateContainer."""

    name: str
    attempt: int  # the restart count

    def __str__(self) -> str:
        return f"{self.name} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What was asked for, and what that came to on this node: decided by CreateContainer, and never changed after it."""

    id: ContainerId
    sandbox_id: SandboxId
    name: ContainerName
    config: ContainerConfig
    # Names the disk that must stay while this record is there.
    image: ImageDigest
    # What CRI shows as image_ref: the repo digest, or the image's id.
    image_ref: str
    # libvirt's UUID of the VM.
    domain_uuid: str
    # Nanoseconds since the epoch.
    created_at: int
    # Absolute path of the CRI log, "" if none is wanted.
    log_file: str = ""
    # What its VM's cgroup is made in: the sandbox's, or the one that this is in.
    cgroup_parent: str = ""
    # The name of its root disk, if that is the pod's and not its own.
    pod_disk: str = ""
    # What runs in the guest as the container's own, () if nothing does.
    command: tuple[str, ...] = ()
    # The devices that its VM is defined with.
    granted: GrantedDevices = GrantedDevices()
    # The user id that its QEMU runs as, and no other VM's; 0: the one that libvirt runs all as.
    uid: int = 0
    # The volumes that its guest has, as they are numbered there.
    volumes: tuple[SharedVolume, ...] = ()
    # Those that it has copies of.
    copies: tuple[CopiedVolume, ...] = ()
    # Those that are in the guest's own memory.
    memory_volumes: tuple[MemoryVolume, ...] = ()
    # Those that are empty disks, and the others that it asks for, as they are mounted.
    empty_disks: tuple[EmptyDisk, ...] = ()
    # What its image says and the pod may leave out; nothing if the pod does not want it.
    image_config: ImageConfig = ImageConfig()
    # Its VM's cgroup lies beside the pod's own, where kubelet looks at names.
    beside_pod: bool = False
    # The image it was made of; None in records of the time when that was known by its disk.
    image_id: ImageId | None = None


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """What became of it."""

    phase: ContainerPhase = ContainerPhase.CREATING
    # Nanoseconds since the epoch, 0 while it has not been started.
    started_at: int = 0
    exit: Exit | None = None
    # What the VM has now.
    size: VmSize = VmSize()
    # What UpdateContainerResources made of the config's resources.
    changed: Resources | None = None
    # A change of them that has begun: all of it or nothing of it is made before this goes.
    resizing: Resources | None = None
    # What is wrong with a running one, for display: the texts of `troubles`. Of a record that cannot be read: why.
    trouble: str = ""
    # The file that a checkpoint is being written to; meanwhile we may have paused the VM.
    checkpointing: str = ""
    # The guest agent was told to run the command.
    command_begun: bool = False
    # Who the command began as; None while that is not known.
    user: ProcessUser | None = None
    # A caller wants it stopped, and gave its guest time to end by itself.
    stop_asked: bool = False
    # Written before its VM is ended because its command has ended, or before its devices are taken from it, or when the VM has
    # ended and others are still to be through with it: that is how the container ended then, and the VM ends whatever happens.
    ending: Exit | None = None
    # The guest was asked, or is about to be asked, to freeze its file systems, and has not confirmed the thaw.
    frozen: bool = False
    # An operator has paused its VM; it stands still until it is resumed, or stopped.
    paused: bool = False
    # The devices that it holds now: no other VM may have them.
    claims: tuple[str, ...] = ()
    # The paths of those copied volumes that its guest has said it has.
    copied: tuple[str, ...] = ()
    # Its guest has said that it could not mount the volumes.
    unmounted: bool = False
    # Its guest has said, at least once, that all volumes and empty disks are mounted.
    mounts_confirmed: bool = False
    # What is wrong with it while it runs, each kind once; each was told in its log before it was written here.
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """Both, and what follows from them. In the state database, and in the metadata of its VM, the fields of both lie side by side
    in one flat document."""

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
        """libvirt's name of the VM: for people first; unique by the id in it. systemd's scopes have it in theirs: beside the
        pods' cgroups it must not read like one of a pod (see `virtshim.model.cgroup`)."""
        readable = re.sub(r"[^A-Za-z0-9_.-]", "-", self.name.name)[:30]
        if self.spec.beside_pod and "pod" in readable:
            return f"virtshim-{self.id.value[:12]}"
        return f"virtshim-{self.id.value[:12]}-{readable}"

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
        """What holds now. The config stays as kubelet sent it: it is compared when kubelet repeats itself."""
        return self.status.changed or self.config.resources

    @property
    def is_visible(self) -> bool:
        return self.phase is not ContainerPhase.CREATING

    @property
    def is_running(self) -> bool:
        return self.phase is ContainerPhase.RUNNING

    @property
    def was_never_created(self) -> bool:
        """Its creation, or the rollback of it, was not finished. No VM has run for it."""
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
        """Its VM has ended, and the devices that it had are not fit for others yet: they are its own until then."""
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
        """Times stay in order, also when the wall clock was set back."""
        return self._to(ContainerPhase.RUNNING, started_at=max(started_at, self.created_at))

    def exited(self, how: Exit) -> Container:
        """Its claims stay until its devices are fit for others."""
        return self._to(ContainerPhase.EXITED, exit=self._in_order(how), paused=False)

    def removing(self, how: Exit | None = None) -> Container:
        """`how` it ended, if it ran when its removal began."""
        return self._to(ContainerPhase.REMOVING, exit=self._in_order(how) if how else self.exit)

    def _in_order(self, how: Exit) -> Exit:
        return dataclasses.replace(how, finished_at=max(how.finished_at, self.status.started_at, self.created_at))

    def with_troubles(self, troubles: tuple[Trouble, ...]) -> Container:
        return self._with(troubles=troubles, trouble=told_together(troubles))

    def with_checkpoint(self, location: str) -> Container:
        """ "" ends it."""
        return self._with(checkpointing=location)

    def with_command_begun(self) -> Container:
        return self._with(command_begun=True)

    def with_ending(self, how: Exit) -> Container:
        return self._with(ending=how)

    def resized(self, resources: Resources, size: VmSize) -> Container:
        return self._with(changed=resources, size=size, resizing=None)

    def with_claims(self, claims: tuple[str, ...]) -> Container:
        """A VM that lacks one of those it was granted is off, and is not started."""
        return self._with(claims=claims)


def asked_to_stop(container: Container) -> Container:
    return dataclasses.replace(container, status=dataclasses.replace(container.status, stop_asked=True))
