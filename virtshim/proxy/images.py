"""Image calls. They go to the runtime that the image's name, its pod or its handler names, otherwise to one that has the image.

When kubelet asks for an image's status, it only passes the pod's annotations. One of them identifies the pod: the time at which
kubelet first saw it, in nanoseconds. The pod's sandbox has it too, and edits of the pod do not change it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.backend import Answer, Asked, Backend, CallFailed, ask_all
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.lists import Lists, refuse
from virtshim.proxy.owners import Recent
from virtshim.proxy.routes import Routes, Runtime
from virtshim.proxy.wire import IMAGE_STATUS, LIST_PODS, field_number, message, text, text_map

# The same number in PullImageRequest, ImageStatusRequest and RemoveImageRequest; a test compares.
_IMAGE: Final = field_number(pb.PullImageRequest, "image")
_NAME: Final = field_number(pb.ImageSpec, "image")
_IMAGE_ANNOTATIONS: Final = field_number(pb.ImageSpec, "annotations")
_HANDLER: Final = field_number(pb.ImageSpec, "runtime_handler")
_SANDBOX: Final = field_number(pb.PullImageRequest, "sandbox_config")
_POD_ANNOTATIONS: Final = field_number(pb.PodSandboxConfig, "annotations")
_POD_METADATA: Final = field_number(pb.PodSandboxConfig, "metadata")
_POD_NAMES: Final = tuple(field_number(pb.PodSandboxMetadata, name) for name in ("namespace", "name", "uid"))
_SEEN: Final = "kubernetes.io/config.seen"
_FILTER: Final = field_number(pb.ListImagesRequest, "filter")
_FILTER_IMAGE: Final = field_number(pb.ImageFilter, "image")
_FOUND: Final = field_number(pb.ImageStatusResponse, "image")

# Keys of pods whose runtime is remembered for their images; each pod has two.
_REMEMBERED: Final = 8192

# Namespace, name and uid; or the time at which kubelet first saw the pod.
PodKey = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """The runtime that made a pod, and the one that runs the VM in it if that is another one."""

    runtime: Runtime
    vms: Runtime | None = None


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
        self._pods: Recent[PodKey, _Place] = Recent(_REMEMBERED)
        # Images of VMs whose names have no prefix, each after the key of its pod.
        self._vm_images: Recent[PodKey, Runtime] = Recent(_REMEMBERED)

    def remember_pod(self, sandbox_config: bytes, backend: Backend, vms: Backend | None = None) -> None:
        """Called by RunPodSandbox, and by CreateContainer, because a restarted kubelet gives its pods new times. `vms`: runs the
        VM in this pod of `backend`."""
        place = _Place(backend.runtime, vms.runtime if vms else None)
        if any(names := _names(sandbox_config)):
            self._pods.put(names, place)
        if seen := _seen(text_map(sandbox_config, _POD_ANNOTATIONS)):
            self._pods.put(seen, place)

    def remember_vm_image(self, sandbox_config: bytes, image: str) -> None:
        """An image that belongs to this pod's VM. In a pod of two runtimes the name alone does not tell, and kubelet does not
        say for which container it asks for an image."""
        if (seen := _seen(text_map(sandbox_config, _POD_ANNOTATIONS))) and (vms := self._routes.vms):
            self._vm_images.put((*seen, _tagged(image)), vms)

    async def pull(self, asked: Asked) -> Answer:
        """Asks the runtime that the image's name says, which must be its pod's; otherwise the pod's. Raises CallFailed,
        InvalidRequest."""
        image, sandbox = message(asked.request, _IMAGE), message(asked.request, _SANDBOX)
        annotations = text_map(sandbox, _POD_ANNOTATIONS)
        annotated = self._routes.by_annotation(annotations)
        place = _Place(annotated) if annotated else None
        # The primary may have made the pod, while another runtime runs its VM.
        if sandbox and annotated in (None, self._routes.primary):
            place = await self._place(_names(sandbox), asked) or place
        backend = self._by_runtime[self._of(image, place, _seen(annotations)) or self._routes.primary]
        return await backend.pass_on(asked)

    async def status(self, asked: Asked) -> Answer:
        """Asks the runtime of the image's name and its pod, which must be the same. Otherwise answers for the first runtime
        that has the image, beginning with the primary. Raises CallFailed, InvalidRequest."""
        image = message(asked.request, _IMAGE)
        seen = _seen(text_map(image, _IMAGE_ANNOTATIONS))
        if owner := self._of(image, await self._place_of_image(seen, asked), seen):
            return await self._by_runtime[owner].pass_on(asked)
        return Answer(next(iter((await self._having(asked)).values()), b""))

    async def remove(self, asked: Asked) -> Answer:
        """Removes the image from the runtime of its name or handler, otherwise from all. Raises CallFailed, InvalidRequest."""
        image = message(asked.request, _IMAGE)
        if named := self._named(image):
            owners = [self._by_runtime[named]]
        else:
            question = pb.ImageStatusRequest.FromString(b"")
            question.image.MergeFromString(image)
            status = Asked(IMAGE_STATUS, question.SerializeToString(), asked.remaining)
            owners = list(await self._having(status, all_must_answer=True))
        answer = Answer(b"")
        for owner in owners:
            answer = await owner.pass_on(asked)
        return answer

    async def list(self, asked: Asked) -> Answer:
        """Lists the images of one runtime if the filter's image names it, otherwise of all. Raises CallFailed, InvalidRequest."""
        named = self._named(message(message(asked.request, _FILTER), _FILTER_IMAGE))
        if named:
            return await self._by_runtime[named].pass_on(asked)
        return Answer(await self._lists.merged(asked))

    def _of(self, image: bytes, place: _Place | None, seen: PodKey) -> Runtime | None:
        """The runtime of an image in a pod. None if nothing determines it. Raises InvalidRequest."""
        name = text(image, _NAME)
        if vms := self._routes.vms_of(text(image, _HANDLER)) or (place and place.vms):
            return (seen and self._vm_images.get((*seen, _tagged(name)))) or self._routes.for_image_of(vms, name)
        named = self._named(image)
        if not place:
            return named
        if named:
            self._routes.refuse_other(name, named, place.runtime)
        return place.runtime

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

    async def _place_of_image(self, seen: PodKey, asked: Asked) -> _Place | None:
        """The place of the image's pod. None if it is not known, so that images are still found while another runtime is down."""
        with contextlib.suppress(CallFailed):
            return await self._place(seen, asked) if seen else None
        return None

    async def _place(self, key: PodKey, asked: Asked) -> _Place | None:
        """The place of a started pod. After a restart of the proxy, asks all runtimes. None if no runtime has the pod."""
        if place := self._pods.get(key):
            return place
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
            for pod in pb.ListPodSandboxResponse.FromString(pods).items:
                if key in _keys(pod):
                    place = _Place(backend.runtime, self._routes.vms_of(pod.runtime_handler))
                    self._pods.put(key, place)
                    return place
        refuse(failures)
        return None


def _tagged(name: str) -> str:
    """kubelet asks for an image without tag and digest by the tag `latest`, but creates the container by the author's name."""
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def _names(sandbox_config: bytes) -> PodKey:
    metadata = message(sandbox_config, _POD_METADATA)
    return tuple(text(metadata, number) for number in _POD_NAMES)


def _seen(annotations: Mapping[str, str]) -> PodKey:
    """() for a pod that is not kubelet's."""
    seen = annotations.get(_SEEN)
    return (seen,) if seen else ()


def _keys(pod: pb.PodSandbox) -> tuple[PodKey, PodKey]:
    return (pod.metadata.namespace, pod.metadata.name, pod.metadata.uid), _seen(pod.annotations)
