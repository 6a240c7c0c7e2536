"""What running VMs use: implements `virtshim.ports.hypervisor.VmReadings` by libvirt's statistics, /proc and cgroups."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from virtshim.domain.usage import DomainUsage
from virtshim.hypervisor import qemu_process
from virtshim.hypervisor.stats import cgroup_usage
from virtshim.hypervisor.stats.bulk import BulkStats
from virtshim.hypervisor.stats.cgroup_usage import CgroupTree
from virtshim.hypervisor.stats.counters import to_counters


class LibvirtReadings:
    """`pid_directory` is where libvirt keeps QEMU's process ids, "" if nowhere."""

    def __init__(self, stats: BulkStats, pid_directory: str, tree: CgroupTree | None = None) -> None:
        self._stats = stats
        self._pids = pid_directory
        self._tree = tree or CgroupTree()

    def usage(self, wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        if not wanted:
            return {}
        taken_at, rows = self._stats.latest(wanted.keys())
        found = {}
        for domain, name in wanted.items():
            stats = rows.get(domain)
            pid = qemu_process.find(self._pids, name, domain) if self._pids else None
            if stats is None and pid is None:
                continue
            found[domain] = DomainUsage(
                counters=None if stats is None else to_counters(stats, taken_at),
                process=None if pid is None else qemu_process.usage_of(pid),
                cgroup=None if pid is None else cgroup_usage.usage_of(pid, self._tree),
            )
        return found
