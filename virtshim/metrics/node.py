"""Reads the numbers of the node and its VMs for a scrape, and yields Prometheus' families one at a time, to save memory."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final, Generic, NamedTuple, TypeVar

import structlog
from prometheus_client.core import Metric

from virtshim.guest.ports import GuestFilesystem
from virtshim.metrics import vm_metrics
from virtshim.metrics.daemons import Described
from virtshim.metrics.family import LIMITS_OF_POD, SECOND, Family, Kind, Sample, counter, gauge, one
from virtshim.metrics.guest_filesystems import GuestFilesystems
from virtshim.metrics.usage import ContainerUsage, SandboxUsage, Usage
from virtshim.metrics.vm_metrics import DEVICES_OF_CONTAINER, DEVICES_OF_POD, PLACEHOLDERS
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
from virtshim.templates.values import Kept
from virtshim.vm.ports import Hypervisor

log = structlog.get_logger(__name__)

R = TypeVar("R")

# Seconds that a scrape waits for a reading. Prometheus waits for 10. The calls of a reading have limits too; this is a safeguard.
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
    """Makes one reading at a time, which all callers share. If the reading is late, they get the previous one. Thread-safe. A
    reading that hangs blocks only one thread."""

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
    """The saved memory of all VMs that outlive their pods. `limit`: bytes, 0 for no limit."""

    states: int
    bytes: int
    limit: int


@dataclass(frozen=True, slots=True)
class TemplateMemory:
    """`limit`: bytes, 0 if the node allows no templates."""

    templates: int
    bytes: int
    limit: int


@dataclass(frozen=True, slots=True)
class NodeReading:
    """`up`: whether each needed part answers. `stores`: bytes by name. `saved`: None if the records of saved memory cannot be
    read. `unfinished`, `templates`: None before the first reading."""

    pods: Sequence[SandboxUsage]
    up: Mapping[str, bool]
    vmis: Mapping[str, int]
    pod_states: Mapping[str, int]
    unfinished: int | None
    stores: Mapping[str, int]
    plugin_runs: Sequence[PluginRuns]
    saved: SavedMemory | None
    templates: TemplateMemory | None


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
    templates: Callable[[], Sequence[Kept]]
    template_limit: Live[int]
    clock: Clock
    _sizes: Mapping[str, int] = field(default_factory=dict)
    _sizes_due: float = 0.0
    _trouble: TroubleLog = field(default_factory=lambda: TroubleLog(log, over="scrape.stores_read_again"))

    def read(self) -> NodeReading:
        """Waits at most a few seconds for libvirt and tapmanager."""
        sandboxes = list_sandboxes(self.records, Filter(adopted=True))
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
            templates=self._template_memory(),
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

    def _template_memory(self) -> TemplateMemory:
        kept = self.templates()
        return TemplateMemory(len(kept), sum(one.bytes for one in kept), self.template_limit.now)

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


class _Vm(NamedTuple):
    use: ContainerUsage
    filesystems: Sequence[GuestFilesystem]


class _Scrape(NamedTuple):
    """`now`: time.monotonic()."""

    taken: Taken[NodeReading] | None
    is_late: bool
    now: float


def _each(values: Mapping[str, float]) -> Iterable[Sample]:
    return [Sample(value, (name,)) for name, value in values.items()]


def _saved(pick: Callable[[SavedMemory], int | None]) -> Callable[[NodeReading], Iterable[Sample]]:
    return lambda found: one(pick(found.saved) if found.saved else None)


def _templates(pick: Callable[[TemplateMemory], int]) -> Callable[[NodeReading], Iterable[Sample]]:
    return lambda found: one(pick(found.templates) if found.templates else None)


def _filesystems(pick: Callable[[GuestFilesystem], int]) -> Callable[[_Vm], Iterable[Sample]]:
    return lambda vm: [Sample(pick(it), (it.device, it.kind, it.mount_point)) for it in vm.filesystems]


def _troubles(vm: _Vm) -> Iterable[Sample]:
    return _each(Counter(it.kind.value for it in vm.use.container.status.troubles))


def _build(found: NodeReading) -> Iterable[Sample]:
    del found
    return (Sample(1, (version("virtshim"), platform.python_version())),)


OF_NODE: Final[tuple[Family[NodeReading], ...]] = (
    gauge("virtshim_build_info", "1, with the versions of virtshim and Python.", _build, "version", "python"),
    gauge(
        "virtshim_up",
        "1 for each part that virtshim needs and that answers: libvirt, network (tapmanager and CNI), database.",
        lambda found: _each(found.up),
        "part",
    ),
    gauge("virtshim_vmis", "VMs by phase: creating, created, running, exited ...", lambda it: _each(it.vmis), "phase"),
    gauge("virtshim_pods", "Pod sandboxes by state: ready or notready.", lambda it: _each(it.pod_states), "state"),
    gauge("virtshim_repairs_unfinished", "Repairs that have not succeeded yet.", lambda found: one(found.unfinished)),
    gauge(
        "virtshim_store_bytes",
        "Bytes on disk of images, and of containers with their disks.",
        lambda found: _each(found.stores),
        "store",
    ),
    gauge(
        "virtshim_saved_states",
        "VMs that outlive their pods and whose memory is saved.",
        _saved(lambda saved: saved.states),
    ),
    gauge("virtshim_saved_bytes", "Bytes of all saved memory.", _saved(lambda saved: saved.bytes)),
    gauge(
        "virtshim_saved_bytes_limit",
        "Maximum size of all saved memory (saved.max_bytes); no sample without a limit.",
        _saved(lambda saved: saved.limit or None),
    ),
    gauge(
        "virtshim_templates",
        "Guests that have booted and from which other guests start (virtshim.io/warm-start).",
        _templates(lambda kept: kept.templates),
    ),
    gauge(
        "virtshim_template_bytes", "Bytes of memory and disk that all templates take.", _templates(lambda it: it.bytes)
    ),
    gauge(
        "virtshim_template_bytes_limit",
        "Maximum size of all templates (templates.max_bytes); 0 allows none.",
        _templates(lambda kept: kept.limit),
    ),
    counter(
        "virtshim_cni_errors_total",
        "Runs of CNI plugins that failed or were killed.",
        lambda found: [Sample(it.failures, (it.command, it.plugin)) for it in found.plugin_runs],
        "command",
        "plugin",
    ),
)
CNI_SECONDS: Final = Described(
    "virtshim_cni_duration_seconds",
    "histogram",
    "Runs of CNI plugins, by command (ADD, DEL), since tapmanager was started.",
    ("command", "plugin"),
)
OF_SCRAPE: Final[tuple[Family[_Scrape], ...]] = (
    gauge(
        "virtshim_scrape_duration_seconds",
        "How long it took to read the numbers of this answer.",
        lambda scrape: one(scrape.taken.seconds if scrape.taken else None),
    ),
    gauge(
        "virtshim_scrape_sample_age_seconds",
        "Age of the numbers of VMs in this answer.",
        lambda scrape: one(max(0.0, scrape.now - scrape.taken.at) if scrape.taken else None),
    ),
    gauge(
        "virtshim_scrape_late",
        "1 if new numbers of VMs were late, so this answer repeats the previous numbers.",
        lambda scrape: one(scrape.is_late),
    ),
    gauge(
        "virtshim_thread_up",
        "1 if this permanent thread of virtshim runs, 0 if it has died. Then restart virtshim; VMs keep running.",
        lambda _: _each(lasting_threads()),
        "thread",
    ),
)
# In addition to VM_FAMILIES, which CRI's answers have too.
OF_VMS: Final[tuple[Family[_Vm], ...]] = (
    gauge(
        "virtshim_vmi_start_time_seconds",
        "When the VM was started, in seconds since the epoch.",
        lambda vm: one(vm.use.container.status.started_at / SECOND),
    ),
    gauge(
        "virtshim_vmi_trouble",
        "1 for a running VM that makes no progress or lacks something; crictl inspect shows the message.",
        lambda vm: one(bool(vm.use.container.status.trouble)),
    ),
    gauge(
        "virtshim_vm_troubles",
        "Problems of a running VM, by kind; no sample for a kind that the VM does not have.",
        _troubles,
        "kind",
    ),
    gauge(
        "virtshim_vmi_filesystem_capacity_bytes",
        "Size of a file system in the guest, reported by its agent each minute.",
        _filesystems(lambda it: it.total_bytes),
        *("disk_name", "file_system_type", "mount_point"),
    ),
    gauge(
        "virtshim_vmi_filesystem_used_bytes",
        "Used bytes of a file system in the guest, reported by its agent each minute.",
        _filesystems(lambda it: it.used_bytes),
        *("disk_name", "file_system_type", "mount_point"),
    ),
)
VM_FAMILIES: Final = (*vm_metrics.CONTAINER, *DEVICES_OF_CONTAINER)
POD_FAMILIES: Final = (*vm_metrics.POD, *DEVICES_OF_POD, *LIMITS_OF_POD)
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
        found = taken.value if taken else NodeReading((), {}, {}, {}, None, {}, (), None, None)
        yield from _families(OF_NODE, [({}, found)])
        yield _plugin_seconds(found.plugin_runs)
        yield from _families(OF_SCRAPE, [({}, _Scrape(taken, is_late, self._clock.monotonic()))])
        yield from _families(POD_FAMILIES, [(_pod_labels(pod), pod) for pod in found.pods])
        running = [(pod, vm) for pod in found.pods for vm in pod.containers if vm.container.is_running]
        vms = [(_vm_labels(pod, vm), vm) for pod, vm in running]
        yield from _families(VM_FAMILIES, vms)
        of_guests = self._filesystems.filesystems
        yield from _families(OF_VMS, [(labels, _Vm(vm, of_guests(vm.container.id))) for labels, vm in vms])


def _pod_labels(pod: SandboxUsage) -> Labels:
    key = pod.sandbox.key
    return {"namespace": _shown(key.namespace), "pod": _shown(key.name), "id": pod.sandbox.id.value}


def _vm_labels(pod: SandboxUsage, vm: ContainerUsage) -> Labels:
    """`id` is the container's id."""
    container = vm.container
    return _pod_labels(pod) | {"container": _shown(container.name.name), "id": container.id.value}


