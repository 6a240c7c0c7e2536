"""Reads the numbers of the node and its VMs for a scrape, and yields Prometheus' families one at a time, to save memory."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final, Generic, TypeVar

import structlog
from prometheus_client.core import Metric

from virtshim.metrics import vm_metrics
from virtshim.metrics.daemons import (
    CATALOGUE_BUILD,
    CATALOGUE_CNI_ERRORS,
    CATALOGUE_CNI_SECONDS,
    CATALOGUE_FILESYSTEM_SIZE,
    CATALOGUE_FILESYSTEM_USED,
    CATALOGUE_PODS,
    CATALOGUE_SAVED_BYTES,
    CATALOGUE_SAVED_LIMIT,
    CATALOGUE_SAVED_STATES,
    CATALOGUE_SCRAPE_AGE,
    CATALOGUE_SCRAPE_LATE,
    CATALOGUE_SCRAPE_SECONDS,
    CATALOGUE_START_TIME,
    CATALOGUE_STORE_BYTES,
    CATALOGUE_THREADS,
    CATALOGUE_TROUBLE,
    CATALOGUE_TROUBLES,
    CATALOGUE_UNFINISHED,
    CATALOGUE_UP,
    CATALOGUE_VMIS,
    Described,
)
from virtshim.metrics.family import LIMIT_METRICS_POD, SECOND, Family, Sample
from virtshim.metrics.guest_filesystems import GuestFilesystems
from virtshim.metrics.usage import ContainerUsage, SandboxUsage, Usage
from virtshim.metrics.vm_metrics import DEVICE_METRICS_CONTAINER, DEVICE_METRICS_POD
from virtshim.model.container import ContainerPhase
from virtshim.model.errors import ShimError
from virtshim.model.image import FilesystemUsage
from virtshim.model.network import PluginRuns
from virtshim.model.text import escaped
from virtshim.moves.ports import SavedVms
from virtshim.moves.values import SavedLimits
from virtshim.pods.lookup import Filter, list_sandboxes
from virtshim.pods.ports import PodNetworks
from virtshim.store.ports import StateRecords
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.rate_limits import TroubleLog
from virtshim.system.threads import lasting_threads
from virtshim.vm.ports import Hypervisor

log = structlog.get_logger(__name__)

R = TypeVar("R")

# Seconds that a scrape waits for a reading. Prometheus' own limit is 10. A reading has limits too; this one is a safeguard.
LIMIT: Final = 6.0
# Seconds for which a reading is used again.
FRESH: Final = 1.0


@dataclass(frozen=True, slots=True)
class Taken(Generic[R]):
    """`at`: when the reading began (time.monotonic()). `seconds`: how long it took."""

    value: R
    at: float
    seconds: float


class Sampler(Generic[R]):
    """Makes one reading at a time, which all callers share. If it is late, they get the last one. Thread-safe. Readings that hang
    hold only one thread."""

    def __init__(self, read: Callable[[], R], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._changed = threading.Condition()
        self._last: Taken[R] | None = None
        self._reading = False

    def latest(self) -> tuple[Taken[R] | None, bool]:
        """The newest reading, or None if there never was one; and whether a newer one is late."""
        asked = self._clock.monotonic()
        with self._changed:
            if self._is_of(asked - FRESH):
                return self._last, False
            if not self._reading:
                # The flag is set after the start: if no thread can be started, the next caller tries again. The thread needs
                # the lock to clear the flag, so it cannot do that too early.
                threading.Thread(target=self._take, name="scrape", daemon=True).start()
                self._reading = True
            # A reading that began before this call is good enough, so all waiting callers share it.
            self._changed.wait_for(lambda: not self._reading, LIMIT)
            return self._last, self._reading or not self._is_of(asked - LIMIT)

    def _is_of(self, moment: float) -> bool:
        return self._last is not None and self._last.at + self._last.seconds >= moment

    def _take(self) -> None:
        began = self._clock.monotonic()
        taken: Taken[R] | None = None
        try:
            taken = Taken(self._read(), began, self._clock.monotonic() - began)
        except Exception:  # the waiting callers get the last reading
            log.exception("scrape.crashed")
        with self._changed:
            self._last = taken or self._last
            self._reading = False
            self._changed.notify_all()


# Seconds: the timeout for tapmanager's counts; the maximal age of the stores' sizes, because measuring them visits each file.
_NETWORK_LIMIT: Final = 1.0
_STORES_EVERY: Final = 60.0

Stores = Mapping[str, Callable[[], FilesystemUsage]]


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """Of VMs that outlive their pods. `limit`: bytes, 0 for none."""

    states: int
    bytes: int
    limit: int


@dataclass(frozen=True, slots=True)
class NodeReading:
    """`up`: whether each needed part answers. `stores`: bytes by name. `saved`: None if it cannot be read."""

    pods: Sequence[SandboxUsage]
    up: Mapping[str, bool]
    vmis: Mapping[str, int]
    pod_states: Mapping[str, int]
    unfinished: int
    stores: Mapping[str, int]
    plugin_runs: Sequence[PluginRuns]
    saved: SavedMemory | None


@dataclass(slots=True)
class NodeReadings:
    """Reads in the same way as CRI's stats. Only one thread at a time may use it. `stores`: functions that measure the stores."""

    records: StateRecords
    usage: Usage
    hypervisor: Hypervisor
    networks: PodNetworks
    unfinished: Callable[[], Mapping[str, str]]
    stores: Stores
    vms: SavedVms
    saved_limits: Live[SavedLimits]
    clock: Clock
    _sizes: Mapping[str, int] = field(default_factory=dict)
    _sizes_due: float = 0.0
    _trouble: TroubleLog = field(default_factory=lambda: TroubleLog(log, over="scrape.stores_read_again"))

    def read(self) -> NodeReading:
        """Waits at most a few seconds for libvirt and tapmanager."""
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
            saved=self._saved_memory(),
        )

    def _plugin_runs(self) -> Sequence[PluginRuns]:
        try:
            return self.networks.plugin_runs(_NETWORK_LIMIT)
        except ShimError:  # `up` reports it; an older tapmanager has no counts
            return ()

    def _saved_memory(self) -> SavedMemory | None:
        key = "saved memory"
        try:
            sizes = [vm.saved.bytes for vm in self.vms.all(strict=True) if vm.saved is not None]
        except ShimError as exc:
            self._trouble.met("scrape.store_not_read", key=key, store=key, error=str(exc))
            return None
        self._trouble.over(key=key, store=key)
        return SavedMemory(len(sizes), sum(sizes), self.saved_limits.now.most)

    def _store_sizes(self) -> Mapping[str, int]:
        now = self.clock.monotonic()
        if now < self._sizes_due:
            return self._sizes
        self._sizes_due = now + _STORES_EVERY
        sizes = {}
        for name, measure in self.stores.items():
            try:
                sizes[name] = measure().used_bytes
            except (ShimError, OSError) as exc:  # such as a file that is removed meanwhile
                self._trouble.met("scrape.store_not_read", key=name, store=name, error=str(exc))
            else:
                self._trouble.over(key=name, store=name)
        self._sizes = sizes
        return sizes


