"""ImageService. Each call converts the request, calls the image service and converts the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri import to_domain, to_proto
from virtshim.cri.lists import batches
from virtshim.cri.services import set_when_cancelled
from virtshim.images.service import ImageService
from virtshim.model.errors import InvalidRequest, RegistryUnavailable, SignatureRefused, Unavailable
from virtshim.model.image import FilesystemUsage
from virtshim.model.sandbox import check_handler
from virtshim.system.pod_places import PodPlaces


@dataclass(frozen=True)
class ImageServicer(api_pb2_grpc.ImageServiceServicer):
    """Calls that are not defined here answer UNIMPLEMENTED. `pulls`: limits concurrent pulls by namespace."""

    images: ImageService
    container_filesystem_usage: Callable[[], FilesystemUsage]
    handlers: Collection[str]
    pulls: PodPlaces

    def ListImages(self, request: pb.ListImagesRequest, context: grpc.ServicerContext) -> pb.ListImagesResponse:
        return pb.ListImagesResponse(images=self._items(request.filter))

    def StreamImages(
        self, request: pb.StreamImagesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamImagesResponse]:
        for batch in batches(self._items(request.filter)):
            yield pb.StreamImagesResponse(images=batch)

    def _items(self, wanted: pb.ImageFilter) -> list[pb.Image]:
        if wanted.image.image:
            found = self.images.find(wanted.image.image)
            return [to_proto.image_item(found)] if found else []
        return [to_proto.image_item(image) for image in self.images.all()]

    def ImageStatus(self, request: pb.ImageStatusRequest, context: grpc.ServicerContext) -> pb.ImageStatusResponse:
        """For a missing image, the answer has no `image`; it is never NotFound."""
        found = self.images.find(_reference(request.image))
        if found is None:
            return pb.ImageStatusResponse()
        info = {"info": json.dumps(to_proto.image_facts(found))} if request.verbose else {}
        return pb.ImageStatusResponse(image=to_proto.image_item(found), info=info)

    def PullImage(self, request: pb.PullImageRequest, context: grpc.ServicerContext) -> pb.PullImageResponse:
        """All handlers accept the same images."""
        check_handler(request.image.runtime_handler, self.handlers)
        reference = _reference(request.image)
        credentials = to_domain.credentials(request.auth) if request.HasField("auth") else None
        try:
            with self.pulls.held(request.sandbox_config.metadata.namespace):
                image = self.images.pull(reference, credentials, set_when_cancelled(context))
        except SignatureRefused as exc:
            # kubelet recognizes this word and tells the pod's owner.
            raise SignatureRefused(f"SignatureValidationFailed: {exc}") from exc
        except Unavailable as exc:
            raise RegistryUnavailable(f"RegistryUnavailable: {exc}") from exc
        return pb.PullImageResponse(image_ref=image.id.value)

    def RemoveImage(self, request: pb.RemoveImageRequest, context: grpc.ServicerContext) -> pb.RemoveImageResponse:
        self.images.remove(_reference(request.image))
        return pb.RemoveImageResponse()

    def ImageFsInfo(self, request: pb.ImageFsInfoRequest, context: grpc.ServicerContext) -> pb.ImageFsInfoResponse:
        return pb.ImageFsInfoResponse(
            image_filesystems=[to_proto.filesystem_usage(self.images.files.filesystem_usage())],
            container_filesystems=[to_proto.filesystem_usage(self.container_filesystem_usage())],
        )


def _reference(spec: pb.ImageSpec) -> str:
    if not spec.image:
        raise InvalidRequest("image.image is empty")
    return spec.image
