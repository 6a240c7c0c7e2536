"""The calls for statistics and metrics of containers and pods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.lists import batches
from virtshim.cri.services import ServicerPart, shows_adopted
from virtshim.cri.to_proto import container_metadata, sandbox_metadata
from virtshim.metrics import container_metrics, vm_metrics
from virtshim.metrics.family import LIMITS_OF_POD, Kind, LabelledSample, of_container, of_pod
from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.metrics.vm_metrics import DEVICES_OF_CONTAINER, DEVICES_OF_POD
from virtshim.model.usage import CpuUsage, DiskUsage, InterfaceUsage, MemoryUsage, Pressure
from virtshim.pods.lookup import Filter, get_container, get_sandbox, list_containers, list_sandboxes

# Conversion to CRI messages. Pure. An unknown number stays unset, because unset is not 0.
#
# kubelet crashes on stats without attributes, their metadata, `linux`, or a network without its default interface.


def container_stats(use: ContainerUsage) -> pb.ContainerStats:
    container, cgroup = use.container, use.domain.cgroup
    pressure = cgroup.pressure if cgroup else {}
    return pb.ContainerStats(
        attributes=pb.ContainerAttributes(
            id=container.id.value,
            metadata=container_metadata(container),
            labels=container.config.labels,
            annotations=container.config.annotations,
        ),
        cpu=_cpu(use.cpu, pressure) if use.cpu else None,
        memory=_memory(use.memory, use.taken_at, pressure) if use.memory else None,
        writable_layer=_disk(use.disk) if use.disk else None,
        swap=_swap(use.memory, use.taken_at) if use.memory else None,
        io=pb.IoUsage(timestamp=use.taken_at, psi=_psi(pressure["io"])) if "io" in pressure else None,
    )


def sandbox_stats(use: SandboxUsage) -> pb.PodSandboxStats:
    sandbox = use.sandbox
    return pb.PodSandboxStats(
        attributes=pb.PodSandboxAttributes(
            id=sandbox.id.value,
            metadata=sandbox_metadata(sandbox),
            labels=sandbox.config.labels,
            annotations=sandbox.config.annotations,
        ),
        linux=pb.LinuxPodSandboxStats(
            cpu=_cpu(use.cpu, {}) if use.cpu else None,
            memory=_memory(use.memory, use.taken_at, {}) if use.memory else None,
            network=_network(use.interfaces, use.taken_at) if use.interfaces else None,
            process=pb.ProcessUsage(timestamp=use.taken_at, process_count=pb.UInt64Value(value=use.processes)),
            containers=[container_stats(container) for container in use.containers],
        ),
    )


def _number(value: int | None) -> pb.UInt64Value | None:
    return None if value is None else pb.UInt64Value(value=value)


def _cpu(use: CpuUsage, pressure: Mapping[str, Pressure]) -> pb.CpuUsage:
    return pb.CpuUsage(
        timestamp=use.taken_at,
        usage_core_nano_seconds=_number(use.total),
        usage_nano_cores=_number(use.nano_cores),
        psi=_psi(pressure["cpu"]) if "cpu" in pressure else None,
    )


def _memory(use: MemoryUsage, taken_at: int, pressure: Mapping[str, Pressure]) -> pb.MemoryUsage:
    return pb.MemoryUsage(
        timestamp=taken_at,
        working_set_bytes=_number(use.working_set),
        available_bytes=_number(use.available),
        usage_bytes=_number(use.usage),
        rss_bytes=_number(use.rss),
        page_faults=_number(use.page_faults),
        major_page_faults=_number(use.major_page_faults),
        psi=_psi(pressure["memory"]) if "memory" in pressure else None,
    )


def _swap(use: MemoryUsage, taken_at: int) -> pb.SwapUsage | None:
    """The available swap is unknown, because virtshim sets no limit on swap."""
    return None if use.swap is None else pb.SwapUsage(timestamp=taken_at, swap_usage_bytes=_number(use.swap))


def _disk(use: DiskUsage) -> pb.FilesystemUsage:
    return pb.FilesystemUsage(
        timestamp=use.taken_at,
        fs_id=pb.FilesystemIdentifier(mountpoint=use.directory),
        used_bytes=_number(use.used_bytes),
        inodes_used=_number(use.inodes_used),
    )


def _network(interfaces: Sequence[InterfaceUsage], taken_at: int) -> pb.NetworkUsage:
    first, *others = [
        pb.NetworkInterfaceUsage(
            name=interface.name,
            rx_bytes=_number(interface.rx_bytes),
            rx_errors=_number(interface.rx_errors),
            tx_bytes=_number(interface.tx_bytes),
            tx_errors=_number(interface.tx_errors),
        )
        for interface in interfaces
    ]
    return pb.NetworkUsage(timestamp=taken_at, default_interface=first, interfaces=others)


def _psi(pressure: Pressure) -> pb.PsiStats:
    return pb.PsiStats(
        Some=_psi_data(pressure.some_total, pressure.some_averages),
        Full=_psi_data(pressure.full_total, pressure.full_averages),
    )


def _psi_data(total: int, averages: tuple[float, float, float]) -> pb.PsiData:
    return pb.PsiData(Total=total, Avg10=averages[0], Avg60=averages[1], Avg300=averages[2])


CONTAINER_FAMILIES: Final = (*container_metrics.CONTAINER, *vm_metrics.CONTAINER, *DEVICES_OF_CONTAINER)
POD_FAMILIES: Final = (*container_metrics.POD, *vm_metrics.POD, *DEVICES_OF_POD, *LIMITS_OF_POD)

_TYPE: Final[Mapping[Kind, pb.MetricType.ValueType]] = {Kind.COUNTER: pb.COUNTER, Kind.GAUGE: pb.GAUGE}


class StatsCalls(ServicerPart):
    def ContainerStats(
        self, request: pb.ContainerStatsRequest, context: grpc.ServicerContext
    ) -> pb.ContainerStatsResponse:
        container = get_container(self._services.records, request.container_id)
        (use,) = self._services.usage.containers([container])
        return pb.ContainerStatsResponse(stats=container_stats(use))

    def ListContainerStats(
        self, request: pb.ListContainerStatsRequest, context: grpc.ServicerContext
    ) -> pb.ListContainerStatsResponse:
        return pb.ListContainerStatsResponse(stats=self._of_containers(request.filter))

    def StreamContainerStats(
        self, request: pb.StreamContainerStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamContainerStatsResponse]:
        for batch in batches(self._of_containers(request.filter)):
            yield pb.StreamContainerStatsResponse(container_stats=batch)

    def PodSandboxStats(
        self, request: pb.PodSandboxStatsRequest, context: grpc.ServicerContext
    ) -> pb.PodSandboxStatsResponse:
        sandbox = get_sandbox(self._services.records, request.pod_sandbox_id)
        (use,) = self._services.usage.sandboxes([sandbox])
        return pb.PodSandboxStatsResponse(stats=sandbox_stats(use))

    def ListPodSandboxStats(
        self, request: pb.ListPodSandboxStatsRequest, context: grpc.ServicerContext
    ) -> pb.ListPodSandboxStatsResponse:
        found = self._of_sandboxes(request.filter, adopted=shows_adopted(context))
        return pb.ListPodSandboxStatsResponse(stats=found)

    def StreamPodSandboxStats(
        self, request: pb.StreamPodSandboxStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPodSandboxStatsResponse]:
        for batch in batches(self._of_sandboxes(request.filter)):
            yield pb.StreamPodSandboxStatsResponse(pod_sandbox_stats=batch)

    def ListMetricDescriptors(
        self, request: pb.ListMetricDescriptorsRequest, context: grpc.ServicerContext
    ) -> pb.ListMetricDescriptorsResponse:
        described = [
            *(pb.MetricDescriptor(name=f.name, help=f.help, label_keys=f.label_keys) for f in CONTAINER_FAMILIES),
            *(pb.MetricDescriptor(name=f.name, help=f.help, label_keys=f.label_keys) for f in POD_FAMILIES),
        ]
        return pb.ListMetricDescriptorsResponse(descriptors=described)

    def ListPodSandboxMetrics(
        self, request: pb.ListPodSandboxMetricsRequest, context: grpc.ServicerContext
    ) -> pb.ListPodSandboxMetricsResponse:
        return pb.ListPodSandboxMetricsResponse(pod_metrics=self._all_metrics(adopted=shows_adopted(context)))

    def StreamPodSandboxMetrics(
        self, request: pb.StreamPodSandboxMetricsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPodSandboxMetricsResponse]:
        for batch in batches(self._all_metrics()):
            yield pb.StreamPodSandboxMetricsResponse(pod_sandbox_metrics=batch)

    def _all_metrics(self, *, adopted: bool = False) -> Sequence[pb.PodSandboxMetrics]:
        """The runtime that made an adopted sandbox tells the pod's own metrics, and knows none of its VM."""
        uses = self._services.usage.sandboxes(list_sandboxes(self._services.records, Filter(adopted=True)))
        return [_pod_metrics(use, of_pod_itself=adopted or use.sandbox.is_visible) for use in uses]

    def _of_containers(self, wanted: pb.ContainerStatsFilter) -> Sequence[pb.ContainerStats]:
        chosen = list_containers(
            self._services.records, Filter(id=wanted.id, sandbox_id=wanted.pod_sandbox_id, labels=wanted.label_selector)
        )
        return [container_stats(use) for use in self._services.usage.containers(chosen)]

    def _of_sandboxes(self, wanted: pb.PodSandboxStatsFilter, *, adopted: bool = False) -> Sequence[pb.PodSandboxStats]:
        asked = Filter(id=wanted.id, labels=wanted.label_selector, adopted=adopted)
        chosen = list_sandboxes(self._services.records, asked)
        return [sandbox_stats(use) for use in self._services.usage.sandboxes(chosen)]


def _pod_metrics(use: SandboxUsage, *, of_pod_itself: bool) -> pb.PodSandboxMetrics:
    return pb.PodSandboxMetrics(
        pod_sandbox_id=use.sandbox.id.value,
        metrics=_messages(of_pod(POD_FAMILIES, use)) if of_pod_itself else (),
        container_metrics=[
            pb.ContainerMetrics(
                container_id=container.container.id.value,
                metrics=_messages(of_container(CONTAINER_FAMILIES, use.sandbox, container)),
            )
            for container in use.containers
        ],
    )


def _messages(measured: Iterable[LabelledSample]) -> list[pb.Metric]:
    """Converts samples. CRI carries whole numbers only, so seconds are whole seconds. There are no timestamps: the
    values were read just now, and without timestamps Prometheus knows better when a series ends."""
    return [
        pb.Metric(
            name=one.name,
            metric_type=_TYPE[one.kind],
            label_values=one.labels,
            value=pb.UInt64Value(value=int(one.value)),
        )
        for one in measured
    ]
