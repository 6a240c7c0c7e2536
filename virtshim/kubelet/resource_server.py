"""One resource's DevicePlugin service: its devices, preferred allocations, and what a container gets.

Rules are those of kubelet's device plugin interface, v1beta1: ListAndWatch sends all devices each time and never ends while the
plugin lives; Allocate is asked at a pod's admission, and its error fails the pod.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import grpc
import structlog

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2 as pb
from criproto.deviceplugin_v1beta1 import deviceplugin_pb2_grpc
from virtshim.domain.devices.pools import Offer, Pool, preferred

log = structlog.get_logger(__name__)

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

# A stream whose client is gone is noticed when it is next written to, or looked at: this often, in seconds.
_LOOK: Final = 5.0


class ResourceServer(deviceplugin_pb2_grpc.DevicePluginServicer):
    """`cdi_name` makes the CDI name of an offer; None: device nodes are given instead."""

    def __init__(self, pool: Pool, cdi_name: Callable[[Offer], str] | None = None) -> None:
        self._pool = pool
        self._cdi_name = cdi_name
        self._changed = threading.Condition()
        self._offers: Mapping[str, Offer] = {}
        self._version = 0
        self._ended = False

    def offer(self, offers: Sequence[Offer]) -> None:
        """All that there is now; tells kubelet if anything changed."""
        found = {offer.id: offer for offer in offers}
        with self._changed:
            if found == self._offers:
                return
            for offer in offers:
                before = self._offers.get(offer.id)
                if before is None or before.fault != offer.fault:
                    log.info(
                        "device.health", resource=self._pool.resource, device=offer.id, fault=offer.fault or "none"
                    )
            for gone in self._offers.keys() - found.keys():
                log.warning("device.gone", resource=self._pool.resource, device=gone)
            self._offers = found
            self._version += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the streams. `begin` makes them possible again."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self) -> None:
        with self._changed:
            self._ended = False

    def GetDevicePluginOptions(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    def ListAndWatch(self, request: pb.Empty, context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:
        told = -1
        while context.is_active():
            with self._changed:
                if self._ended:
                    return
                if told == self._version:
                    self._changed.wait(_LOOK)
                    continue
                told, offers = self._version, tuple(self._offers.values())
            yield pb.ListAndWatchResponse(devices=[_device(offer) for offer in offers])

    def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        offers = tuple(self._offers.values())
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        offers, asked.available_deviceIDs, asked.must_include_deviceIDs, asked.allocation_size
                    )
                )
                for asked in request.container_requests
            ]
        )

    def Allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateResponse:
        return pb.AllocateResponse(
            container_responses=[self._allocated(asked.devices_ids, context) for asked in request.container_requests]
        )

    def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()  # the options do not ask for it

    def _allocated(self, ids: Sequence[str], context: grpc.ServicerContext) -> pb.ContainerAllocateResponse:
        granted = [self._granted(device, context) for device in ids]
        functions = [str(function) for offer in granted for function in offer.functions]
        answer = pb.ContainerAllocateResponse(envs={self._pool.variable: ",".join(functions)})
        if self._cdi_name is not None:
            answer.cdi_devices.extend(pb.CDIDevice(name=self._cdi_name(offer)) for offer in granted)
        else:
            nodes = dict.fromkeys(node for offer in granted for node in offer.nodes)
            answer.devices.extend(
                pb.DeviceSpec(host_path=node, container_path=node, permissions="rw") for node in nodes
            )
        log.info("device.allocated", resource=self._pool.resource, devices=functions)
        return answer

    def _granted(self, device: str, context: grpc.ServicerContext) -> Offer:
        offer = self._offers.get(device)
        name = f"{self._pool.resource}: device {device[:80]!r}"
        if offer is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{name} is not on this node any more")
        if offer.fault:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{name} cannot be used now: {offer.fault}")
        return offer


def _device(offer: Offer) -> pb.Device:
    topology = None if offer.numa is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=offer.numa)])
    return pb.Device(ID=offer.id, health=UNHEALTHY if offer.fault else HEALTHY, topology=topology)
