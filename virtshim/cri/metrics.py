"""The RPCs that give kubelet its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.batches import batches
from virtshim.metrics import container_metrics, device_metrics, vm_metrics
from virtshim.metrics.family import Kind, Measured, of_container, of_pod
from virtshim.metrics.usage import SandboxUse
from virtshim.queries.lists import Filter, list_sandboxes

if TYPE_CHECKING:
    from virtshim.cri.runtime import Services

CONTAINER_FAMILIES: Final = (*container_metrics.CONTAINER, *vm_metrics.CONTAINER, *device_metrics.CONTAINER)
POD_FAMILIES: Final = (*container_metrics.POD, *vm_metrics.POD, *device_metrics.POD)

_TYPE: Final[Mapping[Kind, pb.MetricType.ValueType]] = {Kind.COUNTER: pb.COUNTER, Kind.GAUGE: pb.GAUGE}


class MetricsCalls:
    """Part of RuntimeServicer."""

    _do: Services

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
        uses = self._do.usage.sandboxes(list_sandboxes(self._do.records, Filter()))
        return [_of_one(use) for use in uses]


def _of_one(use: SandboxUse) -> pb.PodSandboxMetrics:
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


def _messages(measured: Iterable[Measured]) -> list[pb.Metric]:
    """Without timestamps: they were read just now, and Prometheus knows better when a series ends."""
    return [
        pb.Metric(
            name=one.name,
            metric_type=_TYPE[one.kind],
            label_values=one.labels,
            value=pb.UInt64Value(value=one.value),
        )
        for one in measured
    ]
