"""The pod sandbox: its record, its phases, its RuntimeClass handler, and the names of its lasting root disks. No
I/O."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from virtshim.model.cgroup import beside, is_pods_own
from virtshim.model.container import Resources
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.ids import ImageDigest, SandboxId
from virtshim.model.network import Dns, PodNetwork
from virtshim.model.vm import DiskBus

# The record, and which phase may follow which.


def check_handler(asked: str, known: Collection[str], pod_handlers: Collection[str] = ()) -> None:
    """Refuses an unknown handler. `asked`: the RuntimeClass's handler, "" for the default. `pod_handlers`: handlers of pods
    whose sandbox another runtime makes. Raises InvalidRequest."""
    if asked in pod_handlers:
        raise InvalidRequest(
            f"runtime_handler {asked!r} is for pods whose sandbox another runtime makes, with a virtual machine and containers; "
            "run the pod through the socket of `virtshim proxy`, or use the RuntimeClass virtshim"
        )
    if asked and asked not in known:
        raise InvalidRequest(
            f"runtime_handler {asked[:300]!r} is not known on this node (known: {', '.join(sorted(known)) or 'none'}); "
            "add it to cri.runtime_handlers or correct the RuntimeClass"
        )


def refuse_without_overhead(config: SandboxConfig, *, shared: bool = False) -> None:
    """Raises InvalidRequest for a pod whose VMs would be beside its cgroup. `shared`: it has containers beside its VM."""
    if config.vms_lie_beside:
        needs = "a pod with containers beside its VM needs" if shared else "this node requires (vm.require_overhead)"
        raise InvalidRequest(
            f"the pod has no memory overhead, which {needs}: its virtual machine would be outside the pod's cgroup, and under "
            "memory pressure kubelet would evict other pods first; give it a runtimeClassName whose RuntimeClass has "
            f"overhead.podFixed.memory, such as virtshim{'-pod' if shared else ''}"
        )


class SandboxPhase(enum.Enum):
    """A CREATING row is a journal entry: it is written before the network is touched, and callers never see it.

    CRI shows READY as SANDBOX_READY and everything later as SANDBOX_NOTREADY.
    """

    CREATING = "creating"
    READY = "ready"
    NOT_READY = "not-ready"
    REMOVING = "removing"


_NEXT: Mapping[SandboxPhase, frozenset[SandboxPhase]] = {
    SandboxPhase.CREATING: frozenset({SandboxPhase.READY, SandboxPhase.NOT_READY, SandboxPhase.REMOVING}),
    SandboxPhase.READY: frozenset({SandboxPhase.NOT_READY, SandboxPhase.REMOVING}),
    SandboxPhase.NOT_READY: frozenset({SandboxPhase.NOT_READY, SandboxPhase.REMOVING}),
    SandboxPhase.REMOVING: frozenset({SandboxPhase.REMOVING}),
}


@dataclass(frozen=True, slots=True, order=True)
class PodKey:
    """The identity of a pod that kubelet keeps when it repeats RunPodSandbox. At most one live sandbox has it."""

    namespace: str
    name: str
    uid: str
    attempt: int

    def is_same_pod(self, other: PodKey) -> bool:
        """Whether it is the same pod, in any attempt."""
        return (self.namespace, self.name, self.uid) == (other.namespace, other.name, other.uid)

    @property
    def readable(self) -> str:
        """The name that users of kubectl know."""
        return f"{self.namespace}/{self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name} (uid {self.uid}, attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class PortMapping:
    """`protocol`: tcp, udp or sctp. `host_port`: 0 for no host port."""

    protocol: str
    container_port: int
    host_port: int
    host_ip: str


class NamespaceScope(enum.Enum):
    """Who shares a namespace."""

    POD = "pod"
    CONTAINER = "container"


@dataclass(frozen=True, slots=True)
class Namespaces:
    """As the pod requested. A guest shares all of them anyway, but kubelet compares what is reported."""

    network: NamespaceScope = NamespaceScope.POD
    pid: NamespaceScope = NamespaceScope.CONTAINER
    ipc: NamespaceScope = NamespaceScope.POD


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """PodSandboxConfig as kubelet sent it. Labels and annotations must come back byte for byte, because kubelet finds
    its pods by them. `overhead`: of the RuntimeClass, for QEMU. `resources`: the sum of the containers'."""

    hostname: str = ""
    log_directory: str = ""
    dns: Dns = Dns()
    port_mappings: tuple[PortMapping, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict, repr=False)
    cgroup_parent: str = ""
    runtime_handler: str = ""
    overhead: Resources = Resources()
    resources: Resources = Resources()
    namespaces: Namespaces = Namespaces()
    # For the guest's kernel.
    sysctls: Mapping[str, str] = field(default_factory=dict)

    @property
    def vms_lie_beside(self) -> bool:
        """Whether the VMs' cgroups are beside the pod's own. Without an overhead, kubelet limits the pod's cgroup to what
        the guest may use, with nothing for QEMU, and the kernel would kill the VM as soon as its guest uses all its
        memory."""
        return not self.overhead.memory_limit_bytes and is_pods_own(self.cgroup_parent)


