"""Describes and counts the metrics of virtshim and its proxy. docs/metrics.md lists all metrics; a test compares.

Implements `virtshim.metrics.observed.Meter` and `virtshim.proxy.measuring.ProxyMeter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from virtshim.metrics.observed import Exited, Fact, ImagesRemoved, Leftover, Pulled, Reconciled, Step
from virtshim.model.container import ExitReason

# Upper bounds in seconds. Lists take milliseconds, a start seconds, a stop or a pull minutes.
_OF_CALLS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 240.0)
_OF_STEPS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_OF_PULLS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
_OF_ROUNDS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)
# The proxy adds fractions of a millisecond.
_ADDED: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Described:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# --- counted when it happens

CATALOGUE_RPC_SECONDS: Final = Described(
    "virtshim_rpc_duration_seconds",
    "histogram",
    "Calls on the CRI socket, by result; a stream lasts until its client disconnects.",
    ("method", "code"),
    _OF_CALLS,
)
CATALOGUE_RPCS_RUNNING: Final = Described("virtshim_rpcs_running", "gauge", "Running calls, streams included.")
CATALOGUE_START_STEP_SECONDS: Final = Described(
    "virtshim_start_phase_duration_seconds",
    "histogram",
    "Parts of pods' starts: network (CNI, tap), admission, devices, disk, seed, empty_disks, define (libvirt's definition), "
    "cgroup, volumes, libvirt (until QEMU runs), agent (from then until the guest's agent first answers).",
    ("phase", "result"),
    _OF_STEPS,
)
CATALOGUE_PULL_SECONDS: Final = Described(
    "virtshim_image_pull_duration_seconds",
    "histogram",
    "Pulls by result: ok, or the kind of error.",
    ("result",),
    _OF_PULLS,
)
CATALOGUE_PULL_BYTES: Final = Described(
    "virtshim_image_pull_bytes_total", "counter", "Bytes on disk of the images that were pulled."
)
CATALOGUE_PULLS_RUNNING: Final = Described("virtshim_image_pulls_running", "gauge", "Running pulls.")
CATALOGUE_IMAGES_REMOVED: Final = Described(
    "virtshim_image_gc_removed_total",
    "counter",
    "Unused images that virtshim removed because their file system was fuller than images.gc_high_percent.",
)
CATALOGUE_RECONCILE_SECONDS: Final = Described(
    "virtshim_reconcile_duration_seconds",
    "histogram",
    "Comparisons of the records with the node while serving, by result: ok, or the kind of error.",
    ("result",),
    _OF_ROUNDS,
)
CATALOGUE_LEAKS: Final = Described(
    "virtshim_leaks_found_total",
    "counter",
    "Leftovers without an owner, found at start or while serving, by kind.",
    ("kind",),
)
CATALOGUE_EXITS: Final = Described(
    "virtshim_vmi_exits_total",
    "counter",
    "Ends of VMs by reason: Completed, Error, OOMKilled, StartError, Saved, Moved, Unknown.",
    ("reason",),
)

CATALOGUE_RECORDED: Final = (
    CATALOGUE_RPC_SECONDS,
    CATALOGUE_RPCS_RUNNING,
    CATALOGUE_START_STEP_SECONDS,
    CATALOGUE_PULL_SECONDS,
    CATALOGUE_PULL_BYTES,
    CATALOGUE_PULLS_RUNNING,
    CATALOGUE_IMAGES_REMOVED,
    CATALOGUE_RECONCILE_SECONDS,
    CATALOGUE_LEAKS,
    CATALOGUE_EXITS,
)

# --- read when Prometheus asks

CATALOGUE_BUILD: Final = Described(
    "virtshim_build_info", "gauge", "1, with the versions of virtshim and Python.", ("version", "python")
)
CATALOGUE_UP: Final = Described(
    "virtshim_up",
    "gauge",
    "1 for each part that virtshim needs and that answers: libvirt, network (tapmanager and CNI), database.",
    ("part",),
)
CATALOGUE_VMIS: Final = Described(
    "virtshim_vmis", "gauge", "VMs by phase: creating, created, running, exited ...", ("phase",)
)
CATALOGUE_PODS: Final = Described("virtshim_pods", "gauge", "Pod sandboxes by state: ready or notready.", ("state",))
CATALOGUE_UNFINISHED: Final = Described("virtshim_repairs_unfinished", "gauge", "Repairs that have not succeeded yet.")
CATALOGUE_STORE_BYTES: Final = Described(
    "virtshim_store_bytes", "gauge", "Bytes on disk of images, and of containers with their disks.", ("store",)
)
CATALOGUE_SAVED_STATES: Final = Described(
    "virtshim_saved_states", "gauge", "VMs that outlive their pods and whose memory is saved."
)
CATALOGUE_SAVED_BYTES: Final = Described("virtshim_saved_bytes", "gauge", "Bytes of all saved memory.")
CATALOGUE_SAVED_LIMIT: Final = Described(
    "virtshim_saved_bytes_limit",
    "gauge",
    "Most bytes that saved memory may take (saved.max_bytes); none without a limit.",
)
CATALOGUE_CNI_SECONDS: Final = Described(
    "virtshim_cni_duration_seconds",
    "histogram",
    "Runs of CNI plugins, by command (ADD, DEL), since tapmanager was started.",
    ("command", "plugin"),
)
CATALOGUE_CNI_ERRORS: Final = Described(
    "virtshim_cni_errors_total", "counter", "Runs of CNI plugins that failed or were killed.", ("command", "plugin")
)
CATALOGUE_SCRAPE_SECONDS: Final = Described(
    "virtshim_scrape_duration_seconds", "gauge", "How long it took to read the numbers of this answer."
)
CATALOGUE_SCRAPE_AGE: Final = Described(
    "virtshim_scrape_sample_age_seconds", "gauge", "Age of the numbers of VMs in this answer."
)
CATALOGUE_SCRAPE_LATE: Final = Described(
    "virtshim_scrape_late",
    "gauge",
    "1 if new numbers of VMs were late, so this answer repeats the previous numbers.",
)

CATALOGUE_THREADS: Final = Described(
    "virtshim_thread_up",
    "gauge",
    "1 for each of virtshim's permanent threads that runs, 0 for one that has died: restart virtshim, VMs keep running.",
    ("thread",),
)

CATALOGUE_SAMPLED: Final = (
    CATALOGUE_BUILD,
    CATALOGUE_UP,
    CATALOGUE_VMIS,
    CATALOGUE_PODS,
    CATALOGUE_UNFINISHED,
    CATALOGUE_STORE_BYTES,
    CATALOGUE_SAVED_STATES,
    CATALOGUE_SAVED_BYTES,
    CATALOGUE_SAVED_LIMIT,
    CATALOGUE_CNI_SECONDS,
    CATALOGUE_CNI_ERRORS,
)
CATALOGUE_SCRAPED: Final = (CATALOGUE_SCRAPE_SECONDS, CATALOGUE_SCRAPE_AGE, CATALOGUE_SCRAPE_LATE, CATALOGUE_THREADS)

# --- of VMs, in addition to the families of `virtshim.metrics`

CATALOGUE_START_TIME: Final = Described(
    "virtshim_vmi_start_time_seconds",
    "gauge",
    "When the VM was started, in seconds since the epoch.",
)
CATALOGUE_TROUBLE: Final = Described(
    "virtshim_vmi_trouble",
    "gauge",
    "1 for a running VM that makes no progress or lacks something; crictl inspect shows the message.",
)
CATALOGUE_TROUBLES: Final = Described(
    "virtshim_vm_troubles",
    "gauge",
    "Problems of a running VM, by kind; no sample for a kind that the VM does not have.",
    ("kind",),
)
CATALOGUE_FILESYSTEM_SIZE: Final = Described(
    "virtshim_vmi_filesystem_capacity_bytes",
    "gauge",
    "Size of a file system in the guest, reported by its agent each minute.",
    ("disk_name", "file_system_type", "mount_point"),
)
CATALOGUE_FILESYSTEM_USED: Final = Described(
    "virtshim_vmi_filesystem_used_bytes",
    "gauge",
    "Used bytes of a file system in the guest, reported by its agent each minute.",
    ("disk_name", "file_system_type", "mount_point"),
)
CATALOGUE_OF_VMS: Final = (
    CATALOGUE_START_TIME,
    CATALOGUE_TROUBLE,
    CATALOGUE_TROUBLES,
    CATALOGUE_FILESYSTEM_SIZE,
    CATALOGUE_FILESYSTEM_USED,
)

# --- of the proxy

CATALOGUE_PROXY_SECONDS: Final = Described(
    "virtshim_proxy_rpc_duration_seconds",
    "histogram",
    "Calls on the proxy's socket, by result.",
    ("method", "code"),
    _OF_CALLS,
)
CATALOGUE_PROXY_ADDED: Final = Described(
    "virtshim_proxy_added_seconds",
    "histogram",
    "Time that the proxy adds to a call: the call's time without the waiting for runtimes. Streams are not counted.",
    buckets=_ADDED,
)
CATALOGUE_PROXY_RUNTIME_SECONDS: Final = Described(
    "virtshim_proxy_runtime_rpc_duration_seconds",
    "histogram",
    "Calls to each runtime, by result.",
    ("runtime", "method", "code"),
    _OF_CALLS,
)
CATALOGUE_PROXY_UP: Final = Described(
    "virtshim_proxy_runtime_up", "gauge", "1 for a runtime that answered its last call.", ("runtime",)
)
CATALOGUE_OF_PROXY: Final = (
    CATALOGUE_PROXY_SECONDS,
    CATALOGUE_PROXY_ADDED,
    CATALOGUE_PROXY_RUNTIME_SECONDS,
    CATALOGUE_PROXY_UP,
)

CATALOGUE_SPANS: Final = Described(
    "virtshim_trace_spans_total",
    "counter",
    "Spans of traces by result: sent, refused (the collector refused them or did not answer) or dropped (too many waited).",
    ("result",),
)
CATALOGUE_OF_BOTH: Final = (CATALOGUE_SPANS,)

# Made by prometheus-client's ProcessCollector.
CATALOGUE_OF_PROCESS: Final = (
    Described("process_cpu_seconds_total", "counter", "CPU time of the daemon."),
    Described("process_max_fds", "gauge", "Limit of open descriptors."),
    Described("process_open_fds", "gauge", "Open descriptors of the daemon."),
    Described("process_resident_memory_bytes", "gauge", "Resident memory of the daemon."),
    Described("process_start_time_seconds", "gauge", "When the daemon was started, in seconds since the epoch."),
    Described("process_virtual_memory_bytes", "gauge", "Size of the daemon's address space."),
)


def process_registry() -> CollectorRegistry:
    """A new registry with the metrics of this process. Other code may use prometheus-client's global one."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # these would be a further series for each counter
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def renderer(registry: CollectorRegistry) -> Callable[[str], tuple[str, bytes]]:
    """Returns a function: the client's Accept header -> content type and the registry's present metrics."""

    def render(accepted: str) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accepted)
        return kind, encode(registry)

    return render


