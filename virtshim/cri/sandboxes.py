"""Pod sandboxes: run, stop, remove, list, status, resources. CheckpointPod and RestorePod are UNIMPLEMENTED."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_domain, to_proto
from virtshim.cri.lists import ItemCache, ResponseCache, batches
from virtshim.cri.services import ServicerPart, Services, shows_adopted
from virtshim.cri.validation import LogOnce, without_effect_of_sandbox
from virtshim.model.errors import InvalidRequest
from virtshim.pods.lookup import Filter, find_any_sandbox, get_any_sandbox, get_sandbox, list_sandboxes


class SandboxCalls(ServicerPart):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._sandbox_list = ItemCache(to_proto.sandbox_item)
        self._all_sandboxes = ResponseCache(
            lambda: services.records.sandboxes.generation,
            lambda: pb.ListPodSandboxResponse(items=self._sandbox_items(pb.PodSandboxFilter())),
        )
        self._sandbox_log = LogOnce()

    def RunPodSandbox(
        self, request: pb.RunPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.RunPodSandboxResponse:
        if not request.HasField("config"):
            raise InvalidRequest("RunPodSandbox: config is missing")
        key = to_domain.sandbox_key(request.config)
        config = to_domain.sandbox_config(request.config, request.runtime_handler)
        self._sandbox_log.log(without_effect_of_sandbox(request.config))
        made = self._services.run_sandbox.run(key, config, self._deadline(context))
        return pb.RunPodSandboxResponse(pod_sandbox_id=made.value)

    def StopPodSandbox(
        self, request: pb.StopPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.StopPodSandboxResponse:
        found = find_any_sandbox(self._services.records, request.pod_sandbox_id)
        if found is not None:
            self._services.stop_sandbox.stop(found, self._deadline(context))
        return pb.StopPodSandboxResponse()

    def RemovePodSandbox(
        self, request: pb.RemovePodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.RemovePodSandboxResponse:
        found = find_any_sandbox(self._services.records, request.pod_sandbox_id)
        if found is not None:
            self._services.remove_sandbox.remove(found, self._deadline(context))
        return pb.RemovePodSandboxResponse()

    def PodSandboxStatus(
        self, request: pb.PodSandboxStatusRequest, context: grpc.ServicerContext
    ) -> pb.PodSandboxStatusResponse:
        sandbox = get_sandbox(self._services.records, request.pod_sandbox_id, adopted=shows_adopted(context))
        info = {"info": json.dumps(self._services.node.sandbox_facts(sandbox))} if request.verbose else {}
        return pb.PodSandboxStatusResponse(status=to_proto.sandbox_status(sandbox), info=info)

    def ListPodSandbox(
        self, request: pb.ListPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.ListPodSandboxResponse:
        adopted = shows_adopted(context)
        if not request.filter.ByteSize() and not adopted:
            return self._all_sandboxes.answer()
        return pb.ListPodSandboxResponse(items=self._sandbox_items(request.filter, adopted=adopted))

    def StreamPodSandboxes(
        self, request: pb.StreamPodSandboxesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPodSandboxesResponse]:
        for batch in batches(self._sandbox_items(request.filter)):
            yield pb.StreamPodSandboxesResponse(pod_sandboxes=batch)

    def _sandbox_items(self, wanted: pb.PodSandboxFilter, *, adopted: bool = False) -> list[pb.PodSandbox]:
        asked = Filter(id=wanted.id, labels=wanted.label_selector, adopted=adopted)
        found = list_sandboxes(self._services.records, asked)
        items = self._sandbox_list.items(found)
        if wanted.HasField("state"):
            items = [item for item in items if item.state == wanted.state.state]
        return items

    def UpdatePodSandboxResources(
        self, request: pb.UpdatePodSandboxResourcesRequest, context: grpc.ServicerContext
    ) -> pb.UpdatePodSandboxResourcesResponse:
        sandbox = get_any_sandbox(self._services.records, request.pod_sandbox_id)
        overhead = to_domain.resources(request.overhead, "UpdatePodSandboxResources", "overhead")
        resources = to_domain.resources(request.resources, "UpdatePodSandboxResources", "resources")
        self._services.update_sandbox_resources.resize(sandbox.id, overhead, resources)
        return pb.UpdatePodSandboxResourcesResponse()
