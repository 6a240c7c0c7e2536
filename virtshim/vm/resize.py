"""Resizes existing VMs; implements `virtshim.vm.ports.VmResizing`.

It changes the running VM first and then its definition, so that a refusal leaves both unchanged.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import cast

import libvirt

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.errors import Aborted, WrongState
from virtshim.model.sizing import numbers_in
from virtshim.vm.bounded import BoundedCalls
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, live_cpu, live_memory
from virtshim.vm.elements.small_devices import BALLOON_STATS_SECONDS
from virtshim.vm.own_domains import OwnDomains

_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_CONFIG = libvirt.VIR_DOMAIN_AFFECT_CONFIG

# Polling is faster than libvirt's event, which QEMU sends at most once a second.
_BALLOON_POLL = 0.1
# If a guest releases nothing for these seconds, it has nothing to spare.
_STALLED = 5.0
# A guest stops a few pages before the target.
_BALLOON_TOLERANCE = 1 << 20
# Seconds; a working QEMU answers much sooner.
_ANSWER_TIMEOUT = 10.0


class LibvirtResizing(OwnDomains):
    """Thread-safe."""

    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        super().__init__(connection, profile)
        self._changing = BoundedCalls("change the size of")
        self._reading = BoundedCalls("read the memory of")

    def add_vcpus(self, domain: uuid.UUID, count: int) -> None:
        self._changing.call(domain, lambda: self._add_vcpus(domain, count), _ANSWER_TIMEOUT)

    def set_memory(self, domain: uuid.UUID, memory_bytes: int, timeout: float, cancelled: threading.Event) -> None:

        def change() -> None:
            self._set_memory(domain, memory_bytes, timeout, cancelled)

        self._changing.call(domain, change, timeout + _ANSWER_TIMEOUT)

    def memory_in_use(self, domain: uuid.UUID, cancelled: threading.Event) -> int | None:
        return self._reading.call(domain, lambda: self._memory_in_use(domain, cancelled), _STALLED + _ANSWER_TIMEOUT)

    def _add_vcpus(self, domain: uuid.UUID, count: int) -> None:
        with self._using(domain, "add vCPUs to") as found:
            most = found.vcpusFlags(_CONFIG | libvirt.VIR_DOMAIN_VCPU_MAXIMUM)
            if count > most:
                raise WrongState(f"VM {domain} can have {most} vCPUs, not {count}; recreate the pod")
            for scope in _scopes(found):
                if found.vcpusFlags(scope) < count:
                    found.setVcpusFlags(count, scope)

    def _set_memory(self, domain: uuid.UUID, memory_bytes: int, timeout: float, cancelled: threading.Event) -> None:
        with self._using(domain, "change the memory of") as found:
            most = found.maxMemory() << 10
            if memory_bytes > most:
                raise WrongState(f"VM {domain} can have {most} bytes of memory, not {memory_bytes}; recreate the pod")
            if found.isActive():
                self._inflate(found, memory_bytes, timeout, cancelled)
            found.setMemoryFlags(memory_bytes >> 10, _CONFIG)

    def _inflate(self, found: libvirt.virDomain, memory_bytes: int, timeout: float, cancelled: threading.Event) -> None:
        before = has = _actual(found)
        found.setMemoryFlags(memory_bytes >> 10, _LIVE)
        moved = started = time.monotonic()
        while self._profile.domain_type.has_guest and has > memory_bytes + _BALLOON_TOLERANCE:
            now = time.monotonic()
            if now >= started + timeout or now >= moved + _STALLED:
                found.setMemoryFlags(before >> 10, _LIVE)
                raise WrongState(
                    f"the guest of VM {found.name()} does not release memory: it still has {has} bytes, {memory_bytes} were "
                    "requested; free some in the guest, or restart the pod"
                )
            if cancelled.wait(_BALLOON_POLL):
                found.setMemoryFlags(before >> 10, _LIVE)
                raise Aborted(f"the memory of VM {found.name()} is unchanged, because the VM is being stopped")
            last, has = has, _actual(found)
            moved = time.monotonic() if has < last else moved

    def _memory_in_use(self, domain: uuid.UUID, cancelled: threading.Event) -> int | None:
        with self._using(domain, "read the memory of") as found:
            if not found.isActive():
                return None
            stats = _fresh_stats(found, cancelled)
        # What the kernel could give without swapping; older guests only report free pages.
        spare = stats.get("usable", stats.get("unused"))
        if spare is None or "actual" not in stats:
            return None
        # `actual` includes the guest kernel's own memory, which is in use, but is not part of "available".
        return (stats["actual"] - spare) << 10

    def set_limits(self, domain: uuid.UUID, limits: CgroupLimits) -> None:
        if self._profile.cgroups is not Cgroups.OFF or limits.cpuset_cpus:
            self._changing.call(domain, lambda: self._set_limits(domain, limits), _ANSWER_TIMEOUT)

    def _set_limits(self, domain: uuid.UUID, limits: CgroupLimits) -> None:
        with self._using(domain, "change the limits of") as found:
            if self._profile.cgroups is Cgroups.OFF:
                # The kernel never runs a pinned thread on its group's other CPUs.
                if "<vcpupin" in found.XMLDesc():
                    self._pin(found, limits.cpuset_cpus)
                return
            for scope in _scopes(found):
                found.setSchedulerParametersFlags(live_cpu(limits, self._profile.cgroups), scope)
                found.setMemoryParameters(live_memory(limits, self._profile.cgroups), scope)
            if limits.cpuset_cpus:
                self._pin(found, limits.cpuset_cpus)

    def _pin(self, found: libvirt.virDomain, cpus: str) -> None:
        chosen = numbers_in(cpus)
        node = cast("list[int]", found.connect().getInfo())  # type: ignore[no-untyped-call]  # the maps are annotated as bytes
        online = cast("bytes", tuple(number in chosen for number in range(node[2])))
        for scope in _scopes(found):
            # After its restart kubelet sends the same CPUs again, and the cells' pins must stay.
            if _pinned_to(found, scope) != chosen:
                for vcpu in range(found.vcpusFlags(scope | libvirt.VIR_DOMAIN_VCPU_MAXIMUM)):  # also those to come
                    found.pinVcpuFlags(vcpu, online, scope)
            if self._profile.cgroups is not Cgroups.OFF:
                found.pinEmulator(online, scope)


def _scopes(domain: libvirt.virDomain) -> tuple[int, ...]:
    return (_LIVE, _CONFIG) if domain.isActive() else (_CONFIG,)


def _pinned_to(domain: libvirt.virDomain, scope: int) -> frozenset[int]:
    """The CPUs that any vCPU may run on."""
    maps = cast("list[tuple[bool, ...]]", domain.vcpuPinInfo(scope))
    return frozenset(cpu for allowed in maps for cpu, is_allowed in enumerate(allowed) if is_allowed)


def _fresh_stats(domain: libvirt.virDomain, cancelled: threading.Event) -> dict[str, int]:
    """New readings of the guest's memory; empty if the guest stays silent. Old readings will not do, because the balloon may have
    moved since: the new `actual` with an old `usable` could show room in a full guest, and its kernel would kill programs."""
    old = _stats(domain)
    if "usable" not in old and "unused" not in old:
        return {}
    domain.setMemoryStatsPeriod(1, _LIVE)
    try:
        until = time.monotonic() + _STALLED
        while (now := _stats(domain)).get("last_update") == old.get("last_update"):
            if cancelled.wait(_BALLOON_POLL):
                raise Aborted(f"the memory of VM {domain.name()} is unchanged, because the VM is being stopped")
            if time.monotonic() >= until:
                return {}
        return now
    finally:
        domain.setMemoryStatsPeriod(BALLOON_STATS_SECONDS, _LIVE)


def _stats(domain: libvirt.virDomain) -> dict[str, int]:
    return cast("dict[str, int]", domain.memoryStats())  # libvirt-python's annotation says str


def _actual(domain: libvirt.virDomain) -> int:
    """Bytes that the guest has now, according to the balloon."""
    return _stats(domain)["actual"] << 10
