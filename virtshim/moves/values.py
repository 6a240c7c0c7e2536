"""VMs that outlive their pods: the record of each, and the rules for saved states. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from virtshim.annotations.names import ON_STOP_ANNOTATION
from virtshim.devices.values import GrantedDevices
from virtshim.guest.command import OutputPosition
from virtshim.model.container import Container, ContainerSpec, ProcessUser
from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.network import taps_of
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.moves.fingerprints import Fingerprint
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.shares import SharedVolume

# The name of a guest's memory in its VM's directory.
MEMORY_FILE: Final = "memory.save"


@dataclass(frozen=True, slots=True)
class SavedLimits:
    """`keep`: seconds until a saved state is discarded. `most`: bytes that all states may take together; 0 for no limit.
    `key_file`: the path of the key that seals states on volumes; "" if there are none."""

    keep: float = 86400.0
    most: int = 0
    key_file: str = ""

    def until(self, since: int) -> int:
        """When files that nobody has used since then are discarded. Both in nanoseconds since the epoch."""
        return since + int(self.keep * 10**9)


@dataclass(frozen=True, slots=True)
class SavedState:
    """The memory of a guest whose VM is off. It fits the VM's disks as they were at that moment, so it is worth nothing
    as soon as a guest has run on them again."""

    # The container and the sandbox that the guest ran in.
    container: ContainerId
    sandbox: SandboxId
    # Nanoseconds since the epoch.
    saved_at: int
    bytes: int
    # The container that the guest knows: it names the directory of the command in the guest.
    known_as: ContainerId
    command_begun: bool = False
    read_to: OutputPosition = OutputPosition()
    user: ProcessUser | None = None
    # The container whose VM continues from this state. Written before its guest runs: the state is then used up.
    taken_by: ContainerId | None = None
    # The sandbox in which it could not be restored. The next attempt there boots.
    failed_in: SandboxId | None = None
    # Whether an operator saved it. Then a restart in the same sandbox continues, too.
    by_operator: bool = False
    # Whether its own container continues from it, in a new QEMU.
    renewing: bool = False
    # Fingerprints of its disks by their paths in the pod, "" for the root disk. Empty in records of versions without the field.
    disks: Mapping[str, Fingerprint] = field(default_factory=dict)
    # The guest's addresses, as in `VmRecord.addresses`. Empty in records of versions without the field.
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The directories of its container and of its VM in its definition. Empty in records of versions without the field.
    directories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OnVolume:
    """What this node knows of the copy on the VM's state volume."""

    # How often the VM had been started, on all nodes, when the files of this node were its newest.
    generation: int = 0
    # The random name of that start.
    start: str = ""
    # When the volume got all that this node has, in nanoseconds since the epoch; 0 if it lacks something.
    published_at: int = 0
    # Where the volume was at the last start on this node, and that start's sandbox.
    path: str = ""
    sandbox: SandboxId | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A VM that another node has and this node will get. `node`: the name of the other node."""

    node: str
    # The random name of the last attempt, "" before the first one.
    move: str = ""
    # The guest's state when all of the VM had arrived on this node's disk. From then on, only the other node knows whether the
    # guest may run here.
    state: SavedState | None = None


@dataclass(frozen=True, slots=True)
class Departure:
    """A VM that has moved to another node. It never runs here again, unless it comes back. `at`: nanoseconds since the epoch."""

    node: str
    move: str
    at: int


@dataclass(frozen=True, slots=True)
class VmRecord:
    """`disk`: the name of its root disk, which is the identity. `macs`: the MACs of its NICs, by the name of the interface in the
    pod. `addresses`: the addresses that its last pod had there, as CIDRs."""

    disk: str
    namespace: str
    name: str
    container: str
    # The digest of the image under its root disk.
    image: ImageDigest
    created_at: int
    macs: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    saved: SavedState | None = None
    # When a state was discarded because no pod had used it, in nanoseconds since the epoch. 0 once a container's log says so.
    lapsed_at: int = 0
    volume: OnVolume = OnVolume()
    # What this node does not have of the VM, because it ran elsewhere. "" once a container's log says so.
    lost: str = ""
    # If the VM is here, neither is set. While it comes back to this node, both are set.
    arrival: Arrival | None = None
    departure: Departure | None = None

    @property
    def is_here(self) -> bool:
        return self.arrival is None and self.departure is None

    @property
    def has_left(self) -> bool:
        """Whether the VM has moved to another node, and no pod here has asked for it since."""
        return self.departure is not None and self.arrival is None

    @property
    def readable(self) -> str:
        return f"{self.namespace}/{self.name}/{self.container}"

    def state_left_by(self, container: ContainerId) -> SavedState | None:
        """The state that this container's guest was saved to, if it counts. This guest then never runs again."""
        state = self.saved
        return state if state is not None and state.container == container and state.taken_by is None else None

    def with_state(self, state: SavedState | None) -> VmRecord:
        return dataclasses.replace(self, saved=state)

    def lapsed(self, at: int) -> VmRecord:
        return dataclasses.replace(self, saved=None, lapsed_at=at)

    def forgotten(self) -> VmRecord:
        """The record just before the removal of the VM's files: whatever remains of them counts as older than any copy on a
        volume."""
        return dataclasses.replace(self, saved=None, volume=OnVolume(published_at=1))

    def arrived(self, state: SavedState | None, *, lost: str) -> VmRecord:
        """The record of a VM that has arrived on this node."""
        return dataclasses.replace(self, arrival=None, departure=None, saved=state, lost=lost)

    def booted(self) -> VmRecord:
        """The record after a boot: without a saved state, and without messages about one."""
        return dataclasses.replace(self, saved=None, lapsed_at=0, lost="")


