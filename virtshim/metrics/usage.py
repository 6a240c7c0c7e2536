"""What containers and pods use: one reading for all requested ones, combined with their records. Never writes."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from virtshim.devices.health import DeviceHealth, DeviceStatus
from virtshim.devices.values import PciAddress
from virtshim.disks.ports import RootDisks
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox
from virtshim.model.usage import (
    CpuMeter,
    CpuUsage,
    DiskUsage,
    DomainUsage,
    InterfaceUsage,
    MemoryUsage,
    memory_of,
    total_cpu,
    total_memory,
)
from virtshim.pods.ports import PodNetworks
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import TroubleLog
from virtshim.vm.ports import VmReadings

log = structlog.get_logger(__name__)

# Seconds. Beyond that, a list without the network's numbers is better than a late one.
_NETWORK_LIMIT = 1.0


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """`taken_at`: nanoseconds, for all numbers without a time of their own. For a container that does not run, only the disk and
    its former devices are known. For a running one, a part that could not be read is missing."""

    container: Container
    taken_at: int
    cpu: CpuUsage | None = None
    memory: MemoryUsage | None = None
    disk: DiskUsage | None = None
    domain: DomainUsage = DomainUsage()
    devices: Mapping[PciAddress, DeviceStatus] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """The sum of the pod's VMs, because nothing else runs in a pod. `interfaces`: in the pod's order, its first NIC first; empty
    if they could not be read."""

    sandbox: Sandbox
    taken_at: int
    cpu: CpuUsage | None
    memory: MemoryUsage | None
    interfaces: tuple[InterfaceUsage, ...]
    processes: int
    containers: tuple[ContainerUsage, ...]
    # How often the pod's requests exceeded a limit, by limit.
    refused: Mapping[str, int] = field(default_factory=dict)


class Usage:
    """Thread-safe. One reading serves a whole list, however many VMs it has. Numbers that cannot be read in time are omitted."""

    def __init__(
        self,
        records: Records,
        readings: VmReadings,
        networks: PodNetworks,
        disks: RootDisks,
        devices: DeviceHealth,
        clock: Clock,
        refused: Callable[[str], Mapping[str, int]],
    ) -> None:
        """`refused`: a pod's `namespace/name` -> how often its requests exceeded a limit, by limit."""
        self._records = records
        self._refused = refused
        self._readings = readings
        self._networks = networks
        self._disks = disks
        self._devices = devices
        self._clock = clock
        self._meter = CpuMeter()
        self._lock = threading.Lock()
        self._disk_trouble = TroubleLog(log, over="container.disk_read_again")
        self._network_trouble = TroubleLog(log, over="network.counters_read_again")

    def containers(self, chosen: Sequence[Container]) -> Sequence[ContainerUsage]:
        """In the order of `chosen`."""
        running = [c for c in chosen if c.is_running]
        usages = self._readings.usage({c.domain_uuid: c.domain_name for c in running})
        cpu = self._metered(running, usages)
        return [self._container(c, usages.get(c.domain_uuid), cpu.get(c.id.value)) for c in chosen]

    def process_id(self, container: Container) -> int | None:
        """QEMU's process id; None if it does not run or cannot be found."""
        if not container.is_running:
            return None
        domain = container.domain_uuid
        found = self._readings.usage({domain: container.domain_name}).get(domain)
        return found.process.pid if found and found.process else None

    def sandboxes(self, chosen: Sequence[Sandbox]) -> Sequence[SandboxUsage]:
        """In the order of `chosen`."""
        ids = {sandbox.id for sandbox in chosen}
        members = [c for c in self._records.containers.all() if c.is_visible and c.sandbox_id in ids]
        by_sandbox: dict[SandboxId, list[ContainerUsage]] = {}
        for use in self.containers(members):
            by_sandbox.setdefault(use.container.sandbox_id, []).append(use)
        counters = self._counters(chosen)
        return [self._sandbox(s, by_sandbox.get(s.id, []), counters.get(s.id, ())) for s in chosen]

    def _metered(
        self, running: Sequence[Container], usages: Mapping[uuid.UUID, DomainUsage]
    ) -> Mapping[str, CpuUsage | None]:
        known = [container.id for container in self._records.containers.all()]
        self._disk_trouble.retain_only(known)
        with self._lock:
            self._meter.retain_only(known)
            found = {}
            for container in running:
                usage = usages.get(container.domain_uuid)
                found[container.id.value] = self._meter.take(container.id, usage.counters if usage else None)
            return found

    def _container(self, container: Container, usage: DomainUsage | None, cpu: CpuUsage | None) -> ContainerUsage:
        domain = usage or DomainUsage()
        return ContainerUsage(
            container=container,
            taken_at=self._clock.now_ns(),
            cpu=cpu,
            memory=memory_of(domain, container.config.resources.memory_limit_bytes),
            disk=self._disk(container),
            domain=domain,
            devices=self._devices.statuses(container),
        )

    def _disk(self, container: Container) -> DiskUsage | None:
        try:
            # A pod's disk counts for the container that runs on it, because earlier attempts no longer use it.
            pod_disk = container.spec.pod_disk if container.is_running else ""
            used = self._disks.use(container.id, pod_disk)
        except ShimError as exc:
            self._disk_trouble.met(
                "container.disk_not_read", key=container.id, container=container.id.value, error=str(exc)
            )
            return None
        self._disk_trouble.over(key=container.id, container=container.id.value)
        return used

    def _counters(self, chosen: Sequence[Sandbox]) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        if not any(sandbox.is_ready for sandbox in chosen):
            return {}
        try:
            counters = self._networks.counters(_NETWORK_LIMIT)
        except ShimError as exc:
            self._network_trouble.met("network.counters_not_read", error=str(exc))
            return {}
        self._network_trouble.over()
        return counters

    def _sandbox(
        self, sandbox: Sandbox, containers: Sequence[ContainerUsage], counters: Sequence[InterfaceUsage]
    ) -> SandboxUsage:
        return SandboxUsage(
            sandbox=sandbox,
            taken_at=self._clock.now_ns(),
            cpu=total_cpu(use.cpu for use in containers if use.cpu),
            memory=total_memory(use.memory for use in containers if use.memory),
            interfaces=_in_order(sandbox, counters),
            processes=sum(use.domain.process is not None for use in containers),
            containers=tuple(containers),
            refused=self._refused(sandbox.key.readable),
        )


def _in_order(sandbox: Sandbox, counters: Sequence[InterfaceUsage]) -> tuple[InterfaceUsage, ...]:
    """Empty if the first NIC is missing, because kubelet would take another for the pod's default interface."""
    names = [nic.name for nic in sandbox.network.interfaces] if sandbox.network else []
    by_name = {interface.name: interface for interface in counters}
    if not names or names[0] not in by_name:
        return ()
    return tuple(by_name[name] for name in names if name in by_name)
