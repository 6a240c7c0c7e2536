"""kubelet's pod-resources API: which devices kubelet granted a container."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Final

import grpc

from criproto.podresources_v1 import podresources_pb2 as pb
from criproto.podresources_v1 import podresources_pb2_grpc
from virtshim.domain.devices.granted import KubeletGrant
from virtshim.domain.errors import Unavailable

# kubelet's limit for an answer, and how long its answer is waited for: it waits for nothing itself.
_MESSAGE_BYTES: Final = 16 << 20
_SECONDS: Final = 5.0

_GONE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class PodResourcesClient:
    """One connection, made at the first question and again whenever kubelet was restarted."""

    def __init__(self, socket: str, timeout: float = _SECONDS) -> None:
        self._socket = socket
        self._timeout = timeout
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None

    def granted(self, namespace: str, pod: str, container: str) -> tuple[KubeletGrant, ...]:
        """See `virtshim.ports.devices.PodResources`."""
        listed = self._containers(namespace, pod)
        mine = [one for one in listed if one.name == container]
        return _grants(mine or listed, of_pod=not mine)

    def lists(self, namespace: str, pod: str, container: str) -> bool:
        """See `virtshim.ports.devices.PodResources`."""
        return any(one.name == container for one in self._containers(namespace, pod))

    def _containers(self, namespace: str, pod: str) -> Sequence[pb.ContainerResources]:
        # gRPC would wait for the socket to appear for as long as it is allowed to.
        if not os.path.exists(self._socket):
            raise Unavailable(self._message("it is not there"))
        try:
            found = self._pod(namespace, pod)
        except grpc.RpcError as exc:
            raise Unavailable(self._message(f"{exc.code().name} {exc.details() or ''}".strip())) from exc
        return () if found is None else found.containers

    def _pod(self, namespace: str, pod: str) -> pb.PodResources | None:
        """Get is off before Kubernetes 1.34, or unknown to older ones, and says of an unknown pod what it says of any other
        trouble (code UNKNOWN); List is always there. Raises grpc.RpcError, Unavailable."""
        stub = self._stub()
        try:
            request = pb.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
            found = [stub.Get(request, timeout=self._timeout).pod_resources]
        except grpc.RpcError as exc:
            if exc.code() in _GONE:
                raise
            listed = stub.List(pb.ListPodResourcesRequest(), timeout=self._timeout).pod_resources
            found = [one for one in listed if (one.namespace, one.name) == (namespace, pod)]
        if len(found) > 1:  # no UID tells them apart
            raise Unavailable(
                self._message(f"it lists {len(found)} pods {namespace}/{pod}: an earlier one is not gone yet")
            )
        if any((one.namespace, one.name) != (namespace, pod) for one in found):
            raise Unavailable(self._message(f"when asked for {namespace}/{pod} it answers for another pod"))
        return found[0] if found else None

    def _stub(self) -> podresources_pb2_grpc.PodResourcesListerStub:
        with self._lock:
            if self._channel is None:
                options = [("grpc.max_receive_message_length", _MESSAGE_BYTES), ("grpc.max_reconnect_backoff_ms", 1000)]
                self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=options)
            return podresources_pb2_grpc.PodResourcesListerStub(self._channel)

    def _message(self, why: str) -> str:
        return (
            f"kubelet does not say which devices it granted ({self._socket}: {why}); check that kubelet runs and "
            "devices.pod_resources_socket is its socket"
        )


def _grants(containers: Iterable[pb.ContainerResources], *, of_pod: bool) -> tuple[KubeletGrant, ...]:
    """One for each resource: kubelet makes an entry of its own for each NUMA node."""
    ids: dict[str, dict[str, None]] = {}
    for one in containers:
        for device in one.devices:
            ids.setdefault(device.resource_name, {}).update(dict.fromkeys(device.device_ids))
    return tuple(KubeletGrant(name, tuple(found), of_pod) for name, found in sorted(ids.items()))
