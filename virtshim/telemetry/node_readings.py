"""What a scrape tells of the node and its VMs: one reading, by the same ways as CRI's stats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.domain.container import ContainerPhase
from virtshim.domain.errors import ShimError
from virtshim.domain.image import FilesystemUsage
from virtshim.domain.network import PluginRuns
from virtshim.metrics.usage import SandboxUsage, Usage
from virtshim.ports.clock import Clock
from virtshim.ports.hypervisor import Hypervisor
from virtshim.ports.network import PodNetworks
from virtshim.ports.recovery import StateRecords
from virtshim.primitives.trouble_log import TroubleLog
from virtshim.queries.lists import Filter, list_sandboxes

log = structlog.get_logger(__name__)

# Seconds: for tapmanager's counts; and how old the stores' sizes may be, for which each file is looked at.
_NETWORK_LIMIT: Final = 1.0
_STORES_EVERY: Final = 60.0

Stores = Mapping[str, Callable[[], FilesystemUsage]]


@dataclass(frozen=True, slots=True)
class NodeReading:
    """`up`: whether each part that is needed answers. `stores`: bytes by name."""

    pods: Sequence[SandboxUsage]
    up: Mapping[str, bool]
    vmis: Mapping[str, int]
    pod_states: Mapping[str, int]
    unfinished: int
    stores: Mapping[str, int]
    plugin_runs: Sequence[PluginRuns]


@dataclass(slots=True)
class NodeReadings:
    """For one thread at a time. `stores`: what measures each of them."""

    records: StateRecords
    usage: Usage
    hypervisor: Hypervisor
    networks: PodNetworks
    unfinished: Callable[[], Mapping[str, str]]
    stores: Stores
    clock: Clock
    _sizes: Mapping[str, int] = field(default_factory=dict)
    _sizes_due: float = 0.0
    _trouble: TroubleLog = field(default_factory=lambda: TroubleLog(log, over="scrape.stores_read_again"))

    def read(self) -> NodeReading:
        """Waits for libvirt and tapmanager a few seconds at most."""
        sandboxes = list_sandboxes(self.records, Filter())
        phases = Counter(container.phase for container in self.records.containers.all())
        ready = sum(sandbox.is_ready for sandbox in sandboxes)
        return NodeReading(
            pods=self.usage.sandboxes(sandboxes),
            up={
                "libvirt": not self.hypervisor.trouble(),
                "network": not self.networks.trouble(),
                "database": not self.records.trouble(),
            },
            vmis={phase.value: phases[phase] for phase in ContainerPhase},
            pod_states={"ready": ready, "notready": len(sandboxes) - ready},
            unfinished=len(self.unfinished()),
            stores=self._store_sizes(),
            plugin_runs=self._plugin_runs(),
        )

    def _plugin_runs(self) -> Sequence[PluginRuns]:
        try:
            return self.networks.plugin_runs(_NETWORK_LIMIT)
        except ShimError:  # `up` tells it; an older tapmanager has none
            return ()

    def _store_sizes(self) -> Mapping[str, int]:
        now = self.clock.monotonic()
        if now < self._sizes_due:
            return self._sizes
        self._sizes_due = now + _STORES_EVERY
        sizes = {}
        for name, measure in self.stores.items():
            try:
                sizes[name] = measure().used_bytes
            except (ShimError, OSError) as exc:  # a file that goes while it is looked at
                self._trouble.met("scrape.store_not_read", key=name, store=name, error=str(exc))
            else:
                self._trouble.over(key=name, store=name)
        self._sizes = sizes
        return sizes
