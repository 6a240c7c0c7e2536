"""RuntimeService: convert, call one service, convert."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc
import structlog

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri import pod_fields, to_domain, to_proto
from virtshim.cri.batches import batches
from virtshim.cri.checkpoint import CheckpointCalls
from virtshim.cri.events import EventCalls
from virtshim.cri.exec import ExecCalls
from virtshim.cri.list_items import ListItems, WholeAnswer
from virtshim.cri.log_once import ToldOnce
from virtshim.cri.metrics import MetricsCalls
from virtshim.cri.resources import ResourceCalls
from virtshim.cri.stats import StatsCalls
from virtshim.cri.streaming import StreamingCalls
from virtshim.domain.container import Container
from virtshim.domain.deadline import Deadline
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.layout import Layout
from virtshim.domain.sandbox import Sandbox
from virtshim.lifecycle.checkpoint_container import CheckpointContainer
from virtshim.lifecycle.create_container import CreateContainer
from virtshim.lifecycle.exec_sync import ExecCommand
from virtshim.lifecycle.remove_container import RemoveContainer
from virtshim.lifecycle.remove_sandbox import RemoveSandbox
from virtshim.lifecycle.reopen_container_log import ReopenLog
from virtshim.lifecycle.run_sandbox import RunSandbox
from virtshim.lifecycle.start_container import StartContainer
from virtshim.lifecycle.stop_container import StopContainer
from virtshim.lifecycle.stop_sandbox import StopSandbox
from virtshim.lifecycle.update_container_resources import ResizeContainer
from virtshim.lifecycle.update_sandbox_resources import ResizeSandbox
from virtshim.metrics.usage import Usage
from virtshim.ports.clock import Clock
from virtshim.ports.records import Records
from virtshim.ports.streaming import Streaming
from virtshim.queries.container_events import Announcer
from virtshim.queries.lists import Filter, list_containers, list_sandboxes
from virtshim.queries.lookup import find_container, find_sandbox, get_container, get_sandbox
from virtshim.queries.node_status import NodeStatus

log = structlog.get_logger(__name__)

# A caller without a deadline gets kubelet's own (runtimeRequestTimeout); no step may wait for ever.
_DEFAULT_DEADLINE = 240.0


@dataclass(frozen=True, slots=True)
class Services:
    """The use cases that the servicer hands calls to."""

    records: Records
    clock: Clock
    layout: Layout
    node: NodeStatus
    run_sandbox: RunSandbox
    stop_sandbox: StopSandbox
    remove_sandbox: RemoveSandbox
    create_container: CreateContainer
    start_container: StartContainer
    stop_container: StopContainer
    checkpoint_container: CheckpointContainer
    remove_container: RemoveContainer
    exec_command: ExecCommand
    reopen_log: ReopenLog
    usage: Usage
    streaming: Streaming
    resize_container: ResizeContainer
    resize_sandbox: ResizeSandbox


class RuntimeServicer(
    CheckpointCalls,
    EventCalls,
    ExecCalls,
    MetricsCalls,
    ResourceCalls,
    StatsCalls,
    StreamingCalls,
    api_pb2_grpc.RuntimeServiceServicer,
):
    """What is not defined here or in a base answers UNIMPLEMENTED."""

    def __init__(self, services: Services, announcer: Announcer) -> None:
        self._do = services
        self._announcer = announcer
        self._sandbox_list = ListItems(to_proto.sandbox_item)
        self._container_list = ListItems(to_proto.container_item)
        self._all_sandboxes = WholeAnswer[Sandbox, pb.ListPodSandboxResponse](
            lambda found: pb.ListPodSandboxResponse(items=self._sandbox_list.of(found))
        )
        self._all_containers = WholeAnswer[Container, pb.ListContainersResponse](
            lambda found: pb.ListContainersResponse(containers=self._container_list.of(found))
        )
        self._told = ToldOnce()

    # --- node

    def Version(self, request: pb.VersionRequest, context: grpc.ServicerContext) -> pb.VersionResponse:
        del request, context
        # kubelet wants exactly this `version`, whatever it sends.
        return pb.VersionResponse(
            version="0.1.0",
            runtime_name="virtshim",
            runtime_version=self._do.node.version,
            runtime_api_version="v1",
        )

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        del context
        now = self._do.node.conditions()
        conditions = [
            pb.RuntimeCondition(type=c.name, status=not c.trouble, reason=c.reason, message=c.trouble) for c in now
        ]
        handlers = [
            pb.RuntimeHandler(name=name, features=pb.RuntimeHandlerFeatures()) for name in ("", *self._do.node.handlers)
        ]
        response = pb.StatusResponse(
            status=pb.RuntimeStatus(conditions=conditions),
            runtime_handlers=handlers,
            features=pb.RuntimeFeatures(),
        )
        if request.verbose:
            response.info["config"] = json.dumps(self._do.node.facts())
        return response

    def RuntimeConfig(
        self, request: pb.RuntimeConfigRequest, context: grpc.ServicerContext
    ) -> pb.RuntimeConfigResponse:
        del request, context
        driver = pb.SYSTEMD if self._do.node.systemd_cgroups else pb.CGROUPFS
        return pb.RuntimeConfigResponse(linux=pb.LinuxRuntimeConfiguration(cgroup_driver=driver))

    def UpdateRuntimeConfig(
        self, request: pb.UpdateRuntimeConfigRequest, context: grpc.ServicerContext
    ) -> pb.UpdateRuntimeConfigResponse:
        """kubelet tells the pod address range of the node; the CNI configuration decides, so nothing is done with it."""
        del context
        log.info("node.pod_cidr", told=request.runtime_config.network_config.pod_cidr[:200])
        return pb.UpdateRuntimeConfigResponse()

    # --- sandboxes

    def RunPodSandbox(
        self, request: pb.RunPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.RunPodSandboxResponse:
        if not request.HasField("config"):
            raise InvalidRequest("RunPodSandbox: config is missing")
        key = to_domain.sandbox_key(request.config)
        config = to_domain.sandbox_config(request.config, request.runtime_handler)
        self._told.tell(pod_fields.sandbox_without_effect(request.config))
        made = self._do.run_sandbox.run(key, config, self._deadline(context))
        return pb.RunPodSandboxResponse(pod_sandbox_id=made.value)

    def StopPodSandbox(
        self, request: pb.StopPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.StopPodSandboxResponse:
        found = find_sandbox(self._do.records, request.pod_sandbox_id)
        if found is not None:
            self._do.stop_sandbox.stop(found, self._deadline(context))
        return pb.StopPodSandboxResponse()

    def RemovePodSandbox(
        self, request: pb.RemovePodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.RemovePodSandboxResponse:
        found = find_sandbox(self._do.records, request.pod_sandbox_id)
        if found is not None:
            self._do.remove_sandbox.remove(found, self._deadline(context))
        return pb.RemovePodSandboxResponse()

    def PodSandboxStatus(
        self, request: pb.PodSandboxStatusRequest, context: grpc.ServicerContext
    ) -> pb.PodSandboxStatusResponse:
        del context
        sandbox = get_sandbox(self._do.records, request.pod_sandbox_id)
        info = {"info": json.dumps(self._do.node.sandbox_facts(sandbox))} if request.verbose else {}
        return pb.PodSandboxStatusResponse(status=to_proto.sandbox_status(sandbox), info=info)

    def ListPodSandbox(
        self, request: pb.ListPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.ListPodSandboxResponse:
        del context
        if not request.filter.ByteSize():
            return self._all_sandboxes.of(list_sandboxes(self._do.records, Filter()))
        return pb.ListPodSandboxResponse(items=self._sandbox_items(request.filter))

    def StreamPodSandboxes(
        self, request: pb.StreamPodSandboxesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPodSandboxesResponse]:
        del context
        for batch in batches(self._sandbox_items(request.filter)):
            yield pb.StreamPodSandboxesResponse(pod_sandboxes=batch)

    def _sandbox_items(self, wanted: pb.PodSandboxFilter) -> list[pb.PodSandbox]:
        found = list_sandboxes(self._do.records, Filter(id=wanted.id, labels=wanted.label_selector))
        items = self._sandbox_list.of(found)
        if wanted.HasField("state"):
            items = [item for item in items if item.state == wanted.state.state]
        return items

    # --- containers

    def CreateContainer(
        self, request: pb.CreateContainerRequest, context: grpc.ServicerContext
    ) -> pb.CreateContainerResponse:
        if not request.HasField("config"):
            raise InvalidRequest("CreateContainer: config is missing")
        name = to_domain.container_name(request.config)
        config = to_domain.container_config(request.config)
        self._told.tell(pod_fields.container_without_effect(request.config))
        sandbox = get_sandbox(self._do.records, request.pod_sandbox_id)
        made = self._do.create_container.create(sandbox.id, name, config, self._deadline(context))
        return pb.CreateContainerResponse(container_id=made.value)

    def StartContainer(
        self, request: pb.StartContainerRequest, context: grpc.ServicerContext
    ) -> pb.StartContainerResponse:
        del context
        self._do.start_container.start(get_container(self._do.records, request.container_id))
        return pb.StartContainerResponse()

    def StopContainer(
        self, request: pb.StopContainerRequest, context: grpc.ServicerContext
    ) -> pb.StopContainerResponse:
        del context
        found = find_container(self._do.records, request.container_id)
        if found is not None:
            self._do.stop_container.stop(found, max(0, request.timeout))
        return pb.StopContainerResponse()

    def RemoveContainer(
        self, request: pb.RemoveContainerRequest, context: grpc.ServicerContext
    ) -> pb.RemoveContainerResponse:
        del context
        found = find_container(self._do.records, request.container_id)
        if found is not None:
            self._do.remove_container.remove(found)
        return pb.RemoveContainerResponse()

    def ReopenContainerLog(
        self, request: pb.ReopenContainerLogRequest, context: grpc.ServicerContext
    ) -> pb.ReopenContainerLogResponse:
        del context
        self._do.reopen_log.reopen(get_container(self._do.records, request.container_id))
        return pb.ReopenContainerLogResponse()

    def ContainerStatus(
        self, request: pb.ContainerStatusRequest, context: grpc.ServicerContext
    ) -> pb.ContainerStatusResponse:
        del context
        container = get_container(self._do.records, request.container_id)
        info = self._container_info(container) if request.verbose else {}
        return pb.ContainerStatusResponse(status=to_proto.container_status(container), info=info)

    def ListContainers(
        self, request: pb.ListContainersRequest, context: grpc.ServicerContext
    ) -> pb.ListContainersResponse:
        del context
        if not request.filter.ByteSize():
            return self._all_containers.of(list_containers(self._do.records, Filter()))
        return pb.ListContainersResponse(containers=self._container_items(request.filter))

    def StreamContainers(
        self, request: pb.StreamContainersRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamContainersResponse]:
        del context
        for batch in batches(self._container_items(request.filter)):
            yield pb.StreamContainersResponse(containers=batch)

    def _container_items(self, wanted: pb.ContainerFilter) -> list[pb.Container]:
        found = list_containers(
            self._do.records, Filter(id=wanted.id, sandbox_id=wanted.pod_sandbox_id, labels=wanted.label_selector)
        )
        items = self._container_list.of(found)
        if wanted.HasField("state"):
            items = [item for item in items if item.state == wanted.state.state]
        return items

    # ---

    def _deadline(self, context: grpc.ServicerContext) -> Deadline:
        seconds = min(context.time_remaining(), _DEFAULT_DEADLINE)  # about 9e18 when the client set none
        return Deadline.after(self._do.clock.monotonic(), seconds)

    def _container_info(self, container: Container) -> Mapping[str, str]:
        """What `crictl inspect` shows beside the status; no secrets. Not `pid`, where other runtimes have a process in the
        pod's network: tools enter its namespaces, and QEMU is in the node's own."""
        facts = {**self._do.node.container_facts(container), "qemuPid": self._do.usage.process_id(container) or 0}
        told = self._do.exec_command.guest_facts(container)
        return {"info": json.dumps(facts), **({"toldByGuest": json.dumps(told)} if told else {})}
