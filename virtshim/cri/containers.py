"""Containers: create, start, stop, remove, list, status, resources, checkpoint, log rotation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_domain, to_proto
from virtshim.cri.lists import ItemCache, ResponseCache, batches
from virtshim.cri.services import ServicerPart, Services, seconds_left
from virtshim.cri.validation import LogOnce, without_effect_of_container
from virtshim.model.container import Container
from virtshim.model.deadline import Deadline
from virtshim.model.errors import InvalidRequest
from virtshim.pods.lookup import Filter, find_container, get_any_sandbox, get_container, list_containers


class ContainerCalls(ServicerPart):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._container_list = ItemCache(to_proto.container_item)
        self._all_containers = ResponseCache(
            lambda: services.records.containers.generation,
            lambda: pb.ListContainersResponse(containers=self._container_items(pb.ContainerFilter())),
        )
        self._container_log = LogOnce()

    def CreateContainer(
        self, request: pb.CreateContainerRequest, context: grpc.ServicerContext
    ) -> pb.CreateContainerResponse:
        if not request.HasField("config"):
            raise InvalidRequest("CreateContainer: config is missing")
        name = to_domain.container_name(request.config)
        self._container_log.log(without_effect_of_container(request.config))
        sandbox = get_any_sandbox(self._services.records, request.pod_sandbox_id)
        if sandbox.adopted is not None:
            # kubelet gives the pod's profiles to each container. Here they are for the containers beside the VM.
            for name_of_field in ("seccomp", "seccomp_profile_path", "apparmor", "apparmor_profile"):
                request.config.linux.security_context.ClearField(name_of_field)
        config = to_domain.container_config(request.config)
        made = self._services.create_container.create(sandbox.id, name, config, self._deadline(context))
        return pb.CreateContainerResponse(container_id=made.value)

    def StartContainer(
        self, request: pb.StartContainerRequest, context: grpc.ServicerContext
    ) -> pb.StartContainerResponse:
        self._services.start_container.start(get_container(self._services.records, request.container_id))
        return pb.StartContainerResponse()

    def StopContainer(
        self, request: pb.StopContainerRequest, context: grpc.ServicerContext
    ) -> pb.StopContainerResponse:
        found = find_container(self._services.records, request.container_id)
        if found is not None:
            self._services.stop_container.stop(found, max(0, request.timeout))
        return pb.StopContainerResponse()

    def RemoveContainer(
        self, request: pb.RemoveContainerRequest, context: grpc.ServicerContext
    ) -> pb.RemoveContainerResponse:
        found = find_container(self._services.records, request.container_id)
        if found is not None:
            self._services.remove_container.remove(found)
        return pb.RemoveContainerResponse()

    def ReopenContainerLog(
        self, request: pb.ReopenContainerLogRequest, context: grpc.ServicerContext
    ) -> pb.ReopenContainerLogResponse:
        self._services.reopen_container_log.reopen(get_container(self._services.records, request.container_id))
        return pb.ReopenContainerLogResponse()

    def ContainerStatus(
        self, request: pb.ContainerStatusRequest, context: grpc.ServicerContext
    ) -> pb.ContainerStatusResponse:
        container = get_container(self._services.records, request.container_id)
        info = self._container_info(container) if request.verbose else {}
        return pb.ContainerStatusResponse(status=to_proto.container_status(container), info=info)

    def ListContainers(
        self, request: pb.ListContainersRequest, context: grpc.ServicerContext
    ) -> pb.ListContainersResponse:
        if not request.filter.ByteSize():
            return self._all_containers.answer()
        return pb.ListContainersResponse(containers=self._container_items(request.filter))

    def StreamContainers(
        self, request: pb.StreamContainersRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamContainersResponse]:
        for batch in batches(self._container_items(request.filter)):
            yield pb.StreamContainersResponse(containers=batch)

    def UpdateContainerResources(
        self, request: pb.UpdateContainerResourcesRequest, context: grpc.ServicerContext
    ) -> pb.UpdateContainerResourcesResponse:
        container = get_container(self._services.records, request.container_id)
        if request.HasField("windows"):
            raise InvalidRequest("UpdateContainerResources: windows is set, this node runs Linux; send linux")
        resources = to_domain.resources(request.linux, "UpdateContainerResources", "linux")
        self._services.update_container_resources.resize(container, resources)
        return pb.UpdateContainerResourcesResponse()

    def CheckpointContainer(
        self, request: pb.CheckpointContainerRequest, context: grpc.ServicerContext
    ) -> pb.CheckpointContainerResponse:
        if not request.location:
            raise InvalidRequest("CheckpointContainer: location is empty")
        if request.timeout < 0:
            raise InvalidRequest(f"CheckpointContainer: timeout {request.timeout} is negative")
        container = get_container(self._services.records, request.container_id)
        # kubelet's deadline for this call is the longer of its usual deadline and this timeout.
        seconds = float(request.timeout) or seconds_left(context)
        deadline = Deadline.after(self._services.clock.monotonic(), seconds)
        self._services.checkpoint_container.checkpoint(container, request.location, deadline)
        return pb.CheckpointContainerResponse()

    def _container_items(self, wanted: pb.ContainerFilter) -> list[pb.Container]:
        found = list_containers(
            self._services.records, Filter(id=wanted.id, sandbox_id=wanted.pod_sandbox_id, labels=wanted.label_selector)
        )
        items = self._container_list.items(found)
        if wanted.HasField("state"):
            items = [item for item in items if item.state == wanted.state.state]
        return items

    def _container_info(self, container: Container) -> Mapping[str, str]:
        """What `crictl inspect` shows beside the status; no secrets. There is no `pid`, because tools would enter the namespaces
        of that process to reach the pod's network, and QEMU is in the node's own namespaces."""
        facts = {
            **self._services.node.container_facts(container),
            "qemuPid": self._services.usage.process_id(container) or 0,
        }
        guest = self._services.exec_command.guest_info(container)
        return {"info": json.dumps(facts), **({"guestInfo": json.dumps(guest)} if guest else {})}
