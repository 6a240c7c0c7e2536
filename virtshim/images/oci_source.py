"""Disk images in OCI registries: containerDisks, whose one file below /disk is streamed out of its layer."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.ids import ImageId
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.layer_child import Layer, Unpacking
from virtshim.images.names import RegistryLocation
from virtshim.images.oci_manifest import Index, Manifest, architecture, choose, diff_ids, image_config, parse_manifest
from virtshim.images.pull_cache import Pulled, StoredDiskLookup
from virtshim.images.registry import Registry


def download(
    location: RegistryLocation, registry: Registry, disk: DiskWriter, known: StoredDiskLookup, unpacking: Unpacking
) -> Pulled:
    """Streams the disk into `disk`, unless the manifest's is known. Every blob's digest and size are checked here, every layer's
    diff_id where it is unpacked."""
    image = location.name.name
    wanted = f"linux/{architecture(platform.machine())}"
    body, listed = registry.manifest(location.reference)
    chosen = listed
    manifest = parse_manifest(body, image)
    if isinstance(manifest, Index):
        chosen = choose(manifest, wanted, image).digest
        body, _ = registry.manifest(chosen)
        manifest = parse_manifest(body, image)
        if isinstance(manifest, Index):
            raise InvalidRequest(f"image {image!r} cannot be used: its index holds another index")
    stored = known(chosen)
    config = registry.config(manifest.config)
    said = image_config(config, image)
    if stored is None:
        diffs = diff_ids(config, manifest, wanted, image)
        unpacking.run(image, _layers(image, manifest, diffs, registry), disk)
    return Pulled(chosen, stored, listed, said, ImageId(manifest.config.digest))


def _layers(image: str, manifest: Manifest, diffs: tuple[str, ...], registry: Registry) -> Iterator[Layer]:
    """From the top one down."""
    for layer, diff in zip(reversed(manifest.layers), reversed(diffs), strict=True):
        yield Layer(
            f"layer {layer.digest} of image {image!r}", layer.digest, diff, functools.partial(registry.blob, layer)
        )
