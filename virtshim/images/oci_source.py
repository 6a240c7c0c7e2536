"""Disk images in OCI registries: containerDisks, whose one file below /disk, and kernels below /boot, are streamed out of their
layers."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from virtshim.domain.errors import InternalError, InvalidRequest
from virtshim.domain.ids import ImageId
from virtshim.domain.image import NO_DISK_BYTES, BootFile
from virtshim.images.confined.frames import BOOT_PLACE, DEFAULT_PLACE
from virtshim.images.downloads.landing import Landing
from virtshim.images.kernels.arriving import ArrivingBoot
from virtshim.images.layer_child import Layer, Unpacking
from virtshim.images.names import RegistryLocation
from virtshim.images.oci_manifest import (
    Descriptor,
    Index,
    architecture,
    artifact_disk,
    choose,
    diff_ids,
    image_config,
    is_artifact,
    parse_manifest,
)
from virtshim.images.pull_cache import Pulled
from virtshim.images.pull_watch import PullWatch
from virtshim.images.registries.repository import Repository

_PIECE = 1 << 18


def download(
    location: RegistryLocation,
    repository: Repository,
    landing: Landing,
    unpacking: Unpacking,
    watch: PullWatch,
    allow: Callable[[str], None],
    place: str = DEFAULT_PLACE,
) -> Pulled:
    """Brings the disk, unless the manifest's is known. Every blob's digest and size are checked here, every layer's diff_id where
    it is unpacked. `watch` learns how much there is. `allow` is given the digest that the name means, before anything
    that it leads to is looked at, and raises if that is not to be used. `place`: below which path of its file system the disk
    is."""
    image = location.name.name
    wanted = f"linux/{architecture(platform.machine())}"
    body, listed = repository.manifest(location.reference)
    allow(listed)
    chosen = listed
    manifest = parse_manifest(body, image)
    if isinstance(manifest, Index):
        chosen = choose(manifest, wanted, image).digest
        body, _ = repository.manifest(chosen)
        manifest = parse_manifest(body, image)
        if isinstance(manifest, Index):
            raise InvalidRequest(f"image {image!r} cannot be used: its index holds another index")
    config = repository.config(manifest.config)
    if is_artifact(config):
        disk = artifact_disk(manifest, image)
        stored = landing.claim(chosen, watch.progressed, repository.name)
        watch.expect(disk.size)
        if stored is None:
            unpacking.run(image, _layers(image, ((disk, ""),), repository, landing), landing.disk(), disk.size)
        # Its config says nothing of the disk, and is that of many others.
        return Pulled(chosen, stored, listed)
    said = image_config(config, image)
    content = f"{chosen} /{place} /{BOOT_PLACE}"
    stored = landing.claim(content, watch.progressed, repository.name)
    size = sum(layer.size for layer in manifest.layers)
    watch.expect(size)
    arriving = ArrivingBoot(landing.beside)
    if stored is None:
        diffs = diff_ids(config, manifest, wanted, image)
        layers = zip(reversed(manifest.layers), reversed(diffs), strict=True)
        written = landing.disk()
        unpacking.run(image, _layers(image, layers, repository, landing), written, size, place, arriving)
        if not written.size and not arriving.is_empty:
            for _ in range(NO_DISK_BYTES // _PIECE):  # holes
                written.write(bytes(_PIECE))
    return Pulled(content, stored, listed, said, _id(manifest.config, place), _whole(arriving, image))


def _whole(arriving: ArrivingBoot, image: str) -> Sequence[tuple[BootFile, Path]]:
    try:
        return arriving.finished()
    except ValueError as exc:
        raise InternalError(f"image {image!r}: what unpacks its layers answers with nonsense; pull it again") from exc


def _id(config: Descriptor, place: str) -> ImageId:
    """As a container runtime knows the image. Taken from another place it is another VM: two such have ids of their own."""
    if place == DEFAULT_PLACE:
        return ImageId(config.digest)
    return ImageId(f"sha256:{hashlib.sha256(f'{config.digest} /{place}'.encode()).hexdigest()}")


def _layers(
    image: str, layers: Iterable[tuple[Descriptor, str]], repository: Repository, landing: Landing
) -> Iterator[Layer]:
    """From the top one down, with their diff_ids; without one it is the disk itself."""
    for layer, diff in layers:
        part = landing.part(repository.identity(layer), layer.size)
        what = f"layer {layer.digest} of image {image!r}"
        opened = functools.partial(repository.blob, layer, part)
        yield Layer(what, layer.digest, diff or layer.digest, opened, is_disk=not diff)