def counter(registry: CollectorRegistry, of: Described) -> Counter:
    return Counter(of.name, of.help, of.labels, registry=registry)


def gauge(registry: CollectorRegistry, of: Described) -> Gauge:
    return Gauge(of.name, of.help, of.labels, registry=registry)


def histogram(registry: CollectorRegistry, of: Described) -> Histogram:
    return Histogram(of.name, of.help, of.labels, registry=registry, buckets=of.buckets)


class Recorder:
    """Counts for virtshim. Labels come from closed sets: CRI's methods, gRPC's codes, kinds of errors, virtshim's own words."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = histogram(registry, CATALOGUE_RPC_SECONDS)
        self._running = gauge(registry, CATALOGUE_RPCS_RUNNING)
        self._steps = histogram(registry, CATALOGUE_START_STEP_SECONDS)
        self._pulls = histogram(registry, CATALOGUE_PULL_SECONDS)
        self._pulled = counter(registry, CATALOGUE_PULL_BYTES)
        self._pulling = gauge(registry, CATALOGUE_PULLS_RUNNING)
        self._images_removed = counter(registry, CATALOGUE_IMAGES_REMOVED)
        self._reconciled = histogram(registry, CATALOGUE_RECONCILE_SECONDS)
        self._leaks = counter(registry, CATALOGUE_LEAKS)
        self._spans = counter(registry, CATALOGUE_SPANS)
        self._exits = counter(registry, CATALOGUE_EXITS)
        for reason in ExitReason:  # starts at 0, so that Prometheus sees the first exit as an increase
            self._exits.labels(reason.value)

    def took(self, step: Step, result: str, seconds: float) -> None:
        self._steps.labels(step.value, result).observe(seconds)

    def call_took(self, method: str, code: str, seconds: float) -> None:
        self._calls.labels(method, code).observe(seconds)

    def calls_under_way(self, change: int) -> None:
        self._running.inc(change)

    def pulls_under_way(self, change: int) -> None:
        self._pulling.inc(change)

    def spans(self, result: str, number: int) -> None:
        self._spans.labels(result).inc(number)

    def tell(self, fact: Fact) -> None:
        match fact:
            case Pulled():
                self._pulls.labels(fact.result).observe(fact.seconds)
                self._pulled.inc(fact.size)
            case Exited():
                self._exits.labels(fact.reason.value).inc()
            case Reconciled():
                self._reconciled.labels(fact.result).observe(fact.seconds)
            case Leftover():
                self._leaks.labels(fact.what.replace(" ", "_")).inc()
            case ImagesRemoved():
                self._images_removed.inc(fact.number)


class ProxyRecorder:
    def __init__(self, registry: CollectorRegistry, up: Callable[[], Mapping[str, bool]]) -> None:
        """`up`: runtime name -> whether it answered its last call."""
        self._calls = histogram(registry, CATALOGUE_PROXY_SECONDS)
        self._added = histogram(registry, CATALOGUE_PROXY_ADDED)
        self._runtimes = histogram(registry, CATALOGUE_PROXY_RUNTIME_SECONDS)
        self._spans = counter(registry, CATALOGUE_SPANS)
        registry.register(_Up(up))

    def call_took(self, method: str, code: str, seconds: float, added: float | None) -> None:
        self._calls.labels(method, code).observe(seconds)
        if added is not None:
            self._added.observe(max(0.0, added))

    def runtime_took(self, runtime: str, method: str, code: str, seconds: float) -> None:
        self._runtimes.labels(runtime, method, code).observe(seconds)

    def spans(self, result: str, number: int) -> None:
        self._spans.labels(result).inc(number)


class _Up:
    def __init__(self, up: Callable[[], Mapping[str, bool]]) -> None:
        self._up = up

    def collect(self) -> Iterable[Metric]:
        of = CATALOGUE_PROXY_UP
        family = GaugeMetricFamily(of.name, of.help, labels=of.labels)
        for runtime, is_up in self._up().items():
            family.add_metric([runtime], int(is_up))
        yield family
