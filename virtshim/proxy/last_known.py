"""Keeps the last lists of a runtime's pods and containers, and the containers' last statuses, for the time that the runtime
is down. They are on disk too, for a proxy that restarts meanwhile.

The states stay unchanged, because VMs and containers keep running without their runtime. For a container with an unknown state,
kubelet would start another one and kill the first, and a restarting kubelet would take its devices away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog
from google.protobuf.message import DecodeError, Message

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InvalidRequest
from virtshim.proxy.wire import CONTAINER_STATUS, LIST_CONTAINERS, LIST_PODS, Id, payloads
from virtshim.system.files import replace_bytes
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

# Each file's suffix and message. Lists are kept as they came; statuses are kept as the message that has a list of them.
_KEPT: Final[Mapping[str, tuple[str, type[Message]]]] = {
    LIST_PODS: ("pods", pb.ListPodSandboxResponse),
    LIST_CONTAINERS: ("containers", pb.ListContainersResponse),
    CONTAINER_STATUS: ("statuses", pb.PodSandboxStatusResponse),
}
_Key = tuple[str, str]


class LastKnown:
    """Keeps the state of each runtime that may be down while the others continue, by its name."""

    def __init__(self, directory: str, runtimes: Iterable[str]) -> None:
        """`directory` must exist. Removes the files of runtimes that are not in `runtimes`: they would be old when those return.
        Raises InvalidRequest for a file that cannot be read or removed."""
        self._directory = directory
        # None: the runtime has never answered, so nothing can stand in for it.
        self._lists: dict[_Key, bytes | None] = {}
        self._states: dict[str, dict[str, int]] = {}
        self._statuses: dict[str, dict[str, bytes]] = {}
        self._asked: dict[_Key, int] = {}
        self._clock = itertools.count(1)
        self._unsaved: set[_Key] = set()
        # What is not on disk, because writing it failed. The next answer of a runtime begins another attempt.
        self._failed: set[_Key] = set()
        self._trouble = TroubleLog(log, over="proxy.last-known.saved")
        self._saving: asyncio.Task[None] | None = None
        for name in runtimes:
            for method in (LIST_PODS, LIST_CONTAINERS):
                self._lists[name, method] = self._read(name, method)
            known = pb.PodSandboxStatusResponse.FromString(self._read(name, CONTAINER_STATUS) or b"")
            self._statuses[name] = {one.id: one.SerializeToString() for one in known.containers_statuses}
            self._learn_states(name)
        self._remove_others()

    def keeps(self, runtime: str, method: str) -> bool:
        return (runtime, method) in self._lists

    def stands_in(self, runtime: str) -> bool:
        """Whether this answers for the runtime while it is down. Not for one that has never answered: kubelet would think
        that its pods are gone, and start each a second time."""
        return all(self._lists.get((runtime, method)) is not None for method in (LIST_PODS, LIST_CONTAINERS))

    def asking(self) -> int:
        """A number for `keep`, to be taken before a runtime is asked for a list."""
        return next(self._clock)

    def keep(self, runtime: str, method: str, answer: bytes, asked: int) -> None:
        """`answer` is to a request without a filter. The latest request counts, even if its answer comes first: a slow list must
        neither bring back removed pods nor lose new ones."""
        if asked < self._asked.get((runtime, method), 0):
            return
        self._asked[runtime, method] = asked
        for failed in tuple(self._failed):
            self._save_soon(*failed)
        before = self._lists[runtime, method]
        # Some runtimes list in another order each time.
        if before is not None and (
            answer == before or (len(answer) == len(before) and sorted(payloads(answer)) == sorted(payloads(before)))
        ):
            return
        self._lists[runtime, method] = answer
        self._save_soon(runtime, method)
        if method == LIST_CONTAINERS:
            self._learn_states(runtime)
            gone = self._statuses[runtime].keys() - self._states[runtime].keys()
            for one in gone:
                del self._statuses[runtime][one]
            if gone:
                self._save_soon(runtime, CONTAINER_STATUS)

    def keep_status(self, runtime: str, answer: bytes) -> None:
        """`answer` to a ContainerStatus; ignored for a runtime that is not kept."""
        if runtime not in self._statuses:
            return
        with contextlib.suppress(DecodeError):
            status = pb.ContainerStatusResponse.FromString(answer).status
            content = status.SerializeToString()
            if status.id and self._statuses[runtime].get(status.id) != content:
                self._statuses[runtime][status.id] = content
                self._save_soon(runtime, CONTAINER_STATUS)

    async def saved(self) -> None:
        """Waits until everything is on disk."""
        if self._saving is not None:
            await self._saving

    def answer(self, runtime: str, method: str, request: bytes) -> bytes:
        """The answer for a runtime that this stands in for. Empty for lists that are not kept. Raises InvalidRequest."""
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

    def status(self, runtime: str, container: str) -> bytes | None:
        """The last ContainerStatusResponse. None if there is none, or if the container's state has changed since: a wrong
        state or exit code would make kubelet kill, restart or finish it."""
        last = self._statuses.get(runtime, {}).get(container)
        if last is None:
            return None
        status = pb.ContainerStatus.FromString(last)
        if self._states[runtime].get(container) != status.state:
            return None
        return pb.ContainerStatusResponse(status=status).SerializeToString()

    def has(self, runtime: str, kind: Id | None, id_: str) -> bool:
        """`id_` may be a prefix. `kind` None: a pod's or a container's."""
        found: list[str] = []
        if kind is not Id.CONTAINER:
            found += [pod.id for pod in self._pods(runtime)]
        if kind is not Id.POD:
            found += [container.id for container in self._containers(runtime)]
        return any(one.startswith(id_) for one in found)

    def _pods(self, runtime: str) -> Iterable[pb.PodSandbox]:
        return pb.ListPodSandboxResponse.FromString(self._lists.get((runtime, LIST_PODS)) or b"").items

    def _containers(self, runtime: str) -> Iterable[pb.Container]:
        return pb.ListContainersResponse.FromString(self._lists.get((runtime, LIST_CONTAINERS)) or b"").containers

    def _learn_states(self, runtime: str) -> None:
        self._states[runtime] = {one.id: one.state for one in self._containers(runtime)}

    def _save_soon(self, runtime: str, method: str) -> None:
        self._unsaved.add((runtime, method))
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())

    def _path(self, runtime: str, method: str) -> str:
        return f"{self._directory}/{runtime}.{_KEPT[method][0]}"

    def _read(self, runtime: str, method: str) -> bytes | None:
        path = Path(self._path(runtime, method))
        what, kind = _KEPT[method]
        try:
            content = path.read_bytes()
            kind.FromString(content)
        except FileNotFoundError:
            return None
        except (OSError, DecodeError) as exc:
            raise InvalidRequest(
                f"{path}, the last known {what} of {runtime}, cannot be read: {exc}; remove it"
            ) from exc
        return content

    def _remove_others(self) -> None:
        kept = {self._path(runtime, method) for runtime in self._statuses for method in _KEPT}
        for what, _ in _KEPT.values():
            for path in Path(self._directory).glob(f"*.{what}"):
                if str(path) not in kept:
                    try:
                        os.unlink(path)
                    except OSError as exc:
                        raise InvalidRequest(
                            f"{path}, of a runtime that is not kept, cannot be removed: {exc}"
                        ) from exc

    async def _save(self) -> None:
        while self._unsaved:
            key = self._unsaved.pop()
            try:
                await asyncio.to_thread(replace_bytes, self._path(*key), self._content(*key))
            except (OSError, RuntimeError) as exc:  # RuntimeError: the system has no thread left
                self._failed.add(key)
                self._trouble.met("proxy.last-known.not-saved", key, runtime=key[0], error=str(exc))
            else:
                self._failed.discard(key)
                self._trouble.over(key, runtime=key[0])

    def _content(self, runtime: str, method: str) -> bytes:
        if method in (LIST_PODS, LIST_CONTAINERS):
            return self._lists[runtime, method] or b""
        statuses = [pb.ContainerStatus.FromString(one) for one in self._statuses[runtime].values()]
        return pb.PodSandboxStatusResponse(containers_statuses=statuses).SerializeToString()


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
