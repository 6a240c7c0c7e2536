"""Version, Status, RuntimeConfig, UpdateRuntimeConfig; GetContainerEvents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import grpc
import structlog

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_proto
from virtshim.cri.services import ServicerPart

log = structlog.get_logger(__name__)


class NodeCalls(ServicerPart):
    """Calls about the runtime itself."""

    def Version(self, request: pb.VersionRequest, context: grpc.ServicerContext) -> pb.VersionResponse:
        # kubelet expects exactly this `version`, whatever version it sends.
        return pb.VersionResponse(
            version="0.1.0",
            runtime_name="virtshim",
            runtime_version=self._services.node.version,
            runtime_api_version="v1",
        )

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        now = self._services.node.conditions()
        conditions = [
            pb.RuntimeCondition(type=c.name, status=not c.trouble, reason=c.reason, message=c.trouble) for c in now
        ]
        handlers = [
            pb.RuntimeHandler(name=name, features=pb.RuntimeHandlerFeatures(recursive_read_only_mounts=True))
            for name in ("", *self._services.node.handlers)
        ]
        response = pb.StatusResponse(
            status=pb.RuntimeStatus(conditions=conditions),
            runtime_handlers=handlers,
            features=pb.RuntimeFeatures(supplemental_groups_policy=True),
        )
        if request.verbose:
            response.info["config"] = json.dumps(self._services.node.facts())
        return response

    def RuntimeConfig(
        self, request: pb.RuntimeConfigRequest, context: grpc.ServicerContext
    ) -> pb.RuntimeConfigResponse:
        driver = pb.SYSTEMD if self._services.node.systemd_cgroups else pb.CGROUPFS
        return pb.RuntimeConfigResponse(linux=pb.LinuxRuntimeConfiguration(cgroup_driver=driver))

    def UpdateRuntimeConfig(
        self, request: pb.UpdateRuntimeConfigRequest, context: grpc.ServicerContext
    ) -> pb.UpdateRuntimeConfigResponse:
        """kubelet sends the node's pod CIDR. It is only logged, because the CNI configuration decides."""
        log.info("node.pod_cidr", cidr=request.runtime_config.network_config.pod_cidr[:200])
        return pb.UpdateRuntimeConfigResponse()

    def GetContainerEvents(
        self, request: pb.GetEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ContainerEventResponse]:
        """The initial metadata says that the client misses nothing from now on. A client that fell behind and reads
        nothing at all is disconnected after its grace: until then its thread waits in the middle of a message."""
        cut = threading.Timer(self._services.events.grace, context.cancel)
        cut.daemon = True

        def drop() -> None:
            try:
                cut.start()
            except RuntimeError:  # the system has no thread for it
                context.cancel()

        subscription = self._services.events.subscribe(on_drop=drop)
        try:
            if not context.add_callback(subscription.close):
                return  # the client has disconnected
            context.send_initial_metadata(())
            while (change := subscription.next()) is not None:
                yield to_proto.event(change)
        finally:
            cut.cancel()
            subscription.close()

    def end_streams(self) -> None:
        """Ends all streams, because the server stops and they never end by themselves."""
        self._services.events.close()
