"""Pausing and resuming VMs, and checkpoints of them."""

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

# Virtual machines: their power, their numbers, their size.


class Hypervisor(Protocol):
    """Virtual machines. Errors: Unavailable (libvirt cannot be reached), NotFound, WrongState, InternalError."""

    def define(self, spec: VmSpec) -> None:
        """Makes the domain, with our owner mark; replaces an earlier definition of the same UUID that is ours. A UUID or
        name of a foreign domain is AlreadyExists."""

    def start(self, domain: uuid.UUID) -> None:
        """Boots it; returns when QEMU runs. WrongState if it runs already."""

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        """ACPI power button. No error if it is off or gone already. Waits a moment only for a VM that hangs."""

    def destroy(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Ends QEMU now. No error if it is off or gone, or another container's: a pod may choose the UUID of its VM, and
        then all attempts have the same. Nothing holds its devices and its volumes' files any more when this returns."""

    def undefine(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Removes the definition of a domain that is off. No error if it is gone or another container's."""

    def power(self, domain: uuid.UUID) -> PowerState:
        """Read from libvirt, never from memory. ABSENT if there is no such domain."""

    def owned(self) -> Sequence[OwnedDomain]:
        """All domains that carry this node's mark."""

    def watching(self, domain: uuid.UUID) -> AbstractContextManager[threading.Event]:
        """An event that is set at each life-cycle event of the domain. Enter before acting; an event is a hint: read
        `power` after it."""

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        """`callback` is called from one worker thread (never libvirt's event thread) for each life-cycle event."""

    def trouble(self) -> str:
        """Why VMs cannot be run now, for people; "" if they can. Answers at once, from memory."""


class VmUnplugging(Protocol):
    """Devices of the host that a VM has. Errors: as Hypervisor."""

    def unplug(self, domain: uuid.UUID, container: ContainerId, timeout: float) -> Sequence[str]:
        """Asks the guest to release all its PCI host devices, and waits at most `timeout` seconds; what it releases is the
        VM's no more. Returns names of those it still has, for display: () if there were none, or it ended. A guest that
        is paused is not asked. May be called again, also while the guest has not answered yet."""


class VmReadings(Protocol):
    """What VMs use. Raises nothing: numbers that cannot be had are left out."""

    def usage(self, wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        """`wanted` are UUIDs and names of VMs (those of their VmSpec). One call of libvirt's for all of them, and an answer
        within 3 s also when libvirt or a VM hangs: then with what else is known of it. VMs that are off are not in it."""


class VmResizing(Protocol):
    """Changes of a VM that exists; its definition changes with it, so a VM that is off starts with the new size. Errors:
    as Hypervisor; WrongState also for what this VM cannot have while it exists."""

    def add_vcpus(self, domain: uuid.UUID, count: int) -> None:
        """Brings it to `count` vCPUs; none is taken away."""

    def set_memory(self, domain: uuid.UUID, memory_bytes: int, timeout: float, cancelled: threading.Event) -> None:
        """Guest memory, by the balloon. Returns when a running guest has given back what it is to give back; if it has
        not within the time, WrongState, or when `cancelled` is set, Aborted, and its memory is what it was."""

    def memory_in_use(self, domain: uuid.UUID, cancelled: threading.Event) -> int | None:
        """Bytes that the guest cannot give back now: it is asked, which takes a second or two. None if it does not say (off,
        no balloon driver, or it hangs); Aborted when `cancelled` is set."""

    def set_limits(self, domain: uuid.UUID, limits: CgroupLimits) -> None:
        """Changes the limits where libvirt manages the VM's cgroup; elsewhere the CPUs of vCPUs that a NUMA node of the guest's
        holds to some, and nothing else."""


class VmPlugging(Protocol):
    """Devices of a VM that runs. Errors: as `Hypervisor`."""

    def plug_in(self, domain: uuid.UUID, container: ContainerId, number: int, socket: str) -> None:
        """One more serial port for commands, as those of its VmSpec; it goes with the VM. WrongState if it is off; another
        error if it has room for no more. After an error a file may be at `socket`."""

    def agent_listens(self, domain: uuid.UUID, container: ContainerId) -> bool:
        """Whether the guest has the agent's port open. Read from libvirt, which QEMU tells of each change."""


# What an operator does with a VM by hand.


class VmControl(Protocol):
    """Errors: as `virtshim.vm.ports.Hypervisor`."""

    def reset(self, domain: uuid.UUID) -> None:
        """The reset button. WrongState if it is off."""

    def definition(self, domain: uuid.UUID) -> str:
        """libvirt's XML of it as it is now, without what opens the pod's network."""

    def on_agent(self, callback: Callable[[uuid.UUID], None]) -> None:
        """`callback` is called, from a thread of its own, when a guest's agent has answered on a new connection."""


class Screenshots(Protocol):
    """VMs' screens as they are now."""

    def take(self, container: ContainerId, timeout: float) -> bytes:
        """A PNG file. Errors: Unavailable (no such screen, or it does not answer), DeadlineExceeded, InternalError."""


class VmPausing(Protocol):
    """Pauses and resumes VMs. Errors: as Hypervisor; DeadlineExceeded, within seconds, if its QEMU does not answer."""

    def pause(self, domain: uuid.UUID) -> None:
        """WrongState if it is not running. After any error it is not paused, or not for long."""

    def resume(self, domain: uuid.UUID) -> None:
        """A paused one goes on; a write that failed is tried again. No error if it is not paused, off or gone."""

    def out_of_space(self, domain: uuid.UUID) -> bool:
        """Whether it is paused because there was no room for its disk, and for no other reason."""

    def save_memory(self, domain: uuid.UUID, path: str, timeout: float) -> None:
        """Writes memory and devices of a VM that we paused to the new file `path`, root's alone, as `virsh save` does. It
        stays paused. DeadlineExceeded if it takes longer than `timeout`, Aborted if the VM ends meanwhile; then no
        file is left."""


class CheckpointFiles(Protocol):
    """Archives of checkpoints, and the directory that each is gathered in beside it. All is root's alone. Errors:
    InvalidRequest (no place for an archive), ResourceExhausted (no room), InternalError. `check` is called now and then and
    may raise, to end it."""

    def begin(self, location: str, container: ContainerId) -> str:
        """An empty directory, its path. InvalidRequest unless `location` is absolute and in a directory that is there."""

    def copy(self, source: str, target: str, check: Callable[[], None]) -> None:
        """A copy that shares blocks where the file system can."""

    def finish(self, location: str, container: ContainerId, manifest: bytes, check: Callable[[], None]) -> None:
        """All files of the directory, and the manifest first, as one tar file at `location`: whole or not at all."""

    def discard(self, location: str, container: ContainerId) -> None:
        """Removes the directory; the archive stays if it was finished."""
