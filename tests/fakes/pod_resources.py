"""kubelet's pod-resources service on a real Unix socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from criproto.podresources_v1 import podresources_pb2 as pb
from criproto.podresources_v1 import podresources_pb2_grpc


class FakePodResources(podresources_pb2_grpc.PodResourcesListerServicer):
    """`get`: works, "off" as before Kubernetes 1.34, or "unknown" as before 1.27."""

    def __init__(self, get: str = "works") -> None:
        self.pods: dict[tuple[str, str, str], pb.PodResources] = {}
        self.asked: list[str] = []
        # The number of next requests that are refused as too many at once, as by kubelet.
        self.refuses = 0
        self._get = get

    def grant(
        self, namespace: str, pod: str, container: str, *devices: tuple[str, Sequence[str]], pod_uid: str = ""
    ) -> None:
        """Grants (resource, ids) pairs; the same resource twice is on two NUMA nodes."""
        kept = self.pods.setdefault((namespace, pod, pod_uid), pb.PodResources(namespace=namespace, name=pod))
        rows = [pb.ContainerDevices(resource_name=name, device_ids=ids) for name, ids in devices]
        for there in kept.containers:
            if there.name == container:
                there.devices.extend(rows)
                return
        kept.containers.append(pb.ContainerResources(name=container, devices=rows))

    def _count(self, call: str, context: grpc.ServicerContext) -> None:
        if self.refuses:
            self.refuses -= 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self.asked.append(call)

    def List(self, request: pb.ListPodResourcesRequest, context: grpc.ServicerContext) -> pb.ListPodResourcesResponse:  # noqa: N802
        self._count("List", context)
        return pb.ListPodResourcesResponse(pod_resources=self.pods.values())

    def Get(self, request: pb.GetPodResourcesRequest, context: grpc.ServicerContext) -> pb.GetPodResourcesResponse:  # noqa: N802
        self._count("Get", context)
        if self._get == "unknown":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method Get")
        if self._get == "off":
            context.abort(grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")
        found = self.pods.get((request.pod_namespace, request.pod_name, ""))
        if found is None:
            context.abort(grpc.StatusCode.UNKNOWN, "pod not found")
        return pb.GetPodResourcesResponse(pod_resources=found)

    def GetAllocatableResources(  # noqa: N802
        self, request: pb.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> pb.AllocatableResourcesResponse:
        return pb.AllocatableResourcesResponse()


@contextlib.contextmanager
def serving(kubelet: FakePodResources, socket: str) -> Iterator[None]:
    """Serves until the block ends, then removes the socket."""
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool)
    podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(kubelet, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
        pool.shutdown()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket)
