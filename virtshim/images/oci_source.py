"""Disk images in OCI registries: containerDisks, whose one file below /disk is streamed out of its layer."""

from __future__ import annotations

import contextlib
import platform

from virtshim.domain.errors import InvalidRequest
from virtshim.images.container_disk import DiskSearch
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.layer_stream import limited, unpacked, verified
from virtshim.images.layer_tar import BadTar, TarStream
from virtshim.images.names import RegistryLocation
from virtshim.images.oci_manifest import Descriptor, Index, Manifest, architecture, choose, diff_ids, parse_manifest
from virtshim.images.pull_cache import Pulled, StoredDiskLookup
from virtshim.images.registry import Registry


def download(
    location: RegistryLocation, registry: Registry, disk: DiskWriter, known: StoredDiskLookup, max_bytes: int
) -> Pulled:
    """Streams the disk into `disk`, unless the manifest's is known. No layer may unpack to more than `max_bytes`. Every
    blob's digest and size and every layer's diff_id are checked."""
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
    if stored is None:
        _unpack(
            image,
            manifest,
            diff_ids(registry.config(manifest.config), manifest, wanted, image),
            registry,
            disk,
            max_bytes,
        )
    return Pulled(chosen, stored, listed)


def _unpack(
    image: str, manifest: Manifest, diffs: tuple[str, ...], registry: Registry, disk: DiskWriter, max_bytes: int
) -> None:
    search = DiskSearch(image)
    for layer, diff in zip(reversed(manifest.layers), reversed(diffs), strict=True):
        _read_layer(image, layer, diff, registry, search, disk, max_bytes)
        search.layer_done()
    search.finish()


def _read_layer(
    image: str,
    layer: Descriptor,
    diff: str,
    registry: Registry,
    search: DiskSearch,
    disk: DiskWriter,
    max_bytes: int,
) -> None:
    what = f"layer {layer.digest} of image {image!r}"
    with contextlib.closing(registry.blob(layer)) as blob:
        chunks = limited(unpacked(blob, what), max_bytes, what)
        if diff != layer.digest:
            chunks = verified(chunks, diff, None, what)
        tar = TarStream(chunks)
        try:
            while (entry := tar.next()) is not None:
                if search.is_disk(entry):
                    disk.expect(entry.size)
                    for piece in tar.data():
                        disk.write(piece)
        except BadTar as exc:
            raise InvalidRequest(f"{what} cannot be read: {exc}; push the image again") from exc
