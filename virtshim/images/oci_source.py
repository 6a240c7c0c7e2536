"""Disk images in OCI registries: containerDisks, whose one file below /disk is streamed out of its layer."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Iterator

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.ids import ImageId
from virtshim.images.downloads.landing import Landing
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
from virtshim.images.registries.repository import Repository


def download(
    location: RegistryLocation,
    repository: Repository,
    landing: Landing,
    unpacking: Unpacking,
    waiting: Callable[[], None],
) -> Pulled:
    """Brings the disk, unless the manifest's is known. Every blob's digest and size are checked here, every layer's diff_id where
    it is unpacked. `waiting` is called while another pull brings it."""
    image = location.name.name
    wanted = f"linux/{architecture(platform.machine())}"
    body, listed = repository.manifest(location.reference)
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
        stored = landing.claim(chosen, waiting, repository.name)
        if stored is None:
            unpacking.run(image, _layers(image, ((disk, ""),), repository, landing), landing.disk())
        # Its config says nothing of the disk, and is that of many others.
        return Pulled(chosen, stored, listed)
    said = image_config(config, image)
    stored = landing.claim(chosen, waiting, repository.name)
    if stored is None:
        diffs = diff_ids(config, manifest, wanted, image)
        layers = zip(reversed(manifest.layers), reversed(diffs), strict=True)
        unpacking.run(image, _layers(image, layers, repository, landing), landing.disk())
    return Pulled(chosen, stored, listed, said, ImageId(manifest.config.digest))


def _layers(
    image: str, layers: Iterable[tuple[Descriptor, str]], repository: Repository, landing: Landing
) -> Iterator[Layer]:
    """From the top one down, with their diff_ids; without one it is the disk itself."""
    for layer, diff in layers:
        part = landing.part(repository.identity(layer), layer.size)
        what = f"layer {layer.digest} of image {image!r}"
        opened = functools.partial(repository.blob, layer, part)
        yield Layer(what, layer.digest, diff or layer.digest, opened, is_disk=not diff)
