"""libvirt's statistics of running VMs, in one call. One that is being started or ended is not asked: libvirt has it locked, and a
call that asks for it waits until libvirt is through, with the numbers of all others."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Final

import libvirt

from virtshim.hypervisor.connection import Connection
from virtshim.hypervisor.errors import code_of
from virtshim.hypervisor.stats.busy_vms import BusyVms
from virtshim.hypervisor.stats.counters import Stats

# No interface statistics: NICs are passed as file descriptors, libvirt does not know of them.
_GROUPS: Final = (
    libvirt.VIR_DOMAIN_STATS_STATE
    | libvirt.VIR_DOMAIN_STATS_CPU_TOTAL
    | libvirt.VIR_DOMAIN_STATS_BALLOON
    | libvirt.VIR_DOMAIN_STATS_VCPU
    | libvirt.VIR_DOMAIN_STATS_BLOCK
)
_FLAGS: Final = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE | libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT

# Handles of VMs that nobody asks for any more are dropped when there are so many.
_SPARE: Final = 64


class VmStatistics:
    """Thread-safe. A VM's handle is looked up once: that is a call by itself, and a list of numbers is one."""

    def __init__(self, connection: Connection, busy: BusyVms) -> None:
        self._connection = connection
        self._busy = busy
        self._conn: libvirt.virConnect | None = None
        self._handles: dict[uuid.UUID, libvirt.virDomain] = {}

    def read(self, wanted: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Stats]:
        """VMs that are off are not in it. Raises ShimError."""
        with self._connection.using("read the statistics of VMs") as conn:
            asked = self._handles_of(conn, self._busy.others(wanted))
            # An empty list would mean all.
            rows = conn.domainListGetStats(list(asked.values()), _GROUPS, _FLAGS) if asked else []
            found = {uuid.UUID(domain.UUIDString()): stats for domain, stats in rows}
        for off in asked.keys() - found.keys():
            self._handles.pop(off, None)
        return found

    def _handles_of(
        self, conn: libvirt.virConnect, wanted: Collection[uuid.UUID]
    ) -> Mapping[uuid.UUID, libvirt.virDomain]:
        handles = self._handles
        if self._conn is not conn or len(handles) > len(wanted) + _SPARE:
            self._conn, self._handles = conn, {}
            handles = self._handles
        for domain in wanted:
            if domain not in handles:
                try:
                    handles[domain] = conn.lookupByUUID(domain.bytes)
                except libvirt.libvirtError as exc:
                    if code_of(exc) != libvirt.VIR_ERR_NO_DOMAIN:
                        raise
        return {domain: handles[domain] for domain in wanted if domain in handles}
