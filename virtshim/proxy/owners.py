"""Finds the runtime that owns a pod's or container's id. For an id that is not remembered, asks all runtimes once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.proxy.backend import Asked, Backend, CallFailed, ask_all
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.wire import LIST_CONTAINERS, LIST_PODS, Id

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps the `most` entries that were used last."""

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


# Ids; each takes some 200 bytes.
_REMEMBERED: Final = 65536


class Owners:
    def __init__(
        self, backends: Sequence[Backend], last_known: LastKnown, patience: float, pod_handlers: Sequence[str] = ()
    ) -> None:
        """`pod_handlers`: handlers of the primary's pods whose VM another runtime runs."""
        self._backends = backends
        self._last_known = last_known
        self._patience = patience
        self._pod_handlers = pod_handlers
        # Ids are random and never used again, so those of removed pods may stay.
        self.known: Recent[str, Backend] = Recent(_REMEMBERED)
        self._shared: Recent[str, Backend] = Recent(_REMEMBERED)

    def made(self, id_: str, handler: str, owner: Backend) -> None:
        """Remembers a pod, which its owner lists with this handler."""
        self.known.put(id_, owner)
        if handler in self._pod_handlers:
            self._shared.put(id_, owner)

    def is_shared(self, id_: str) -> bool:
        """Whether this is the id of a pod of the primary with one of the pod handlers, as far as it is remembered."""
        return self._shared.get(id_) is not None

    async def owner(self, id_: str, kind: Id | None, remaining: float | None) -> Backend | None:
        """The first part of what `find` returns."""
        return (await self.find(id_, kind, remaining))[0]

    async def find(self, id_: str, kind: Id | None, remaining: float | None) -> tuple[Backend | None, str]:
        """The owner and the full id. None if no runtime has the id. `id_` may be a prefix; if several ids of the owner begin with
        it, it is returned as it is. `kind` None: a pod's or a container's. The owner may be down. Raises Unavailable if a runtime
        is down whose pods are not known, InvalidRequest if several runtimes have an id with this prefix."""
        if not id_:
            return None, id_
        if owner := self.known.get(id_):
            return owner, id_
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
                    for one, handler in _ids(method, answer):
                        if one.startswith(id_):
                            found[one] = backend
                            self.made(one, handler, backend)
        owners = set(found.values())
        if len(owners) > 1:
            raise InvalidRequest(f"several runtimes have an id that begins with {id_!r}; give a longer prefix")
        full = next(iter(found)) if len(found) == 1 else id_
        return next(iter(owners), None) or self._last_owner(silent.values(), id_, kind), full

    def _last_owner(self, silent: Iterable[Backend], id_: str, kind: Id | None) -> Backend | None:
        """The runtime that is down and had the id when it last answered; None if there is none."""
        for backend in silent:
            # All its pods are known.
            if self._last_known.stands_in(backend.name):
                if self._last_known.has(backend.name, kind, id_):
                    return backend
            else:
                raise Unavailable(f"{id_} may belong to the runtime {backend.name}, which is not available; try again")
        return None


def _questions(id_: str, kind: Id | None) -> Iterator[tuple[str, bytes]]:
    if kind is not Id.CONTAINER:
        yield LIST_PODS, pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(id=id_)).SerializeToString()
    if kind is not Id.POD:
        yield LIST_CONTAINERS, pb.ListContainersRequest(filter=pb.ContainerFilter(id=id_)).SerializeToString()


def _ids(method: str, answer: bytes) -> list[tuple[str, str]]:
    """The ids, each with its pod's handler; "" for containers."""
    if method == LIST_PODS:
        return [(pod.id, pod.runtime_handler) for pod in pb.ListPodSandboxResponse.FromString(answer).items]
    return [(container.id, "") for container in pb.ListContainersResponse.FromString(answer).containers]
