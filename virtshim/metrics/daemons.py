"""Describes and counts the metrics of virtshim and its proxy. docs/metrics.md lists all metrics; a test compares.

ProxyRecorder implements `virtshim.proxy.measuring.ProxyMeter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from virtshim.metrics.observed import (
    Exited,
    Fact,
    ImagesRemoved,
    Leftover,
    Meter,
    Pulled,
    Reconciled,
    Step,
    WarmStart,
    WarmStarted,
)
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

RPC_SECONDS: Final = Described(
    "virtshim_rpc_duration_seconds",
    "histogram",
    "Calls on the CRI socket, by result; a stream lasts until its client disconnects.",
    ("method", "code"),
    _OF_CALLS,
)
RPCS_RUNNING: Final = Described("virtshim_rpcs_running", "gauge", "Running calls, streams included.")
START_STEP_SECONDS: Final = Described(
    "virtshim_start_phase_duration_seconds",
    "histogram",
    "Parts of pods' starts: network (CNI, tap), admission, devices, disk, seed, empty_disks, define (libvirt's definition), "
    "cgroup, volumes, libvirt (until QEMU runs), agent (from then until the guest's agent is up).",
    ("phase", "result"),
    _OF_STEPS,
)
PULL_SECONDS: Final = Described(
    "virtshim_image_pull_duration_seconds",
    "histogram",
    "Pulls by result: ok, or the kind of error.",
    ("result",),
    _OF_PULLS,
)
PULL_BYTES: Final = Described(
    "virtshim_image_pull_bytes_total", "counter", "Bytes on disk of the images that were pulled."
)
PULLS_RUNNING: Final = Described("virtshim_image_pulls_running", "gauge", "Running pulls.")
IMAGES_REMOVED: Final = Described(
    "virtshim_image_gc_removed_total",
    "counter",
    "Unused images that virtshim removed because their file system was fuller than images.gc_high_percent.",
)
RECONCILE_SECONDS: Final = Described(
    "virtshim_reconcile_duration_seconds",
    "histogram",
    "Comparisons of the records with the node while serving, by result: ok, or the kind of error.",
    ("result",),
    _OF_ROUNDS,
)
LEAKS: Final = Described(
    "virtshim_leaks_found_total",
    "counter",
    "Leftovers without an owner, found at start or while serving, by kind.",
    ("kind",),
)
EXITS: Final = Described(
    "virtshim_vmi_exits_total",
    "counter",
    "Ends of VMs by reason: Completed, Error, OOMKilled, StartError, Saved, Moved, Unknown.",
    ("reason",),
)
WARM_STARTS: Final = Described(
    "virtshim_warm_starts_total",
    "counter",
    "Starts of containers with virtshim.io/warm-start: warm, or why the guest booted instead: not_allowed (templates.max_bytes "
    "is 0), unsuitable (no template can have such a machine), no_template (there is none yet), unfit (its template could not "
    "be made, or was of no use), failed (the start from the template failed).",
    ("result",),
)

# --- of the proxy

PROXY_SECONDS: Final = Described(
    "virtshim_proxy_rpc_duration_seconds",
    "histogram",
    "Calls on the proxy's socket, by result.",
    ("method", "code"),
    _OF_CALLS,
)
PROXY_ADDED: Final = Described(
    "virtshim_proxy_added_seconds",
    "histogram",
    "Time that the proxy adds to a call: the call's time without the waiting for runtimes. Streams are not counted.",
    buckets=_ADDED,
)
PROXY_RUNTIME_SECONDS: Final = Described(
    "virtshim_proxy_runtime_rpc_duration_seconds",
    "histogram",
    "Calls to each runtime, by result.",
    ("runtime", "method", "code"),
    _OF_CALLS,
)
PROXY_UP: Final = Described(
    "virtshim_proxy_runtime_up", "gauge", "1 for a runtime that answered its last call.", ("runtime",)
)

# --- of both

SPANS: Final = Described(
    "virtshim_trace_spans_total",
    "counter",
    "Spans of traces by result: sent, refused (the collector refused them or did not answer) or dropped (too many waited).",
    ("result",),
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


class Recorder(Meter):
    """Counts for virtshim. Labels come from closed sets: CRI's methods, gRPC's codes, kinds of errors, virtshim's own words."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = histogram(registry, RPC_SECONDS)
        self._running = gauge(registry, RPCS_RUNNING)
        self._steps = histogram(registry, START_STEP_SECONDS)
        self._pulls = histogram(registry, PULL_SECONDS)
        self._pulled = counter(registry, PULL_BYTES)
        self._pulling = gauge(registry, PULLS_RUNNING)
        self._images_removed = counter(registry, IMAGES_REMOVED)
        self._reconciled = histogram(registry, RECONCILE_SECONDS)
        self._leaks = counter(registry, LEAKS)
        self._spans = counter(registry, SPANS)
        self._exits = counter(registry, EXITS)
        for reason in ExitReason:  # starts at 0, so that Prometheus sees the first exit as an increase
            self._exits.labels(reason.value)
        self._warm_starts = counter(registry, WARM_STARTS)
        for how in WarmStart:
            self._warm_starts.labels(how.value)

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
            case WarmStarted():
                self._warm_starts.labels(fact.how.value).inc()


class ProxyRecorder:
    def __init__(self, registry: CollectorRegistry, up: Callable[[], Mapping[str, bool]]) -> None:
        """`up`: runtime name -> whether it answered its last call."""
        self._calls = histogram(registry, PROXY_SECONDS)
        self._added = histogram(registry, PROXY_ADDED)
        self._runtimes = histogram(registry, PROXY_RUNTIME_SECONDS)
        self._spans = counter(registry, SPANS)
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
        of = PROXY_UP
        family = GaugeMetricFamily(of.name, of.help, labels=of.labels)
        for runtime, is_up in self._up().items():
            family.add_metric([runtime], int(is_up))
        yield family
