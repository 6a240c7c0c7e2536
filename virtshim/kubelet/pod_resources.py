"""A client of kubelet's pod-resources API: a pod's own containers, and the devices that kubelet granted them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import grpc

from criproto.podresources_v1 import podresources_pb2 as pb
from criproto.podresources_v1 import podresources_pb2_grpc
from virtshim.devices.values import KubeletGrant
from virtshim.model.errors import Unavailable

# kubelet's limit for an answer, and the timeout for a call; kubelet answers without waiting for anything.
_MESSAGE_BYTES: Final = 16 << 20
_SECONDS: Final = 5.0

# How often, and after how many seconds, a call is repeated that kubelet refused because of its rate limit.
_TRIES: Final = 20
_PAUSE: Final = 0.05

_A = TypeVar("_A")

_GONE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class PodResourcesClient:
    """One connection, made at the first call and again after each restart of kubelet."""

    def __init__(self, socket: str, timeout: float = _SECONDS) -> None:
        self._socket = socket
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._channel: grpc.Channel | None = None

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None

    def granted(self, namespace: str, pod: str, container: str) -> tuple[KubeletGrant, ...]:
        listed = self._containers(namespace, pod)
        mine = [one for one in listed if one.name == container]
        return _grants(mine or listed, of_pod=not mine)

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        if not os.path.exists(self._socket):
            return None
        return tuple(one.name for one in self._containers(namespace, pod)) or None

    def _containers(self, namespace: str, pod: str) -> Sequence[pb.ContainerResources]:
        # gRPC would wait for the socket until its timeout.
        if not os.path.exists(self._socket):
            raise Unavailable(self._message("the socket does not exist"))
        try:
            found = self._pod(namespace, pod)
        except grpc.RpcError as exc:
            raise Unavailable(self._message(f"{exc.code().name} {exc.details() or ''}".strip())) from exc
        return () if found is None else found.containers

    def _pod(self, namespace: str, pod: str) -> pb.PodResources | None:
        """Falls back from Get to List, which always exists. Before Kubernetes 1.34, Get is off or missing, and for an unknown pod
        it returns the same code UNKNOWN as for any other error. Raises grpc.RpcError, Unavailable."""
        stub = self._stub()
        try:
            request = pb.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
            found = [self._answer(stub.Get, request).pod_resources]
        except grpc.RpcError as exc:
            if exc.code() in _GONE or _is_rate_limit(exc):
                raise
            listed = self._answer(stub.List, pb.ListPodResourcesRequest()).pod_resources
            found = [one for one in listed if (one.namespace, one.name) == (namespace, pod)]
        if len(found) > 1:  # the answer has no UID to tell them apart
            raise Unavailable(
                self._message(f"kubelet lists {len(found)} pods {namespace}/{pod}: an earlier one is not gone yet")
            )
        if any((one.namespace, one.name) != (namespace, pod) for one in found):
            raise Unavailable(self._message(f"kubelet's answer for {namespace}/{pod} is about another pod"))
        return found[0] if found else None

    def _answer(self, call: Callable[..., _A], request: object) -> _A:
        """Repeats calls that exceed kubelet's rate limit (100 a second, in bursts of ten), because after a reboot of the node all
        pods are created at the same time."""
        for _ in range(_TRIES):
            try:
                return call(request, timeout=self._timeout)
            except grpc.RpcError as exc:
                if not _is_rate_limit(exc):
                    raise
            if self._closed.wait(_PAUSE):
                break
        return call(request, timeout=self._timeout)

    def _stub(self) -> podresources_pb2_grpc.PodResourcesListerStub:
        with self._lock:
            if self._channel is None:
                options = [("grpc.max_receive_message_length", _MESSAGE_BYTES), ("grpc.max_reconnect_backoff_ms", 1000)]
                self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=options)
            return podresources_pb2_grpc.PodResourcesListerStub(self._channel)

    def _message(self, why: str) -> str:
        return (
            f"kubelet does not say which containers and devices the pod has ({self._socket}: {why}); check that kubelet runs and "
            "that devices.pod_resources_socket is its socket"
        )


def _is_rate_limit(error: grpc.RpcError) -> bool:
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "rate limit" in (error.details() or "")


def _grants(containers: Iterable[pb.ContainerResources], *, of_pod: bool) -> tuple[KubeletGrant, ...]:
    """One grant for each resource. kubelet has a separate entry for each NUMA node."""
    ids: dict[str, dict[str, None]] = {}
    for one in containers:
        for device in one.devices:
            ids.setdefault(device.resource_name, {}).update(dict.fromkeys(device.device_ids))
    return tuple(KubeletGrant(name, tuple(found), of_pod) for name, found in sorted(ids.items()))