S = TypeVar("S")

VM_FAMILIES: Final = (*vm_metrics.CONTAINER, *DEVICE_METRICS_CONTAINER)
POD_FAMILIES: Final = (*vm_metrics.POD, *DEVICE_METRICS_POD, *LIMIT_METRICS_POD)
# These come before a family's own labels. From kubelet the same families have two more: the names of image and domain.
POD_LABELS: Final = ("namespace", "pod", "id")
VM_LABELS: Final = (*POD_LABELS, "container")

# The limit of characters for a label's value: Kubernetes' longest name. CRI allows longer ones.
_LONGEST: Final = 253

Labels = dict[str, str]


class NodeCollector:
    """A collector for prometheus-client's registry. Thread-safe."""

    def __init__(self, sampler: Sampler[NodeReading], filesystems: GuestFilesystems, clock: Clock) -> None:
        self._sampler = sampler
        self._filesystems = filesystems
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        taken, is_late = self._sampler.latest()
        pods = taken.value.pods if taken else ()
        yield from _of_node(taken.value if taken else None)
        yield from self._of_scrape(taken, is_late=is_late)
        by_pod = [(_pod_labels(pod), pod) for pod in pods]
        for pod_family in POD_FAMILIES:
            yield _family(pod_family, by_pod)
        vms = [(_vm_labels(pod, vm), vm) for pod in pods for vm in pod.containers if vm.container.is_running]
        for vm_family in VM_FAMILIES:
            yield _family(vm_family, vms)
        yield from self._of_vms(vms)

    def _of_vms(self, vms: Sequence[tuple[Labels, ContainerUsage]]) -> Iterator[Metric]:
        started, trouble = _metric(CATALOGUE_START_TIME), _metric(CATALOGUE_TROUBLE)
        troubles = _metric(CATALOGUE_TROUBLES)
        size, used = _metric(CATALOGUE_FILESYSTEM_SIZE), _metric(CATALOGUE_FILESYSTEM_USED)
        for labels, vm in vms:
            status = vm.container.status
            started.add_sample(started.name, labels, status.started_at / SECOND)
            trouble.add_sample(trouble.name, labels, int(bool(status.trouble)))
            for kind, count in Counter(one.kind for one in status.troubles).items():
                troubles.add_sample(troubles.name, labels | {"kind": kind.value}, count)
            for one in self._filesystems.filesystems(vm.container.id):
                values = (one.device, one.kind, one.mount_point)
                of_one = labels | dict(zip(CATALOGUE_FILESYSTEM_SIZE.labels, map(_shown, values), strict=True))
                size.add_sample(size.name, of_one, one.total_bytes)
                used.add_sample(used.name, of_one, one.used_bytes)
        yield from (started, trouble, troubles, size, used)

    def _of_scrape(self, taken: Taken[NodeReading] | None, *, is_late: bool) -> Iterator[Metric]:
        late, took, age = (
            _metric(one) for one in (CATALOGUE_SCRAPE_LATE, CATALOGUE_SCRAPE_SECONDS, CATALOGUE_SCRAPE_AGE)
        )
        late.add_sample(late.name, {}, int(is_late))
        if taken is not None:
            took.add_sample(took.name, {}, taken.seconds)
            age.add_sample(age.name, {}, max(0.0, self._clock.monotonic() - taken.at))
        yield from (late, took, age, _by(CATALOGUE_THREADS, lasting_threads()))