@dataclass(frozen=True, slots=True)
class Brought:
    """What a state volume says about a VM."""

    volume: OnVolume = OnVolume()
    lost: str = ""


def restorable(vm: VmRecord | None, container: Container) -> SavedState | None:
    """The state that this container's VM continues from. CRI gives no reason for a stop, so a container that is started
    again in the sandbox where it was saved boots: somebody wants it restarted. If an operator saved it, it continues."""
    state = vm.saved if vm is not None else None
    if state is None or state.taken_by is not None or container.sandbox_id == state.failed_in:
        return None
    if container.sandbox_id == state.sandbox and not state.by_operator:
        return None
    if state.renewing and container.spec.empty_disks:  # the guest's empty disks went with its container
        return None
    return state


def unrenewable(granted: GrantedDevices, volumes: Sequence[SharedVolume]) -> str:
    """What QEMU cannot save of such a VM, and the remedy; "" if all can be saved."""
    if granted.passthrough:
        return f"host devices ({', '.join(granted.claims)}), whose state stays in the device; remove them"
    if volumes:
        return (
            f"the shared volume {escaped(volumes[0].guest, 200)}, whose daemon's state QEMU cannot save; use the root disk, "
            "a disk image in the volume (virtshim.io/disk-images), a block volume, or volumes that are copied (configMap, secret)"
        )
    return ""


def unsavable(granted: GrantedDevices, volumes: Sequence[SharedVolume], empty_disks: Sequence[EmptyDisk]) -> str:
    """What QEMU cannot save of such a VM, or what goes with the container, and the remedy; "" if all can be saved."""
    if what := unrenewable(granted, volumes):
        return what
    if empty_disks:
        return f"{empty_disks[0].field_name()}, a disk that goes with the container; use the root disk"
    return ""


_BESIDE_CONTAINERS: Final = "containers beside it, which share its network (passt); use the RuntimeClass virtshim"


def unrenewable_vm(spec: ContainerSpec) -> str:
    """Like `unrenewable`, for the VM of a container."""
    return _BESIDE_CONTAINERS if spec.passt_uid else unrenewable(spec.granted, spec.volumes)


def unsavable_vm(spec: ContainerSpec) -> str:
    """Like `unsavable`, for the VM of a container."""
    return _BESIDE_CONTAINERS if spec.passt_uid else unsavable(spec.granted, spec.volumes, spec.empty_disks)


def refuse_unsavable(
    granted: GrantedDevices, volumes: Sequence[SharedVolume], empty_disks: Sequence[EmptyDisk]
) -> None:
    """Raises InvalidRequest for a VM that cannot be saved."""
    if what := unsavable(granted, volumes, empty_disks):
        raise InvalidRequest(f"annotation {ON_STOP_ANNOTATION}: save is impossible with {what}")


def without_foreign_macs(vm: VmRecord, sandbox: Sandbox) -> VmRecord:
    """The record without its saved state, if the guest's NICs had other MACs on the node that saved it: this node would drop the
    guest's frames. Otherwise the record as it is."""
    other = [nic for nic in taps_of(sandbox.network) if vm.macs.get(nic.name, nic.mac) != nic.mac]
    if vm.saved is None or not other:
        return vm
    why = f"its NIC {other[0].name} has the MAC {other[0].mac} on this node, and had {vm.macs[other[0].name]}"
    return dataclasses.replace(vm, saved=None, lost=f"{why}, so its memory is discarded")


def with_nics(vm: VmRecord, sandbox: Sandbox) -> VmRecord:
    """The VM with the MACs and addresses of this pod's NICs that are taps."""
    nics = taps_of(sandbox.network)
    return dataclasses.replace(
        vm,
        macs={**vm.macs, **{nic.name: nic.mac for nic in nics}},
        addresses={**vm.addresses, **{nic.name: nic.addresses for nic in nics}},
    )


def has_new_addresses(state: SavedState, vm: VmRecord) -> bool:
    """Whether a guest that continues from the state has other addresses than its pod. `vm`: the record of the pod's VM."""
    return any(vm.addresses.get(name, had) != had for name, had in state.addresses.items())
