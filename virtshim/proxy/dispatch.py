"""Chooses the rule for each method. Answers and errors are passed on unchanged."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy import wire
from virtshim.proxy.backend import Answer, Asked, Backend, CallFailed, StreamMetadata
from virtshim.proxy.images import Images
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.lists import Lists
from virtshim.proxy.node import Node
from virtshim.proxy.owners import Owners
from virtshim.proxy.pending import PendingConfigs
from virtshim.proxy.routes import Routes
from virtshim.proxy.shared_pods import Adopter, SharedPods, image_of, volume_images_of
from virtshim.proxy.streams import Streams
from virtshim.proxy.wire import Id, Method, Shape, field_number, message, message_at, text, text_field, text_map, texts

_ANNOTATIONS: Final = field_number(pb.PodSandboxConfig, "annotations")
_SANDBOX: Final = field_number(pb.CreateContainerRequest, "sandbox_config")
# The fields on the way to the container whose processes a new one sees.
_TO_TARGET: Final = (
    field_number(pb.CreateContainerRequest, "config"),
    field_number(pb.ContainerConfig, "linux"),
    field_number(pb.LinuxContainerConfig, "security_context"),
    field_number(pb.LinuxContainerSecurityContext, "namespace_options"),
)
_TARGET: Final = field_number(pb.NamespaceOption, "target_id")
# The field of the new id in RunPodSandboxResponse, RestorePodResponse and CreateContainerResponse.
_MADE: Final = 1
# The length of runtimes' ids of pods and containers, and the number of ids to try in a request of an unknown method.
_ID_LENGTH: Final = 64
_HEX: Final = frozenset("0123456789abcdef")
_CANDIDATES: Final = 4

Rule = Callable[[Asked], Awaitable[Answer]]


class Dispatch:
    def __init__(
        self,
        routes: Routes,
        backends: Sequence[Backend],
        last_known: LastKnown,
        pending: PendingConfigs,
        patience: float,
        adopter: Adopter | None = None,
    ) -> None:
        """`adopter`: how virtshim gets to know of pods that it shares with the primary; None if there are no such pods."""
        self._routes = routes
        self._primary = backends[0]
        self._by_runtime = {backend.runtime: backend for backend in backends}
        self._shared = SharedPods(routes, backends, adopter, last_known, patience) if adopter and routes.vms else None
        pod_handlers = routes.vms.pod_handlers if self._shared and routes.vms else ()
        self._owners = Owners(backends, last_known, patience, pod_handlers)
        self._lists = Lists(backends, self._owners, last_known, patience, self._shared)
        self._images = Images(routes, backends, self._lists, last_known, patience)
        self._streams = Streams(backends, last_known, patience, self._shared)
        self._last_known = last_known
        self.node = Node(backends, pending, last_known, patience)
        self._refreshing: set[asyncio.Task[None]] = set()
        self._rules: Mapping[str, Rule] = {
            wire.VERSION: self.node.version,
            wire.STATUS: self.node.status,
            wire.RUNTIME_CONFIG: self.node.runtime_config,
            wire.UPDATE_RUNTIME_CONFIG: self.node.update,
            wire.IMAGE_STATUS: self._images.status,
            wire.PULL_IMAGE: self._images.pull,
            wire.REMOVE_IMAGE: self._images.remove,
            wire.LIST_IMAGES: self._images.list,
        }

    async def one(self, method: Method, asked: Asked) -> Answer:
        """A call with one answer. Raises CallFailed, ShimError."""
        if rule := self._rules.get(method.path):
            return await rule(asked)
        match method.shape:
            case Shape.WITH_ID:
                return await self._by_id(method, asked)
            case Shape.NEW_POD:
                return await self._new_pod(method, asked)
            case Shape.LISTS:
                return Answer(await self._lists.merged(asked))
            case _:
                return await self._primary.pass_on(asked)

    def many(self, method: Method, asked: Asked) -> AsyncGenerator[bytes, None]:
        """A stream of answers. Raises CallFailed, ShimError."""
        return self._streams.pieces(asked) if method.shape is Shape.LIST_STREAM else self._streams.events(asked)

    async def unknown(
        self, asked: Asked, requests: AsyncIterator[bytes], metadata_out: StreamMetadata
    ) -> AsyncGenerator[bytes, None]:
        """A method of a later CRI or of another service. It goes to the runtime that owns an id in it, otherwise to the primary.
        `asked` has the first message, `requests` all of them. Raises CallFailed, ShimError."""
        owner = await self._owner_of_any(texts(asked.request), asked.remaining) or self._primary
        async for answer in owner.converse(asked.method, requests, asked.remaining, asked.metadata, metadata_out):
            yield answer

    async def _by_id(self, method: Method, asked: Asked) -> Answer:
        id_ = text(asked.request, method.id_field)
        found, pod = await self._owners.find(id_, method.id, asked.remaining)
        if self._shared and found and method.id is Id.POD and self._owners.is_shared(pod):
            if pod != id_:
                # Of a field that occurs twice, the last one counts.
                asked = dataclasses.replace(asked, request=asked.request + text_field(method.id_field, pod))
            return await self._in_shared_pod(self._shared, method, pod, asked)
        if found and method.path == wire.CREATE_CONTAINER:
            # Also if the call failed because only another runtime has the image: kubelet then pulls the image here.
            self._images.remember_pod(message(asked.request, _SANDBOX), found)
        owner = found or self._primary
        if method.path == wire.CONTAINER_STATUS:
            return await self._container_status(owner, id_, asked)
        answer = await owner.pass_on(asked)
        if method.path == wire.CREATE_CONTAINER:
            self._made(answer, owner)
        elif method.path == wire.START_CONTAINER:
            self._refresh(owner)
        return answer

    async def _in_shared_pod(self, shared: SharedPods, method: Method, pod: str, asked: Asked) -> Answer:
        """A call with the id of a pod of the primary whose VM another runtime runs."""
        match method.path:
            case wire.STOP_POD | wire.REMOVE_POD:
                return await shared.both(asked)
            case wire.UPDATE_POD:
                return await shared.both(asked, unknown_is_fine=True)
            case wire.CREATE_CONTAINER:
                return await self._create_in_shared_pod(shared, pod, asked)
            case wire.POD_STATUS:
                return await shared.pod_status(pod, asked)
            case wire.POD_STATS:
                return await shared.pod_stats(pod, asked)
            case wire.CHECKPOINT_POD:
                return shared.refuse_checkpoint(method.name)
            case _:
                return await self._primary.pass_on(asked)

    async def _create_in_shared_pod(self, shared: SharedPods, pod: str, asked: Asked) -> Answer:
        config = message(asked.request, _SANDBOX)
        self._images.remember_pod(config, self._primary, shared.vms)
        if shared.is_of_vm(asked.request):
            # Also if the call fails because virtshim does not have the image: kubelet then pulls it there.
            for image in (image_of(asked.request), *volume_images_of(asked.request)):
                self._images.remember_vm_image(config, image)
            answer, owner = await shared.create_vm(pod, asked), shared.vms
        else:
            target = text(message_at(asked.request, *_TO_TARGET), _TARGET)
            if target and await self._owners.owner(target, Id.CONTAINER, asked.remaining) is shared.vms:
                shared.refuse_target(target)
            answer, owner = await self._primary.pass_on(asked), self._primary
        self._made(answer, owner)
        return answer

    async def _container_status(self, owner: Backend, id_: str, asked: Asked) -> Answer:
        """Gives the last known status if the runtime is down. Without it kubelet would remove no unused images on the whole node,
        not even those of other runtimes."""
        try:
            answer = await owner.pass_on(asked)
        except CallFailed as failed:
            last = self._last_known.status(owner.name, id_) if failed.is_down else None
            if last is None:
                raise
            return Answer(last)
        self._last_known.keep_status(owner.name, answer.body)
        return answer

    async def _new_pod(self, method: Method, asked: Asked) -> Answer:
        config = message(asked.request, method.config_field)
        handler = text(asked.request, method.handler_field)
        owner = self._by_runtime[self._routes.for_pod(handler, text_map(config, _ANNOTATIONS))]
        vms = None
        if self._shared and self._routes.vms_of(handler):
            if method.path == wire.RESTORE_POD:
                self._shared.refuse_checkpoint(method.name)
            await self._shared.check(config, handler, asked)
            vms = self._shared.vms
        # Before the pod exists, because kubelet may pull its images before this call ends.
        self._images.remember_pod(config, owner, vms)
        answer = await owner.pass_on(asked)
        self._made(answer, owner, handler)
        if self._shared and vms:
            await self._shared.adopt_later_sandbox(text(answer.body, _MADE), config, asked)
        return answer

    def _made(self, answer: Answer, owner: Backend, handler: str = "") -> None:
        """`handler`: of a new pod."""
        self._owners.made(text(answer.body, _MADE), handler, owner)
        self._refresh(owner)

    def _refresh(self, owner: Backend) -> None:
        """Renews the runtime's last known lists, because the runtime may go down before kubelet's next list."""
        if owner.runtime.degraded:
            task = asyncio.create_task(self._lists.refresh(owner))
            self._refreshing.add(task)
            task.add_done_callback(self._refreshing.discard)

    async def _owner_of_any(self, candidates: Sequence[str], remaining: float | None) -> Backend | None:
        for one in candidates:
            if owner := self._owners.known.get(one):
                return owner
        ids = [one for one in candidates if len(one) == _ID_LENGTH and _HEX.issuperset(one)]
        for one in ids[:_CANDIDATES]:
            if owner := await self._owners.owner(one, None, remaining):
                return owner
        return None