@dataclass(frozen=True, slots=True)
class Adoption:
    """What virtshim knows of a sandbox that another runtime made. `netns`: the path of its network namespace. `addresses`:
    the pod's IPs, the primary one first."""

    netns: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """`created_at`: nanoseconds since the epoch, constant, and strictly increasing over sandboxes. `root_disks`: for
    disks that stay for the pod's life, container name -> the image under the disk. Each sandbox of the pod has them, so
    that the last one knows what to remove. `changed_*`: the config's values after UpdatePodSandboxResources.
    `disk_bus`: the default bus of disks; records of earlier versions lack it, and guests of those pods may know their
    disks by SCSI's names. `profile`: the annotations of its profile when it was made. A record of an earlier version
    may have `sole_container`, which is ignored."""

    id: SandboxId
    key: PodKey
    config: SandboxConfig
    created_at: int
    phase: SandboxPhase = SandboxPhase.CREATING
    network: PodNetwork | None = None
    network_released: bool = False
    reason: str = ""
    changed_overhead: Resources | None = None
    changed_resources: Resources | None = None
    root_disks: Mapping[str, ImageDigest] = field(default_factory=dict)
    disk_bus: DiskBus = DiskBus.SCSI
    profile: Mapping[str, str] = field(default_factory=dict)
    # Set for a sandbox that another runtime made; `id` is then that runtime's id.
    adopted: Adoption | None = None

    @property
    def vm_annotations(self) -> Mapping[str, str]:
        """The annotations for its VMs: the pod's own, and those of its profile that the pod does not have."""
        return {**self.profile, **self.config.annotations}

    def _to(self, phase: SandboxPhase) -> Sandbox:
        if phase not in _NEXT[self.phase]:
            raise WrongState(f"sandbox {self.id} is {self.phase.value}: it cannot become {phase.value}")
        return dataclasses.replace(self, phase=phase)

    def ready(self, network: PodNetwork) -> Sandbox:
        return dataclasses.replace(self._to(SandboxPhase.READY), network=network)

    def adopted_again(self, network: PodNetwork) -> Sandbox:
        """Of an adopted sandbox that was lost, or stopped here alone: the runtime that made it still has it."""
        return dataclasses.replace(self, phase=SandboxPhase.READY, network=network, network_released=False, reason="")

    def not_ready(self, reason: str) -> Sandbox:
        """Keeps the first reason, because it explains what happened."""
        return dataclasses.replace(self._to(SandboxPhase.NOT_READY), reason=self.reason or reason)

    def refuse_if_ready(self) -> None:
        """Raises WrongState. For the last steps of a sandbox's end, which wait without its lock before."""
        if self.is_ready:
            raise WrongState(f"sandbox {self.id} was adopted again meanwhile; repeat the call")

    def with_root_disk(self, container: str, image: ImageDigest) -> Sandbox:
        return dataclasses.replace(self, root_disks={**self.root_disks, container: image})

    def with_network_released(self) -> Sandbox:
        """The network is known to be gone."""
        return dataclasses.replace(self, network_released=True)

    def removing(self) -> Sandbox:
        return self._to(SandboxPhase.REMOVING)

    def resized(self, overhead: Resources, resources: Resources) -> Sandbox:
        return dataclasses.replace(self, changed_overhead=overhead, changed_resources=resources)

    @property
    def overhead(self) -> Resources:
        """The value that applies now."""
        return self.changed_overhead or self.config.overhead

    @property
    def resources(self) -> Resources:
        """The value that applies now."""
        return self.changed_resources or self.config.resources

    @property
    def vm_cgroup_parent(self) -> str:
        """The parent of new VMs' cgroups."""
        return beside(self.config.cgroup_parent) if self.config.vms_lie_beside else self.config.cgroup_parent

    @property
    def is_ready(self) -> bool:
        return self.phase is SandboxPhase.READY

    @property
    def is_made(self) -> bool:
        """A sandbox that is being created is in no list, because its caller does not have its id yet."""
        return self.phase is not SandboxPhase.CREATING

    @property
    def is_visible(self) -> bool:
        """Whether lists, statuses and events of CRI show it. The runtime that made an adopted sandbox shows it."""
        return self.is_made and self.adopted is None


# The VM has the name of its pod, as a StatefulSet's pods keep theirs.
BY_POD_NAME: Final = "by-pod-name"
# The directory of the VMs that outlive their pods, and the first part of their disks' names.
VMS: Final = "vms"

_NAMESPACE: Final = uuid.UUID("6d0a4d6e-0a3f-5b3c-9a55-7669727470ee")


def pod_hash(pod: PodKey) -> str:
    """64 hex digits, equal for all sandboxes of one pod. Names are hashed, because a CRI client may send any text."""
    return _digest(f"{pod.namespace}\0{pod.name}\0{pod.uid}")


def disk_name(pod: PodKey, container: str) -> str:
    """`POD/DISK`, the same for all attempts of that container."""
    return f"{pod_hash(pod)}/{_digest(container)}"


def vm_name(asked: str, pod: PodKey) -> str:
    """The name of the pod's VM, as `virtshim.io/vm` asks for it; "" if the VM ends with its pod."""
    return pod.name if asked == BY_POD_NAME else asked


def vm_disk_name(namespace: str, vm: str, container: str) -> str:
    """The name of the root disk of a VM that outlives its pods. Namespace, name and container name identify the VM."""
    named = _digest(f"{namespace}\x00{vm}\x00{container}")
    return f"{VMS}/{named}/root"


def owner_of(disk: str) -> str:
    """What owns the disk: the pod's hash, or the VM's directory."""
    return disk.rpartition("/")[0]


def identity(disk: str) -> str:
    """The identity of the disk with that name: 20 hex digits."""
    return _digest(disk)[:20]


def vm_uuid(disk: str) -> uuid.UUID:
    """The UUID of all VMs that run on that disk, because a TPM beside the disk belongs to a UUID."""
    return uuid.uuid5(_NAMESPACE, disk)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
