"""Ports to VMs: how use cases define, run, read, change and move them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.ids import ContainerId
from virtshim.model.usage import DomainUsage
from virtshim.model.vm import OwnedDomain, PowerState, VmSpec
from virtshim.vm.guest_needs import GuestNeeds, QemuHere, SavedMemory
from virtshim.vm.streams import StreamState


class Hypervisor(Protocol):
    """Virtual machines. Errors: Unavailable (libvirt cannot be reached), NotFound, WrongState, InternalError."""

    def define(self, spec: VmSpec) -> None:
        """Defines the domain, with our owner mark. Replaces our earlier definition of the same UUID. AlreadyExists if a foreign
        domain has the UUID or the name."""

    def start(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        """Boots the VM; returns when QEMU runs. WrongState if the VM runs already. `container`: NotFound if the definition
        belongs to another container by now, because a VM that outlives its pods keeps its UUID."""

    def restore(self, domain: uuid.UUID, container: ContainerId, memory: str, moved: Mapping[str, str]) -> None:
        """Continues a VM that is defined and off from the file `memory`, which `VmPausing.save_memory` wrote. Returns when
        QEMU has read it; the VM is paused. `moved`: for each directory of the saved container, the directory that this
        container has instead. WrongState if the state is another VM's, or does not fit the definition. After an error the VM
        is off, or `destroy` ends it."""

    def await_memory(self, domain: uuid.UUID, container: ContainerId, theirs: str, moved: Mapping[str, str]) -> None:
        """Starts a VM that is defined and off, for a guest of another node. Returns when QEMU waits for the guest's memory
        (`MemoryStreams.receive`); the VM is paused. `theirs`: what `MemoryStreams.definition` returned on the other
        node. `moved`: as for `restore`. WrongState if the two definitions cannot be of one VM."""

    def accept_disks(self, domain: uuid.UUID, container: ContainerId, their_images: str, images: str) -> None:
        """Corrects the headers of disks that came from another node, where images are below `their_images`. On this node images
        are below `images`. Raises WrongState if a header still names other files than the definition."""

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        """Presses the ACPI power button. No error if the VM is off or gone. Waits only seconds for a VM that hangs."""

    def destroy(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Ends QEMU now. When this returns, no process holds the VM's devices or the files of its volumes. No error if the VM is
        off or gone. No error either if it is another container's: if a pod chooses its VM's UUID, all its attempts have it."""

    def undefine(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Removes the definition of a domain that is off. No error if the domain is gone or another container's."""

    def power(self, domain: uuid.UUID) -> PowerState:
        """Reads the state from libvirt, never from memory. ABSENT if there is no such domain."""

    def owned(self) -> Sequence[OwnedDomain]:
        """All domains that carry this node's mark."""

    def watching(self, domain: uuid.UUID) -> AbstractContextManager[threading.Event]:
        """Yields an event that is set at each life-cycle event of the domain. Enter before acting, and read `power` after an
        event."""

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        """`callback` is called from one worker thread (never libvirt's event thread) for each life-cycle event."""

    def trouble(self) -> str:
        """Why VMs cannot run now, for people; "" if they can. Answers at once, from memory."""


class VmUnplugging(Protocol):
    """Unplugs the host's devices from VMs. Errors: as Hypervisor."""

    def unplug(self, domain: uuid.UUID, container: ContainerId, timeout: float) -> Sequence[str]:
        """Asks the guest to release all its PCI host devices, and waits at most `timeout` seconds. Returns display names of the
        devices that the VM still has: () if it had none, or has ended. Does not ask a paused guest. May be called again before
        the guest has answered."""


class VmReadings(Protocol):
    """Reads what VMs use. Raises nothing; numbers that are not available are left out."""

    def usage(self, wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        """`wanted`: UUIDs and names of VMs (see VmSpec). Makes one call to libvirt for all of them, and answers within 3 s
        even if libvirt or a VM hangs, then with numbers from other sources. Leaves out VMs that are off."""


class VmResizing(Protocol):
    """Resizes an existing VM and its definition, so a VM that is off starts with the new size. Errors: as Hypervisor; also
    WrongState for a size that this VM cannot have until it is recreated."""

    def add_vcpus(self, domain: uuid.UUID, count: int) -> None:
        """Adds vCPUs up to `count`; removes none."""

    def set_memory(self, domain: uuid.UUID, memory_bytes: int, timeout: float, cancelled: threading.Event) -> None:
        """Sets the guest's memory, by the balloon. Returns when a running guest has released the rest. WrongState if the guest
        does not release it in time, Aborted if `cancelled` is set. After either error the guest's memory is unchanged."""

    def memory_in_use(self, domain: uuid.UUID, cancelled: threading.Event) -> int | None:
        """Bytes that the guest cannot release now. The guest needs a second or two to answer; None if it does not (off, no
        balloon driver, or it hangs). Aborted if `cancelled` is set."""

    def set_limits(self, domain: uuid.UUID, limits: CgroupLimits) -> None:
        """Changes the limits if libvirt manages the VM's cgroup. Otherwise only changes the CPUs of vCPUs that are pinned
        because the guest has NUMA nodes."""


class VmPlugging(Protocol):
    """Plugs ports into a running VM. Errors: as `Hypervisor`."""

    def plug_in(self, domain: uuid.UUID, container: ContainerId, number: int, socket: str) -> None:
        """Adds a serial port for commands, like those of the VmSpec, until the VM ends. WrongState if the VM is off;
        another error if it has no room. After an error `socket` may exist."""

    def agent_listens(self, domain: uuid.UUID, container: ContainerId) -> bool:
        """Whether the guest has the agent's port open, according to libvirt, to which QEMU reports each change."""


class VmControl(Protocol):
    """What operators do with VMs, and news of guest agents. Errors: as `Hypervisor`."""

    def reset(self, domain: uuid.UUID) -> None:
        """Presses the reset button. WrongState if the VM is off."""

    def definition(self, domain: uuid.UUID) -> str:
        """libvirt's current XML, without the secrets that give access to the pod's network."""

    def on_agent(self, callback: Callable[[uuid.UUID], None]) -> None:
        """`callback` is called from a separate thread when a guest's agent has answered on a new connection, and when
        `look_for_agent` has found it."""

    def look_for_agent(self, domain: uuid.UUID) -> None:
        """Calls the callbacks of `on_agent`, from their thread, if a program in the guest has the agent's port open."""


class Screenshots(Protocol):
    """Takes pictures of VMs' screens."""

    def take(self, container: ContainerId, timeout: float) -> bytes:
        """A PNG file. Errors: Unavailable (no such screen, or it does not answer), DeadlineExceeded, InternalError."""


class VmPausing(Protocol):
    """Pauses and resumes VMs. Errors: as Hypervisor; DeadlineExceeded, within seconds, if QEMU does not answer. `container`: if
    the VM belongs to another container by now, the call behaves as if there were no VM."""

    def pause(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        """WrongState if the VM is not running. After any error it is not paused, or not for long."""

    def resume(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        """Resumes a paused VM, which repeats failed writes. No error if the VM is not paused, off or gone."""

    def set_links(self, domain: uuid.UUID, container: ContainerId, *, up: bool) -> None:
        """Plugs the cable of each of the VM's NICs in, or out. No error if the VM has none. WrongState if the VM is off."""

    def out_of_space(self, domain: uuid.UUID) -> bool:
        """Whether the VM is paused only because its disk had no room."""

    def save_memory(
        self,
        domain: uuid.UUID,
        path: str,
        timeout: float,
        container: ContainerId | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        """Writes memory and devices of a VM that we paused to the new file `path`, as `virsh save` does. Only root may read
        the file. The VM stays paused. DeadlineExceeded if it takes longer than `timeout`, or `hurry` is set; Aborted if the VM
        ends meanwhile; then no file is left."""


class MemoryStreams(Protocol):
    """Moves a guest's memory out of a QEMU and into another one. Errors: as Hypervisor; DeadlineExceeded if QEMU does not
    answer."""

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        """The definition of a running VM, for `Hypervisor.await_memory`; without secrets."""

    def blockers(self, domain: uuid.UUID, container: ContainerId) -> tuple[str, ...]:
        """What prevents QEMU from moving this VM, in QEMU's own words."""

    def needs(self, domain: uuid.UUID, container: ContainerId) -> GuestNeeds:
        """What a running VM needs from the QEMU of its next node."""

    def saved(self, memory: str) -> SavedMemory:
        """The contents of a file that `VmPausing.save_memory` wrote. From `begins_at` on, the file has the format that `send`
        writes. Raises WrongState."""

    def here(self, needs: GuestNeeds) -> QemuHere:
        """What this node's QEMU has of it."""

    def send(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        """Begins to write memory and devices to the descriptor `pipe`; `state` says how far it is. A running guest runs on until
        little is left. Then it is stopped, and QEMU waits for `go_on`. After a failure QEMU resumes a guest that it has
        stopped."""

    def can_copy_while_running(self, domain: uuid.UUID, container: ContainerId) -> bool:
        """Whether `send` finds all that the guest writes meanwhile. Otherwise the guest must be paused first."""

    def leave_memory_out(self, domain: uuid.UUID, container: ContainerId, *, left_out: bool) -> None:
        """Sets whether later `send` and `receive` calls leave the memory out and transfer only devices. Memory that is
        a file stays where it is."""

    def go_on(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Writes the rest of a `send` that has stopped the guest."""

    def receive(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        """Begins to read what `send` wrote. The VM stays paused."""

    def state(self, domain: uuid.UUID, container: ContainerId) -> StreamState:
        """The state of the last `send` or `receive`."""

    def cancel(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Ends a `send` that is under way. No error if there is none."""


class CheckpointFiles(Protocol):
    """Writes checkpoints' archives. The files of each are collected in a directory beside it. Only root may read them. Errors:
    InvalidRequest (unsuitable location), ResourceExhausted (no room), InternalError. `check` is called now and then, and may
    raise to stop the work."""

    def begin(self, location: str, container: ContainerId) -> str:
        """Makes the empty directory and returns its path. InvalidRequest unless `location` is absolute and its directory
        exists."""

    def copy(self, source: str, target: str, check: Callable[[], None]) -> None:
        """Copies a file, and shares blocks if the file system can."""

    def finish(self, location: str, container: ContainerId, manifest: bytes, check: Callable[[], None]) -> None:
        """Writes the manifest and then all files of the directory as a tar file at `location`, completely or not at all."""

    def discard(self, location: str, container: ContainerId) -> None:
        """Removes the directory; a finished archive stays."""