def _pod_labels(pod: SandboxUsage) -> Labels:
    key = pod.sandbox.key
    return {"namespace": _shown(key.namespace), "pod": _shown(key.name), "id": pod.sandbox.id.value}


def _vm_labels(pod: SandboxUsage, vm: ContainerUsage) -> Labels:
    """`id` is the container's id."""
    container = vm.container
    return _pod_labels(pod) | {"container": _shown(container.name.name), "id": container.id.value}


def _of_node(reading: NodeReading | None) -> Iterator[Metric]:
    build = _metric(CATALOGUE_BUILD)
    build.add_sample(build.name, {"version": version("virtshim"), "python": platform.python_version()}, 1)
    yield build
    found = reading or NodeReading((), {}, {}, {}, 0, {}, (), None)
    yield _by(CATALOGUE_UP, found.up)
    yield _by(CATALOGUE_VMIS, found.vmis)
    yield _by(CATALOGUE_PODS, found.pod_states)
    yield _by(CATALOGUE_STORE_BYTES, found.stores)
    unfinished = _metric(CATALOGUE_UNFINISHED)
    if reading is not None:
        unfinished.add_sample(unfinished.name, {}, reading.unfinished)
    yield unfinished
    yield from _of_saved(found.saved)
    yield from _of_plugins(found.plugin_runs)


def _of_saved(saved: SavedMemory | None) -> Iterator[Metric]:
    states, size, limit = map(_metric, (CATALOGUE_SAVED_STATES, CATALOGUE_SAVED_BYTES, CATALOGUE_SAVED_LIMIT))
    if saved is not None:
        states.add_sample(states.name, {}, saved.states)
        size.add_sample(size.name, {}, saved.bytes)
        if saved.limit:
            limit.add_sample(limit.name, {}, saved.limit)
    yield from (states, size, limit)


def _of_plugins(runs: Sequence[PluginRuns]) -> Iterator[Metric]:
    seconds, errors = _metric(CATALOGUE_CNI_SECONDS), _metric(CATALOGUE_CNI_ERRORS)
    for one in runs:
        labels = {"command": _shown(one.command), "plugin": _shown(one.plugin)}
        for bound, count in one.buckets:
            le = "+Inf" if bound == float("inf") else repr(float(bound))
            seconds.add_sample(f"{seconds.name}_bucket", labels | {"le": le}, count)
        seconds.add_sample(f"{seconds.name}_count", labels, one.buckets[-1][1])
        seconds.add_sample(f"{seconds.name}_sum", labels, one.seconds)
        errors.add_sample(CATALOGUE_CNI_ERRORS.name, labels, one.failures)
    yield from (seconds, errors)


def _by(of: Described, values: Mapping[str, float]) -> Metric:
    (label,) = of.labels
    metric = _metric(of)
    for name, value in values.items():
        metric.add_sample(of.name, {label: name}, float(value))
    return metric


def _metric(of: Described) -> Metric:
    return Metric(of.name.removesuffix("_total") if of.kind == "counter" else of.name, of.help, of.kind)


def _family(family: Family[S], uses: Iterable[tuple[Labels, S]]) -> Metric:
    kind = family.kind.value
    metric = Metric(family.name.removesuffix("_total") if kind == "counter" else family.name, family.help, kind)
    for labels, use in uses:
        for sample in family.read(use):
            if sample.labels and not sample.labels[0]:  # a placeholder that only CRI needs
                continue
            metric.add_sample(family.name, _with(labels, family.labels, sample), sample.value)
    return metric


def _with(labels: Labels, names: tuple[str, ...], sample: Sample) -> Labels:
    return labels | dict(zip(names, map(_shown, sample.labels), strict=True)) if names else labels


def _shown(value: str) -> str:
    """Escapes a name that a pod, guest or device chose."""
    return escaped(value, _LONGEST)
