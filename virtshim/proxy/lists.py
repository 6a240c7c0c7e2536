"""Merges the lists of all runtimes. Messages that only consist of lists are merged by joining their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.backend import Asked, Backend, CallFailed, ask_all
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.owners import Owners
from virtshim.proxy.shared_pods import SharedPods, with_vms
from virtshim.proxy.wire import (
    IMAGE_FS_INFO,
    LIST_CONTAINERS,
    LIST_METRICS_KNOWN,
    LIST_POD_STATS,
    LIST_PODS,
    METHODS,
    field_number,
    message,
    text,
)

# The same number in every request for a list; a test compares.
_FILTER: Final = field_number(pb.ListContainersRequest, "filter")
# No filter, and an empty one: kubelet uses the first to list all pods, and the second to list all containers.
_FOR_ALL: Final = (b"", bytes((_FILTER << 3 | 2, 0)))
_ID_FIELDS: Final = {
    "ListPodSandbox": (field_number(pb.PodSandboxFilter, "id"),),
    "ListContainers": (field_number(pb.ContainerFilter, "id"), field_number(pb.ContainerFilter, "pod_sandbox_id")),
    "ListContainerStats": (
        field_number(pb.ContainerStatsFilter, "id"),
        field_number(pb.ContainerStatsFilter, "pod_sandbox_id"),
    ),
    "ListPodSandboxStats": (field_number(pb.PodSandboxStatsFilter, "id"),),
}


class Lists:
    def __init__(
        self,
        backends: Sequence[Backend],
        owners: Owners,
        last_known: LastKnown,
        patience: float,
        shared: SharedPods | None = None,
    ) -> None:
        self._backends = backends
        self._owners = owners
        self._last_known = last_known
        self._patience = patience
        self._shared = shared

    async def merged(self, asked: Asked) -> bytes:
        """The complete list. Raises CallFailed: UNIMPLEMENTED even if only one runtime lacks the method, so that kubelet uses
        another."""
        backends = self._backends
        if owner := self._filtered_owner(asked):
            backends = (owner,)
        since = self._last_known.asking()
        outcomes = await ask_all(backends, asked, self._patience)
        parts: list[bytes] = []
        failures: list[CallFailed] = []
        for backend, outcome in zip(backends, outcomes, strict=True):
            if not isinstance(outcome, CallFailed):
                parts.append(outcome)
                if asks_for_all(asked.request) and self._last_known.keeps(backend.name, asked.method):
                    self._last_known.keep(backend.name, asked.method, outcome, since)
            elif outcome.is_down and self._last_known.stands_in(backend.name):
                parts.append(self._last_known.answer(backend.name, asked.method, asked.request))
            else:
                failures.append(outcome)
        refuse(failures)
        if asked.method == LIST_METRICS_KNOWN:
            return _each_once(parts)
        if self._shared and self._may_lack_vms(asked, backends[0]):
            parts[0] = with_vms(parts[0], pb.ListPodSandboxStatsResponse, await self._shared.vm_stats(asked.remaining))
        # join() does not copy a single part.
        return _filesystems(parts) if asked.method == IMAGE_FS_INFO else b"".join(filter(None, parts))

    async def refresh(self, backend: Backend) -> None:
        """Renews the runtime's last known lists after a pod or container was made or started."""
        for method in (LIST_PODS, LIST_CONTAINERS):
            if self._last_known.keeps(backend.name, method):
                since = self._last_known.asking()
                with contextlib.suppress(CallFailed):
                    answer = await backend.call(method, b"", self._patience)
                    self._last_known.keep(backend.name, method, answer.body, since)

    def _may_lack_vms(self, asked: Asked, first: Backend) -> bool:
        """Whether the first answer is the primary's stats of pods, and one of these may have a VM."""
        if asked.method != LIST_POD_STATS or first is not self._backends[0]:
            return False
        (field,) = _ID_FIELDS[METHODS[LIST_POD_STATS].name]
        id_ = text(message(asked.request, _FILTER), field)
        return not self._owners.known.get(id_) or self._owners.is_shared(id_)

    def _filtered_owner(self, asked: Asked) -> Backend | None:
        if not asked.request:
            return None
        wanted = message(asked.request, _FILTER)
        for number in _ID_FIELDS.get(METHODS[asked.method].name, ()):
            id_ = text(wanted, number)
            if owner := self._owners.known.get(id_):
                # The containers of a shared pod are those of two runtimes.
                is_shared = self._owners.is_shared(id_) and asked.method not in (LIST_PODS, LIST_POD_STATS)
                return None if is_shared else owner
        return None


def asks_for_all(request: bytes) -> bool:
    """Whether this request for a list has no filter."""
    return request in _FOR_ALL


def refuse(failures: Sequence[CallFailed]) -> None:
    """Raises the most useful error: UNIMPLEMENTED, after which the caller tries another method, otherwise the first runtime's."""
    unknown = [one for one in failures if one.code is grpc.StatusCode.UNIMPLEMENTED]
    for failed in unknown or failures:
        raise failed


def _each_once(parts: Sequence[bytes]) -> bytes:
    """Merges descriptions of the same metric."""
    known: dict[str, pb.MetricDescriptor] = {}
    for one in pb.ListMetricDescriptorsResponse.FromString(b"".join(parts)).descriptors:
        known.setdefault(one.name, one)
    return pb.ListMetricDescriptorsResponse(descriptors=known.values()).SerializeToString()


def _filesystems(parts: Sequence[bytes]) -> bytes:
    """If a runtime names no file system for containers, they are on that of its images. The merged list must say so,
    because kubelet takes the first."""
    merged = pb.ImageFsInfoResponse()
    answers = [pb.ImageFsInfoResponse.FromString(part) for part in parts]
    any_names_it = any(one.container_filesystems for one in answers)
    for one in answers:
        if any_names_it and not one.container_filesystems:
            one.container_filesystems.extend(one.image_filesystems)
        merged.MergeFrom(one)
    return merged.SerializeToString()
