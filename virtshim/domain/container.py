"""The container, which is one virtual machine: its record, and which phase may follow which. No I/O."""

from __future__ import annotations

import dataclasses
import enum
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from virtshim.domain.devices.granted import CriDevice, GrantedDevices
from virtshim.domain.errors import WrongState
from virtshim.domain.ids import ContainerId, ImageDigest, SandboxId
from virtshim.domain.vm import VmSize


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
    """How a container ended. `finished_at` in nanoseconds since the epoch."""

    code: int
    reason: ExitReason
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


@dataclass(frozen=True, slots=True)
class RunAs:
    """Who commands run as in the guest. `user`: a number or a name, "" for the agent's own, root. `group` None: the user's
    own. `own_groups`: those that the guest's /etc/group gives the user, beside the `supplementary` ones."""

    user: str = ""
    group: int | None = None
    supplementary: tuple[int, ...] = ()
    own_groups: bool = True


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """ContainerConfig as kubelet sent it, without what the other records hold. `image` is the reference in the request,
    `user_image` the text of the pod spec (shown in status), `log_path` relative to the sandbox's log directory.
    `stop_signal` is CRI's number for it, 0 if unset; a guest gets its power button instead. `cdi`: qualified names, from the
    field and from the annotations that device plugins made."""

    image: str
    user_image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    working_dir: str = ""
    envs: tuple[tuple[str, bytes], ...] = ()
    mounts: tuple[Mount, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    log_path: str = ""
    stdin: bool = False
    stdin_once: bool = False
    tty: bool = False
    stop_signal: int = 0
    resources: Resources = Resources()
    user: RunAs = RunAs()
    devices: tuple[CriDevice, ...] = ()
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerName:
    """What kubelet repeats when it repeats CreateContainer. `attempt` is the restart count."""

    name: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.name} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class Container:
    """Times are nanoseconds since the epoch, 0 while it has not happened. `image_ref` is the repo digest (or the id)
    shown as image_ref; `image` names the disk that must stay while this record is there. `log_file` is absolute.
    `cgroup_parent` is its sandbox's, `changed` what UpdateContainerResources made of the config's resources.
    `trouble`: why a running one is stuck, for display. `pod_disk`: the name of its root disk, if that is the pod's
    and not its own. `checkpointing`: the file a checkpoint is being written to; meanwhile we may have paused the VM.
    `command` is what runs in the guest as the container's own, () if nothing does; `command_begun`: the agent was told to
    run it; `ending` is written before its VM is ended because of that, or its devices are taken from it: then that is how
    the container ended, and the VM ends whatever happens. `frozen`: the
    guest was asked, or about to be asked, to freeze its file systems, and has not confirmed the thaw. `granted`: the
    devices its VM was defined with; `claims`: those that it holds now: no other VM may have them."""

    id: ContainerId
    sandbox_id: SandboxId
    name: ContainerName
    config: ContainerConfig
    image: ImageDigest
    image_ref: str
    domain_uuid: str
    created_at: int
    log_file: str = ""
    phase: ContainerPhase = ContainerPhase.CREATING
    started_at: int = 0
    exit: Exit | None = None
    cgroup_parent: str = ""
    size: VmSize = VmSize()
    changed: Resources | None = None
    trouble: str = ""
    pod_disk: str = ""
    checkpointing: str = ""
    command: tuple[str, ...] = ()
    command_begun: bool = False
    ending: Exit | None = None
    frozen: bool = False
    granted: GrantedDevices = GrantedDevices()
    claims: tuple[str, ...] = ()

    def _to(self, phase: ContainerPhase) -> Container:
        if phase not in _NEXT[self.phase]:
            raise WrongState(f"container {self.id} is {self.phase.value}: it cannot become {phase.value}")
        return dataclasses.replace(self, phase=phase)

    def created(self) -> Container:
        return self._to(ContainerPhase.CREATED)

    def running(self, started_at: int) -> Container:
        """Times stay in order, also when the wall clock was set back."""
        return dataclasses.replace(self._to(ContainerPhase.RUNNING), started_at=max(started_at, self.created_at))

    def exited(self, how: Exit) -> Container:
        """Its claims stay until its devices are fit for others."""
        at = max(how.finished_at, self.started_at, self.created_at)
        return dataclasses.replace(self._to(ContainerPhase.EXITED), exit=dataclasses.replace(how, finished_at=at))

    def with_trouble(self, trouble: str) -> Container:
        return dataclasses.replace(self, trouble=trouble)

    def with_checkpoint(self, location: str) -> Container:
        """ "" ends it."""
        return dataclasses.replace(self, checkpointing=location)

    def with_command_begun(self) -> Container:
        return dataclasses.replace(self, command_begun=True)

    def with_ending(self, how: Exit) -> Container:
        return dataclasses.replace(self, ending=how)

    def removing(self) -> Container:
        return self._to(ContainerPhase.REMOVING)

    def ended_by_removal(self, how: Exit) -> Container:
        """It ran when its removal began."""
        at = max(how.finished_at, self.started_at, self.created_at)
        return dataclasses.replace(self.removing(), exit=dataclasses.replace(how, finished_at=at))

    def resized(self, resources: Resources, size: VmSize) -> Container:
        return dataclasses.replace(self, changed=resources, size=size)

    @property
    def resources(self) -> Resources:
        """What holds now. The config stays as kubelet sent it: it is compared when kubelet repeats itself."""
        return self.changed or self.config.resources

    @property
    def domain_name(self) -> str:
        """libvirt's name of the VM: for people first; unique by the id in it."""
        readable = re.sub(r"[^A-Za-z0-9_.-]", "-", self.name.name)[:30]
        return f"virtshim-{self.id.value[:12]}-{readable}"

    @property
    def holds_its_claims(self) -> bool:
        return set(self.granted.claims) <= set(self.claims)

    @property
    def is_visible(self) -> bool:
        return self.phase is not ContainerPhase.CREATING

    @property
    def was_never_created(self) -> bool:
        """Its creation, or the rollback of it, was not finished. No VM has run for it."""
        undone = self.phase is ContainerPhase.REMOVING and not self.started_at and self.exit is None
        return self.phase is ContainerPhase.CREATING or undone

    @property
    def log_directory(self) -> str:
        """The part of `log_file` that is the sandbox's log directory; "" if there is no log."""
        return self.log_file and self.log_file.removesuffix(posixpath.normpath(self.config.log_path))

    @property
    def may_be_running(self) -> bool:
        """Whether its VM may be running, including one whose removal or failed start could not be completed."""
        failed_start = self.exit is not None and self.exit.reason is ExitReason.START_ERROR
        on = (ContainerPhase.RUNNING, ContainerPhase.REMOVING, ContainerPhase.UNKNOWN)
        return failed_start or self.phase in on

    @property
    def owes_devices(self) -> bool:
        """Its VM has ended, and the devices that it had are not fit for others yet: they are its own until then."""
        return self.claims != () and self.phase is ContainerPhase.EXITED and not self.may_be_running


def without_claims(container: Container) -> Container:
    """Without its claims: its VM is off, and is not started while it lacks one."""
    return dataclasses.replace(container, claims=())
