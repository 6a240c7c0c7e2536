"""The RPCs that tell what containers and pods use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.batches import batches
from virtshim.cri.stats_to_proto import container_stats, sandbox_stats
from virtshim.queries.lists import Filter, list_containers, list_sandboxes
from virtshim.queries.lookup import get_container, get_sandbox

if TYPE_CHECKING:
    from virtshim.cri.runtime import Services


class StatsCalls:
    """Part of RuntimeServicer."""

    _do: Services

    def ContainerStats(
        self, request: pb.ContainerStatsRequest, context: grpc.ServicerContext
    ) -> pb.ContainerStatsResponse:
        del context
        container = get_container(self._do.records, request.container_id)
        (use,) = self._do.usage.containers([container])
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
        sandbox = get_sandbox(self._do.records, request.pod_sandbox_id)
        (use,) = self._do.usage.sandboxes([sandbox])
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

    def _of_containers(self, wanted: pb.ContainerStatsFilter) -> Sequence[pb.ContainerStats]:
        chosen = list_containers(
            self._do.records, Filter(id=wanted.id, sandbox_id=wanted.pod_sandbox_id, labels=wanted.label_selector)
        )
        return [container_stats(use) for use in self._do.usage.containers(chosen)]

    def _of_sandboxes(self, wanted: pb.PodSandboxStatsFilter) -> Sequence[pb.PodSandboxStats]:
        chosen = list_sandboxes(self._do.records, Filter(id=wanted.id, labels=wanted.label_selector))
        return [sandbox_stats(use) for use in self._do.usage.sandboxes(chosen)]
