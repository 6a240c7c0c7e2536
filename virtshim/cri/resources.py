"""In-place resize: UpdateContainerResources and UpdatePodSandboxResources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_domain
from virtshim.domain.errors import InvalidRequest
from virtshim.queries.lookup import get_container, get_sandbox

if TYPE_CHECKING:
    from virtshim.cri.runtime import Services


class ResourceCalls:
    """Part of RuntimeServicer."""

    _do: Services

    def UpdateContainerResources(
        self, request: pb.UpdateContainerResourcesRequest, context: grpc.ServicerContext
    ) -> pb.UpdateContainerResourcesResponse:
        del context
        container = get_container(self._do.records, request.container_id)
        if request.HasField("windows"):
            raise InvalidRequest("UpdateContainerResources: windows is set, this node runs Linux; send linux")
        resources = to_domain.resources(request.linux, "UpdateContainerResources", "linux")
        self._do.resize_container.resize(container, resources)
        return pb.UpdateContainerResourcesResponse()

    def UpdatePodSandboxResources(
        self, request: pb.UpdatePodSandboxResourcesRequest, context: grpc.ServicerContext
    ) -> pb.UpdatePodSandboxResourcesResponse:
        del context
        sandbox = get_sandbox(self._do.records, request.pod_sandbox_id)
        overhead = to_domain.resources(request.overhead, "UpdatePodSandboxResources", "overhead")
        resources = to_domain.resources(request.resources, "UpdatePodSandboxResources", "resources")
        self._do.resize_sandbox.resize(sandbox.id, overhead, resources)
        return pb.UpdatePodSandboxResourcesResponse()
