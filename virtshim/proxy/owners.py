"""Whose a pod's or container's id is. The runtimes know: an id that is not remembered is asked of all of them, once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.proxy.backend import Asked, Backend, CallFailed, ask_all
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.wire import LIST_CONTAINERS, LIST_PODS, Id

# What was used last, up to a number of entries.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Of more than `most` entries the one that rested longest is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found


# Of the ids last used; each is some 200 bytes.
_REMEMBERED: Final = 65536


class Owners:
    def __init__(self, backends: Sequence[Backend], last_known: LastKnown, patience: float) -> None:
        self._backends = backends
        self._last_known = last_known
        self._patience = patience
        # Ids are random, and no other runtime ever has the same one: an id whose pod is gone need not be forgotten.
        self.known: Recent[str, Backend] = Recent(_REMEMBERED)

    async def owner(self, id_: str, kind: Id | None, remaining: float | None) -> Backend | None:
        """None if no runtime has it; `id_` may be the beginning of one; a pod's or a container's, if `kind` does not say. The
        owner may be down. Raises Unavailable if it may be that of a runtime that is down and whose pods are not known,
        InvalidRequest if several have one that begins so."""
        if not id_:
            return None
        if owner := self.known.get(id_):
            return owner
        found: dict[str, Backend] = {}
        silent: dict[str, Backend] = {}
        for method, request in _questions(id_, kind):
            answers = await ask_all(self._backends, Asked(method, request, remaining), self._patience)
            for backend, answer in zip(self._backends, answers, strict=True):
                if isinstance(answer, CallFailed):
                    if not answer.is_down:
                        raise answer
                    silent[backend.name] = backend
                else:
                    found |= {one: backend for one in _ids(method, answer) if one.startswith(id_)}
        for full, owner in found.items():
            self.known.put(full, owner)
        owners = set(found.values())
        if len(owners) > 1:
            raise InvalidRequest(f"several runtimes have an id that begins with {id_!r}; write more of it")
        return next(iter(owners), None) or self._last_owner(silent.values(), id_, kind)

    def _last_owner(self, silent: Iterable[Backend], id_: str, kind: Id | None) -> Backend | None:
        """Of runtimes that are down the one that had it."""
        for backend in silent:
            # All pods are known that it had.
            if self._last_known.stands_in(backend.name):
                if self._last_known.has(backend.name, kind, id_):
                    return backend
            else:
                raise Unavailable(f"{id_} may be of the runtime {backend.name}, which is not available; try again")
        return None


def _questions(id_: str, kind: Id | None) -> Iterator[tuple[str, bytes]]:
    if kind is not Id.CONTAINER:
        yield LIST_PODS, pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(id=id_)).SerializeToString()
    if kind is not Id.POD:
        yield LIST_CONTAINERS, pb.ListContainersRequest(filter=pb.ContainerFilter(id=id_)).SerializeToString()


def _ids(method: str, answer: bytes) -> list[str]:
    if method == LIST_PODS:
        return [pod.id for pod in pb.ListPodSandboxResponse.FromString(answer).items]
    return [container.id for container in pb.ListContainersResponse.FromString(answer).containers]
