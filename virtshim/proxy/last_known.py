"""The pods and containers that a runtime listed last, for while it is down: they stay in the lists, as NOTREADY and UNKNOWN. On
disk too, so that they stay there when the proxy is started anew meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.errors import InvalidRequest
from virtshim.files import replace_bytes
from virtshim.proxy.methods import LIST_CONTAINERS, LIST_PODS, Id
from virtshim.proxy.wire import payloads

log = structlog.get_logger(__name__)

_KEPT: Final = {LIST_PODS: "pods", LIST_CONTAINERS: "containers"}


class LastKnown:
    """What is kept of each runtime that may be down while the others go on: its name -> its lists."""

    def __init__(self, directory: str, runtimes: Iterable[str]) -> None:
        """`directory` is there. Raises InvalidRequest for a file in it that cannot be read."""
        self._directory = directory
        self._lists: dict[tuple[str, str], bytes] = {}
        self._asked: dict[tuple[str, str], int] = {}
        self._clock = itertools.count(1)
        self._unsaved: set[tuple[str, str]] = set()
        self._saving: asyncio.Task[None] | None = None
        for name in runtimes:
            for method in _KEPT:
                self._lists[name, method] = self._read(name, method)

    def keeps(self, runtime: str, method: str) -> bool:
        return (runtime, method) in self._lists

    def asking(self) -> int:
        """When a runtime is asked for a list, for `keep`."""
        return next(self._clock)

    def keep(self, runtime: str, method: str, answer: bytes, asked: int) -> None:
        """`answer` to a request without a filter. Of several the one that was asked for last counts, in whatever order they come:
        a list that took long does not bring back what has gone since, nor lose what has been made."""
        if asked < self._asked.get((runtime, method), 0):
            return
        self._asked[runtime, method] = asked
        before = self._lists[runtime, method]
        # Some list in another order each time.
        if answer == before or (len(answer) == len(before) and sorted(payloads(answer)) == sorted(payloads(before))):
            return
        self._lists[runtime, method] = answer
        self._unsaved.add((runtime, method))
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())

    async def saved(self) -> None:
        """When it returns, what was kept is on disk."""
        if self._saving is not None:
            await self._saving

    def answer(self, runtime: str, method: str, request: bytes) -> bytes:
        """In the place of the runtime's own. Empty for lists that are not kept. Raises InvalidRequest."""
        try:
            if method == LIST_PODS:
                pods = _matching_pods(self._pods(runtime), pb.ListPodSandboxRequest.FromString(request).filter)
                return pb.ListPodSandboxResponse(items=pods).SerializeToString()
            if method == LIST_CONTAINERS:
                wanted = pb.ListContainersRequest.FromString(request).filter
                containers = _matching_containers(self._containers(runtime), wanted)
                return pb.ListContainersResponse(containers=containers).SerializeToString()
        except DecodeError as exc:
            raise InvalidRequest(f"the request cannot be read: {exc}; send it as Kubernetes does") from exc
        return b""

    def has(self, runtime: str, kind: Id | None, id_: str) -> bool:
        """`id_` may be the beginning of one; of a pod or of a container, if it is not said."""
        found: list[str] = []
        if kind is not Id.CONTAINER:
            found += [pod.id for pod in self._pods(runtime)]
        if kind is not Id.POD:
            found += [container.id for container in self._containers(runtime)]
        return any(one.startswith(id_) for one in found)

    def _pods(self, runtime: str) -> Iterator[pb.PodSandbox]:
        for pod in pb.ListPodSandboxResponse.FromString(self._lists.get((runtime, LIST_PODS), b"")).items:
            pod.state = pb.SANDBOX_NOTREADY
            yield pod

    def _containers(self, runtime: str) -> Iterator[pb.Container]:
        for container in pb.ListContainersResponse.FromString(
            self._lists.get((runtime, LIST_CONTAINERS), b"")
        ).containers:
            container.state = pb.CONTAINER_UNKNOWN
            yield container

    def _path(self, runtime: str, method: str) -> str:
        return f"{self._directory}/{runtime}.{_KEPT[method]}"

    def _read(self, runtime: str, method: str) -> bytes:
        path = Path(self._path(runtime, method))
        try:
            content = path.read_bytes()
            (pb.ListPodSandboxResponse if method == LIST_PODS else pb.ListContainersResponse).FromString(content)
        except FileNotFoundError:
            return b""
        except (OSError, DecodeError) as exc:
            raise InvalidRequest(
                f"{path}, the last known {_KEPT[method]} of {runtime}, cannot be read: {exc}; remove it"
            ) from exc
        return content

    async def _save(self) -> None:
        while self._unsaved:
            key = self._unsaved.pop()
            try:
                await asyncio.to_thread(replace_bytes, self._path(*key), self._lists[key])
            except OSError as exc:
                log.warning("proxy.last-known.not-saved", runtime=key[0], error=str(exc))


def _matching_pods(pods: Iterable[pb.PodSandbox], asked: pb.PodSandboxFilter) -> Iterator[pb.PodSandbox]:
    for pod in pods:
        by_state = not asked.HasField("state") or asked.state.state == pod.state
        if pod.id.startswith(asked.id) and by_state and _has(pod.labels, asked.label_selector):
            yield pod


def _matching_containers(containers: Iterable[pb.Container], asked: pb.ContainerFilter) -> Iterator[pb.Container]:
    for one in containers:
        by_state = not asked.HasField("state") or asked.state.state == one.state
        by_id = one.id.startswith(asked.id) and one.pod_sandbox_id.startswith(asked.pod_sandbox_id)
        if by_id and by_state and _has(one.labels, asked.label_selector):
            yield one


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())
