"""Statistics of virtual machines in memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

from fakes.hypervisor import FakeHypervisor

from virtshim.model.usage import BlockUsage, DomainUsage, GuestMemory, ProcessUsage, VcpuUsage, VmCounters

MIB = 1 << 20


def process_usage(pid: int = 4711) -> ProcessUsage:
    return ProcessUsage(
        pid=pid,
        anon=150 * MIB,
        file=20 * MIB,
        shmem=0,
        swap=0,
        peak_resident=180 * MIB,
        threads=5,
        minor_faults=900,
        major_faults=3,
        descriptors=31,
        sockets=7,
        max_descriptors=1024,
    )


class FakeReadings:
    """Implements `virtshim.vm.ports.VmReadings` over a FakeHypervisor. `cpu` is each VM's CPU time, which grows by a
    tenth of a second with every reading. libvirt reports nothing of a VM in `silent`, and with `hung` nothing of any
    VM. The guest of a VM in `unreported` has not reported its memory yet."""

    def __init__(self, hypervisor: FakeHypervisor, now: Callable[[], int]) -> None:
        self.cpu: dict[uuid.UUID, int] = {}
        self.silent: set[uuid.UUID] = set()
        self.unreported: set[uuid.UUID] = set()
        self.hung = False
        self.calls = 0
        self.blocks: tuple[BlockUsage, ...] = (
            BlockUsage("vda", 10, 40960, 1_000_000, 5, 20480, 2_000_000, 1, 500_000),
        )
        self._hypervisor = hypervisor
        self._now = now

    def usage(self, wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        self.calls += 1
        running = {domain.uuid for domain in self._hypervisor.owned_now() if domain.state.is_on}
        return {
            domain: DomainUsage(
                counters=None if self.hung or domain in self.silent else self._counters(domain),
                process=process_usage(),
            )
            for domain in wanted
            if domain in running
        }

    def _counters(self, domain: uuid.UUID) -> VmCounters:
        self.cpu[domain] = self.cpu.get(domain, 0) + 100_000_000
        return VmCounters(
            taken_at=self._now(),
            cpu=self.cpu[domain],
            cpu_user=self.cpu[domain] // 2,
            cpu_system=self.cpu[domain] // 2,
            vcpus=(VcpuUsage(0, self.cpu[domain], 0, 5_000_000),),
            memory=GuestMemory(
                maximum=128 * MIB,
                current=128 * MIB,
                available=None if domain in self.unreported else 120 * MIB,
                unused=None if domain in self.unreported else 80 * MIB,
                usable=None if domain in self.unreported else 90 * MIB,
                disk_caches=10 * MIB,
                swap_in=0,
                swap_out=0,
                major_faults=100,
                minor_faults=4000,
            ),
            blocks=self.blocks,
        )
