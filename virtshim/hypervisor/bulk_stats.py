"""One libvirt call for the statistics of all running VMs, which returns in time whatever libvirt and the VMs do.

A QEMU that does not answer its monitor holds up the call that asks it, for ever, and with it the numbers of all other
VMs. But that call also holds the VM's job lock, and a call with NOWAIT skips the monitor of a VM whose lock is taken. So a
call that is late is left behind on its thread, and the next one gets everything else.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final

import libvirt
import structlog

from virtshim.domain.errors import ShimError
from virtshim.hypervisor.connection import Connection
from virtshim.hypervisor.stats_plan import Stats

log = structlog.get_logger(__name__)

Read = Callable[[], Mapping[uuid.UUID, Stats]]

# No interface numbers: the NICs come by descriptor, libvirt does not know of them.
_GROUPS: Final = (
    libvirt.VIR_DOMAIN_STATS_STATE
    | libvirt.VIR_DOMAIN_STATS_CPU_TOTAL
    | libvirt.VIR_DOMAIN_STATS_BALLOON
    | libvirt.VIR_DOMAIN_STATS_VCPU
    | libvirt.VIR_DOMAIN_STATS_BLOCK
)
_ACTIVE: Final = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE
_NOWAIT: Final = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT

# libvirtd works on 5 calls of one client at a time (max_client_requests): calls left behind must leave room for the others.
_MOST_CALLS: Final = 3


def read_all(connection: Connection) -> Mapping[uuid.UUID, Stats]:
    """Foreign VMs are among them. Raises ShimError."""
    with connection.using("read the statistics of all VMs") as conn:
        rows = conn.getAllDomainStats(_GROUPS, _ACTIVE | _NOWAIT)
        return {uuid.UUID(domain.UUIDString()): stats for domain, stats in rows}


class _Call:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.rows: Mapping[uuid.UUID, Stats] = {}
        self.taken_at = 0


class BulkStats:
    """`patience` in seconds is for each attempt; attempts in flight, late ones included, are few. Thread-safe."""

    def __init__(self, read: Read, patience: float = 1.0, now: Callable[[], int] = time.time_ns) -> None:
        self._read = read
        self._patience = patience
        self._now = now
        self._free = threading.Semaphore(_MOST_CALLS)

    def latest(self) -> tuple[int, Mapping[uuid.UUID, Stats]]:
        """When they were read (ns since the epoch), and the numbers of each VM that could be read; none if libvirt does not
        answer. Never raises."""
        while self._free.acquire(blocking=False):
            call = _Call()
            threading.Thread(target=self._run, args=(call,), name="vm-statistics", daemon=True).start()
            if call.done.wait(self._patience):
                return call.taken_at, call.rows
            log.warning("libvirt.statistics.late", seconds=self._patience)
        return self._now(), {}

    def _run(self, call: _Call) -> None:
        try:
            call.rows = self._read()
        except ShimError as exc:
            log.warning("libvirt.statistics.failed", error=str(exc))
        finally:
            call.taken_at = self._now()
            self._free.release()
            call.done.set()