def _plugin_seconds(runs: Sequence[PluginRuns]) -> Metric:
    metric = Metric(CNI_SECONDS.name, CNI_SECONDS.help, CNI_SECONDS.kind)
    for run in runs:
        labels = {"command": _shown(run.command), "plugin": _shown(run.plugin)}
        for bound, count in run.buckets:
            le = "+Inf" if bound == float("inf") else repr(float(bound))
            metric.add_sample(f"{metric.name}_bucket", labels | {"le": le}, count)
        metric.add_sample(f"{metric.name}_count", labels, run.buckets[-1][1])
        metric.add_sample(f"{metric.name}_sum", labels, run.seconds)
    return metric


def _families(families: Iterable[Family[S]], read: Sequence[tuple[Labels, S]]) -> Iterator[Metric]:
    """`read`: what is measured, each with the labels that come before a family's own."""
    for family in families:
        name = family.name.removesuffix("_total") if family.kind is Kind.COUNTER else family.name
        metric = Metric(name, family.help, family.kind.value)
        for labels, measured in read:
            for sample in family.read(measured):
                if sample.labels and not sample.labels[0] and sample in PLACEHOLDERS:
                    continue
                own = dict(zip(family.labels, map(_shown, sample.labels), strict=True))
                metric.add_sample(family.name, labels | own, sample.value)
        yield metric


def _shown(value: str) -> str:
    """Escapes a name that a pod, guest or device chose."""
    return escaped(value, _LONGEST)
