"""What containers and pods use: kubelet's statistics, and its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.lists import batches
from virtshim.cri.services import ServicerPart
from virtshim.cri.stats_to_proto import container_stats, sandbox_stats
from virtshim.metrics import container_metrics, device_metrics, limit_metrics, vm_metrics
from virtshim.metrics.family import Kind, LabelledSample, of_container, of_pod
from virtshim.metrics.usage import SandboxUsage
from virtshim.queries.lists import Filter, list_containers, list_sandboxes
from virtshim.queries.lookup import get_container, get_sandbox

CONTAINER_FAMILIES: Final = (*container_metrics.CONTAINER, *vm_metrics.CONTAINER, *device_metrics.CONTAINER)
POD_FAMILIES: Final = (*container_metrics.POD, *vm_metrics.POD, *device_metrics.POD, *limit_metrics.POD)

_TYPE: Final[Mapping[Kind, pb.MetricType.ValueType]] = {Kind.COUNTER: pb.COUNTER, Kind.GAUGE: pb.GAUGE}


class StatsCalls(ServicerPart):
    def ContainerStats(
        self, request: pb.ContainerStatsRequest, context: grpc.ServicerContext
    ) -> pb.ContainerStatsResponse:
        del context
        container = get_container(self._services.records, request.container_id)
        (use,) = self._services.usage.containers([container])
        return pb.ContainerStatsResponse(stats=container_stats(use))

    def ListContainerStats(
        self, request: pb.ListContainerStatsRequest, context: grpc.ServicerContext
    ) -> pb.ListContainerStatsResponse:
        del context
        return pb.ListContainerStatsResponse(stats=self._of_containers(request.filter))

    def StreamContainerStats(
        self, request: pb.StreamContainerStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamContainerStatsResponse]:
        del context
        for batch in batches(self._of_containers(request.filter)):
            yield pb.StreamContainerStatsResponse(container_stats=batch)

    def PodSandboxStats(
        self, request: pb.PodSandboxStatsRequest, context: grpc.ServicerContext
    ) -> pb.PodSandboxStatsResponse:
        del context
        sandbox = get_sandbox(self._services.records, request.pod_sandbox_id)
        (use,) = self._services.usage.sandboxes([sandbox])
        return pb.PodSandboxStatsResponse(stats=sandbox_stats(use))

    def ListPodSandboxStats(
        self, request: pb.ListPodSandboxStatsRequest, context: grpc.ServicerContext
    ) -> pb.ListPodSandboxStatsResponse:
        del context
        return pb.ListPodSandboxStatsResponse(stats=self._of_sandboxes(request.filter))

    def StreamPodSandboxStats(
        self, request: pb.StreamPodSandboxStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPodSandboxStatsResponse]:
        del context
        for batch in batches(self._of_sandboxes(request.filter)):
            yield pb.StreamPodSandboxStatsResponse(pod_sandbox_stats=batch)

    def ListMetricDescriptors(
        self, request: pb.ListMetricDescriptorsRequest, context: grpc.ServicerContext
    ) -> pb.ListMetricDescriptorsResponse:
        del request, context
        described = [
            *(pb.MetricDescriptor(name=f.name, help=f.help, label_keys=f.label_keys) for f in CONTAINER_FAMILIES),
            *(pb.MetricDescriptor(name=f.name, help=f.help, label_keys=f.label_keys) for f in POD_FAMILIES),
        ]
        return pb.ListMetricDescriptorsResponse(descriptors=described)

    def ListPodSandboxMetrics(
        self, request: pb.ListPodSandboxMetricsRequest, context: grpc.ServicerContext
    ) -> pb.ListPodSandboxMetricsResponse:
        del request, context
        return pb.ListPodSandboxMetricsResponse(pod_metrics=self._all_metrics())

    def StreamPodSandboxMetrics(
        self, request: pb.StreamPodSandboxMetricsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPodSandboxMetricsResponse]:
        del request, context
        for batch in batches(self._all_metrics()):
            yield pb.StreamPodSandboxMetricsResponse(pod_sandbox_metrics=batch)

    def _all_metrics(self) -> Sequence[pb.PodSandboxMetrics]:
        uses = self._services.usage.sandboxes(list_sandboxes(self._services.records, Filter()))
        return [_of_one(use) for use in uses]

    def _of_containers(self, wanted: pb.ContainerStatsFilter) -> Sequence[pb.ContainerStats]:
        chosen = list_containers(
            self._services.records, Filter(id=wanted.id, sandbox_id=wanted.pod_sandbox_id, labels=wanted.label_selector)
        )
        return [container_stats(use) for use in self._services.usage.containers(chosen)]

    def _of_sandboxes(self, wanted: pb.PodSandboxStatsFilter) -> Sequence[pb.PodSandboxStats]:
        chosen = list_sandboxes(self._services.records, Filter(id=wanted.id, labels=wanted.label_selector))
        return [sandbox_stats(use) for use in self._services.usage.sandboxes(chosen)]


def _of_one(use: SandboxUsage) -> pb.PodSandboxMetrics:
    return pb.PodSandboxMetrics(
        pod_sandbox_id=use.sandbox.id.value,
        metrics=_messages(of_pod(POD_FAMILIES, use)),
        container_metrics=[
            pb.ContainerMetrics(
                container_id=container.container.id.value,
                metrics=_messages(of_container(CONTAINER_FAMILIES, use.sandbox, container)),
            )
            for container in use.containers
        ],
    )


def _messages(measured: Iterable[LabelledSample]) -> list[pb.Metric]:
    """Whole numbers, as CRI carries no others: seconds are whole seconds. Without timestamps: they were read just now, and
    Prometheus knows better when a series ends."""
    return [
        pb.Metric(
            name=one.name,
            metric_type=_TYPE[one.kind],
            label_values=one.labels,
            value=pb.UInt64Value(value=int(one.value)),
        )
        for one in measured
    ]
