"""Image calls. They go to the runtime that the image's name, its pod or its handler names, otherwise to one that has the image.

When kubelet asks for an image's status, it only passes the pod's annotations. One of them identifies the pod: the time at which
kubelet first saw it, in nanoseconds. The pod's sandbox has it too, and edits of the pod do not change it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.backend import Answer, Asked, Backend, CallFailed, ask_all
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.lists import Lists, refuse
from virtshim.proxy.owners import Recent
from virtshim.proxy.routes import Routes, Runtime
from virtshim.proxy.wire import LIST_PODS, METHODS_IMAGE_STATUS, message, methods_field, text, text_map

# The same number in PullImageRequest, ImageStatusRequest and RemoveImageRequest; a test compares.
_IMAGE: Final = methods_field(pb.PullImageRequest, "image")
_NAME: Final = methods_field(pb.ImageSpec, "image")
_IMAGE_ANNOTATIONS: Final = methods_field(pb.ImageSpec, "annotations")
_HANDLER: Final = methods_field(pb.ImageSpec, "runtime_handler")
_SANDBOX: Final = methods_field(pb.PullImageRequest, "sandbox_config")
_POD_ANNOTATIONS: Final = methods_field(pb.PodSandboxConfig, "annotations")
_POD_METADATA: Final = methods_field(pb.PodSandboxConfig, "metadata")
_POD_NAMES: Final = tuple(methods_field(pb.PodSandboxMetadata, name) for name in ("namespace", "name", "uid"))
_SEEN: Final = "kubernetes.io/config.seen"
_FILTER: Final = methods_field(pb.ListImagesRequest, "filter")
_FILTER_IMAGE: Final = methods_field(pb.ImageFilter, "image")
_FOUND: Final = methods_field(pb.ImageStatusResponse, "image")

# Keys of pods whose runtime is remembered for their images; each pod has two.
_REMEMBERED: Final = 8192

# Namespace, name and uid; or the time at which kubelet first saw the pod.
PodKey = tuple[str, ...]


class Images:
    def __init__(
        self, routes: Routes, backends: Sequence[Backend], lists: Lists, last_known: LastKnown, patience: float
    ) -> None:
        self._routes = routes
        self._backends = backends
        self._by_runtime = {backend.runtime: backend for backend in backends}
        self._lists = lists
        self._last_known = last_known
        self._patience = patience
        self._pods: Recent[PodKey, Backend] = Recent(_REMEMBERED)

    def remember_pod(self, sandbox_config: bytes, backend: Backend) -> None:
        """Called by RunPodSandbox, and by CreateContainer, because a restarted kubelet gives its pods new times."""
        if any(names := _names(sandbox_config)):
            self._pods.put(names, backend)
        if seen := _seen(text_map(sandbox_config, _POD_ANNOTATIONS)):
            self._pods.put(seen, backend)

    async def pull(self, asked: Asked) -> Answer:
        """Asks the runtime that the image's name says, which must be its pod's; otherwise the pod's. Raises CallFailed,
        InvalidRequest."""
        image, sandbox = message(asked.request, _IMAGE), message(asked.request, _SANDBOX)
        named = self._named(image)
        annotated = self._routes.by_annotation(text_map(sandbox, _POD_ANNOTATIONS))
        pods = annotated or (await self._runtime_of(_names(sandbox), asked) if sandbox else None)
        if named and pods:
            self._routes.refuse_other(text(image, _NAME), named, pods)
        backend = self._by_runtime[named or pods or self._routes.primary]
        return await backend.call(asked.method, asked.request, asked.remaining, asked.metadata)

    async def status(self, asked: Asked) -> Answer:
        """Asks the runtime of the image's name and its pod, which must be the same. Otherwise answers for the first runtime
        that has the image, beginning with the primary. Raises CallFailed, InvalidRequest."""
        image = message(asked.request, _IMAGE)
        named, pods = self._named(image), await self._runtime_of_image(image, asked)
        if named and pods:
            self._routes.refuse_other(text(image, _NAME), named, pods)
        if owner := named or pods:
            return await self._by_runtime[owner].call(asked.method, asked.request, asked.remaining, asked.metadata)
        return Answer(next(iter((await self._having(asked)).values()), b""))

    async def remove(self, asked: Asked) -> Answer:
        """Removes the image from the runtime of its name or handler, otherwise from all. Raises CallFailed, InvalidRequest."""
        image = message(asked.request, _IMAGE)
        if named := self._named(image):
            owners = [self._by_runtime[named]]
        else:
            question = pb.ImageStatusRequest.FromString(b"")
            question.image.MergeFromString(image)
            status = Asked(METHODS_IMAGE_STATUS, question.SerializeToString(), asked.remaining)
            owners = list(await self._having(status, all_must_answer=True))
        answer = Answer(b"")
        for owner in owners:
            answer = await owner.call(asked.method, asked.request, asked.remaining, asked.metadata)
        return answer

    async def list(self, asked: Asked) -> Answer:
        """Lists the images of one runtime if the filter's image names it, otherwise of all. Raises CallFailed, InvalidRequest."""
        named = self._named(message(message(asked.request, _FILTER), _FILTER_IMAGE))
        if named:
            return await self._by_runtime[named].call(asked.method, asked.request, asked.remaining, asked.metadata)
        return Answer(await self._lists.merged(asked))

    def _named(self, image: bytes) -> Runtime | None:
        return self._routes.for_image(text(image, _NAME), text(image, _HANDLER), text_map(image, _IMAGE_ANNOTATIONS))

    async def _having(self, asked: Asked, *, all_must_answer: bool = False) -> dict[Backend, bytes]:
        """The runtimes that have the image, with their answers. A runtime that does not answer may have it."""
        outcomes = await ask_all(self._backends, asked, self._patience)
        found: dict[Backend, bytes] = {}
        failures: list[CallFailed] = []
        some_answered = any(isinstance(outcome, bytes) for outcome in outcomes)
        for backend, outcome in zip(self._backends, outcomes, strict=True):
            if isinstance(outcome, bytes):
                if message(outcome, _FOUND):
                    found[backend] = outcome
            # A runtime may refuse a name that only another one accepts.
            elif backend.runtime.degraded if outcome.is_down else some_answered:
                continue
            else:
                failures.append(outcome)
        if all_must_answer or not found:
            refuse(failures)
        return found

    async def _runtime_of_image(self, image: bytes, asked: Asked) -> Runtime | None:
        """The runtime of the image's pod. None if it is not known, so that images are still found while another runtime is
        down."""
        seen = _seen(text_map(image, _IMAGE_ANNOTATIONS))
        with contextlib.suppress(CallFailed):
            return await self._runtime_of(seen, asked) if seen else None
        return None

    async def _runtime_of(self, key: PodKey, asked: Asked) -> Runtime | None:
        """The runtime of a started pod. After a restart of the proxy, asks all runtimes. None if none has the pod."""
        if backend := self._pods.get(key):
            return backend.runtime
        question = Asked(LIST_PODS, b"", asked.remaining)
        outcomes = await ask_all(self._backends, question, self._patience)
        failures: list[CallFailed] = []
        for backend, outcome in zip(self._backends, outcomes, strict=True):
            if not isinstance(outcome, CallFailed):
                pods = outcome
            elif outcome.is_down and self._last_known.stands_in(backend.name):
                pods = self._last_known.answer(backend.name, LIST_PODS, b"")
            else:
                failures.append(outcome)
                continue
            if any(key in _keys(pod) for pod in pb.ListPodSandboxResponse.FromString(pods).items):
                self._pods.put(key, backend)
                return backend.runtime
        refuse(failures)
        return None


def _names(sandbox_config: bytes) -> PodKey:
    metadata = message(sandbox_config, _POD_METADATA)
    return tuple(text(metadata, number) for number in _POD_NAMES)


def _seen(annotations: Mapping[str, str]) -> PodKey:
    """() for a pod that is not kubelet's."""
    seen = annotations.get(_SEEN)
    return (seen,) if seen else ()


def _keys(pod: pb.PodSandbox) -> tuple[PodKey, PodKey]:
    return (pod.metadata.namespace, pod.metadata.name, pod.metadata.uid), _seen(pod.annotations)
