"""A reading as Prometheus' families: one after another, so that no more than one of them is in memory."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Final, TypeVar

from prometheus_client.core import Metric

from virtshim.domain.network import PluginRuns
from virtshim.domain.printable import escaped
from virtshim.metrics import device_metrics, limit_metrics, vm_metrics
from virtshim.metrics.family import SECOND, Family, Sample
from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.ports.clock import Clock
from virtshim.primitives.threads import lasting_threads
from virtshim.telemetry import catalogue
from virtshim.telemetry.catalogue import Described
from virtshim.telemetry.guest_filesystems import GuestFilesystems
from virtshim.telemetry.node_readings import NodeReading
from virtshim.telemetry.sampler import Sampler, Taken

S = TypeVar("S")

VM_FAMILIES: Final = (*vm_metrics.CONTAINER, *device_metrics.CONTAINER)
POD_FAMILIES: Final = (*vm_metrics.POD, *device_metrics.POD, *limit_metrics.POD)
# Before a family's own. kubelet, which carries the same families, has two more: the names of image and domain.
POD_LABELS: Final = ("namespace", "pod", "id")
VM_LABELS: Final = (*POD_LABELS, "container")

# Characters of a label's value: Kubernetes' own longest name, but CRI takes others.
_LONGEST: Final = 253

Labels = dict[str, str]


class NodeCollector:
    """For a registry of prometheus-client's. Thread-safe."""

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
        started, trouble = _metric(catalogue.START_TIME), _metric(catalogue.TROUBLE)
        troubles = _metric(catalogue.TROUBLES)
        size, used = _metric(catalogue.FILESYSTEM_SIZE), _metric(catalogue.FILESYSTEM_USED)
        for labels, vm in vms:
            status = vm.container.status
            started.add_sample(started.name, labels, status.started_at / SECOND)
            trouble.add_sample(trouble.name, labels, int(bool(status.trouble)))
            for kind, count in Counter(one.kind for one in status.troubles).items():
                troubles.add_sample(troubles.name, labels | {"kind": kind.value}, count)
            for one in self._filesystems.of(vm.container.id):
                values = (one.device, one.kind, one.mount_point)
                of_one = labels | dict(zip(catalogue.FILESYSTEM_SIZE.labels, map(_shown, values), strict=True))
                size.add_sample(size.name, of_one, one.total_bytes)
                used.add_sample(used.name, of_one, one.used_bytes)
        yield from (started, trouble, troubles, size, used)

    def _of_scrape(self, taken: Taken[NodeReading] | None, *, is_late: bool) -> Iterator[Metric]:
        late, took, age = (
            _metric(one) for one in (catalogue.SCRAPE_LATE, catalogue.SCRAPE_SECONDS, catalogue.SCRAPE_AGE)
        )
        late.add_sample(late.name, {}, int(is_late))
        if taken is not None:
            took.add_sample(took.name, {}, taken.seconds)
            age.add_sample(age.name, {}, max(0.0, self._clock.monotonic() - taken.at))
        yield from (late, took, age, _by(catalogue.THREADS, lasting_threads()))


def _pod_labels(pod: SandboxUsage) -> Labels:
    key = pod.sandbox.key
    return {"namespace": _shown(key.namespace), "pod": _shown(key.name), "id": pod.sandbox.id.value}


def _vm_labels(pod: SandboxUsage, vm: ContainerUsage) -> Labels:
    """`id` is the container's."""
    container = vm.container
    return _pod_labels(pod) | {"container": _shown(container.name.name), "id": container.id.value}


def _of_node(reading: NodeReading | None) -> Iterator[Metric]:
    build = _metric(catalogue.BUILD)
    build.add_sample(build.name, {"version": version("virtshim"), "python": platform.python_version()}, 1)
    yield build
    found = reading or NodeReading((), {}, {}, {}, 0, {}, ())
    yield _by(catalogue.UP, found.up)
    yield _by(catalogue.VMIS, found.vmis)
    yield _by(catalogue.PODS, found.pod_states)
    yield _by(catalogue.STORE_BYTES, found.stores)
    unfinished = _metric(catalogue.UNFINISHED)
    if reading is not None:
        unfinished.add_sample(unfinished.name, {}, reading.unfinished)
    yield unfinished
    yield from _of_plugins(found.plugin_runs)


def _of_plugins(runs: Sequence[PluginRuns]) -> Iterator[Metric]:
    seconds, errors = _metric(catalogue.CNI_SECONDS), _metric(catalogue.CNI_ERRORS)
    for one in runs:
        labels = {"command": _shown(one.command), "plugin": _shown(one.plugin)}
        for bound, count in one.buckets:
            le = "+Inf" if bound == float("inf") else repr(float(bound))
            seconds.add_sample(f"{seconds.name}_bucket", labels | {"le": le}, count)
        seconds.add_sample(f"{seconds.name}_count", labels, one.buckets[-1][1])
        seconds.add_sample(f"{seconds.name}_sum", labels, one.seconds)
        errors.add_sample(catalogue.CNI_ERRORS.name, labels, one.failures)
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
            if sample.labels and not sample.labels[0]:  # of nothing: CRI wants one of each family, Prometheus does not
                continue
            metric.add_sample(family.name, _with(labels, family.labels, sample), sample.value)
    return metric


def _with(labels: Labels, names: tuple[str, ...], sample: Sample) -> Labels:
    return labels | dict(zip(names, map(_shown, sample.labels), strict=True)) if names else labels


def _shown(value: str) -> str:
    """What pods, guests and devices are called by others."""
    return escaped(value, _LONGEST)
