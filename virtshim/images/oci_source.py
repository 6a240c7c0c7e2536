"""Images in OCI registries. From the layers of a containerDisk come the file below /disk, kernels in /boot, and all files, for
pods that mount the image as a volume."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtshim.images.confined.frames import BOOT_PLACE, DEFAULT_PLACE
from virtshim.images.downloads.places import Landing
from virtshim.images.kernels import ArrivingBoot
from virtshim.images.layer_child import Layer, Unpacking
from virtshim.images.names import RegistryLocation
from virtshim.images.oci_manifest import (
    DISK_NAME,
    Descriptor,
    Index,
    Manifest,
    architecture,
    artifact_disk,
    choose,
    diff_ids,
    image_config,
    is_archive,
    is_artifact,
    is_packed,
    parse_manifest,
)
from virtshim.images.pull_cache import Pulled
from virtshim.images.pull_watch import PullWatch
from virtshim.images.registries.repository import Repository
from virtshim.images.trees.store import tree_of
from virtshim.images.trees.writer import TreeWriter, artifact_files_add, artifact_files_add_disk, may_be_holes
from virtshim.model.errors import InternalError, InvalidRequest
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import NO_DISK_BYTES, BootFile

_PIECE = 1 << 18


def download(
    location: RegistryLocation,
    repository: Repository,
    landing: Landing,
    unpacking: Unpacking,
    watch: PullWatch,
    allow: Callable[[str], None],
    place: str = DEFAULT_PLACE,
    *,
    as_files: bool = False,
) -> Pulled:
    """Downloads the disk and the files, unless those of the manifest are stored already. This process checks the digest and
    size of each blob; the child that unpacks layers checks their diff_ids. `watch`: gets the number of bytes. `allow`: called
    with the digest of the named manifest or index before anything in it is used; raises if it must not be used. `place`: the
    path in the image below which the disk is. `as_files`: an artifact's only file is known to be no disk."""
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
        disk = None if as_files else artifact_disk(manifest, image)
        artifact = _Artifact(image, chosen, listed, manifest, repository, landing, unpacking, watch)
        return artifact.files() if disk is None else artifact.disk(disk)
    container_config = image_config(config, image)
    content = f"{chosen} /{place} /{BOOT_PLACE}"
    stored = landing.claim(content, watch.progressed, repository.name)
    size = sum(layer.size for layer in manifest.layers)
    watch.expect(size)
    arriving, has_disk = ArrivingBoot(landing.beside), True
    if stored is None:
        diffs = diff_ids(config, manifest, wanted, image)
        described = zip(reversed(manifest.layers), reversed(diffs), strict=True)
        written, tree = landing.disk(), landing.tree()
        tree.expect(_least_bytes(manifest.layers))
        layers = _layers(image, described, repository, landing, tree)
        has_disk = unpacking.run(image, layers, written, size, place, arriving, tree)
        if not written.size and not arriving.is_empty:
            for _ in range(NO_DISK_BYTES // _PIECE):  # holes
                written.write(bytes(_PIECE))
    ids = (_image_id(manifest.config, place), _boot_files(arriving, image), _files_of(manifest))
    return Pulled(content, stored, listed, container_config, *ids, has_disk=has_disk)


def _files_of(manifest: Manifest) -> ImageDigest:
    """The name of the image's files, made from digests that this process checked. Only the child compares layers with the config,
    and a hostile layer may have taken the child over. So the same files in other archives have another name."""
    layers = " ".join(layer.digest for layer in manifest.layers)
    return tree_of(f"config {manifest.config.digest} layers {layers}")


def _boot_files(arriving: ArrivingBoot, image: str) -> Sequence[tuple[BootFile, Path]]:
    try:
        return arriving.finished()
    except ValueError as exc:
        raise InternalError(
            f"image {image!r}: the child that unpacks its layers sent invalid data; pull it again"
        ) from exc


@dataclass(frozen=True, slots=True)
class _Artifact:
    """An artifact: each layer is a file with a title. Its config does not describe the files, and many artifacts share it."""

    _image: str
    _chosen: str
    _listed: str
    _manifest: Manifest
    _repository: Repository
    _landing: Landing
    _unpacking: Unpacking
    _watch: PullWatch

    def disk(self, disk: Descriptor) -> Pulled:
        """Downloads the disk. If it is the only layer and not packed, it is also the only file of the image as a volume. The
        file has the title of the first pull: the same disk with another title is the same image."""
        stored = self._landing.claim(self._chosen, self._watch.progressed, self._repository.name)
        self._watch.expect(disk.size)
        has_disk_name = bool(DISK_NAME.search(disk.title))
        if stored is None:
            layers = _layers(self._image, ((disk, ""),), self._repository, self._landing)
            writer = self._landing.disk()
            self._unpacking.run(self._image, layers, writer, disk.size)
            if len(self._manifest.layers) == 1 and writer.digest().value == disk.digest:
                artifact_files_add_disk(self._landing.tree(), disk)
        tree = None if len(self._manifest.layers) > 1 else tree_of(f"disk {disk.digest}")
        return Pulled(self._chosen, stored, self._listed, tree=tree, may_be_file=not has_disk_name)

    def files(self) -> Pulled:
        stored = self._landing.claim(self._chosen, self._watch.progressed, self._repository.name)
        layers = self._manifest.layers
        self._watch.expect(sum(layer.size for layer in layers))
        if stored is None:
            tree = self._landing.tree()
            tree.expect(_least_bytes(layers))
            archives = [(layer, layer.digest) for layer in reversed(layers) if is_archive(layer)]
            for layer in layers:
                if not is_archive(layer):
                    part = self._landing.part(self._repository.identity(layer), layer.size)
                    artifact_files_add(tree, layer, _counted(self._repository.blob(layer, part), layer, tree))
            if archives:
                packed = sum(layer.size for layer, _ in archives)
                from_top = _layers(self._image, archives, self._repository, self._landing, tree)
                self._unpacking.run(self._image, from_top, self._landing.disk(), packed, "", tree=tree)
        return Pulled(self._chosen, stored, self._listed, tree=self._files, has_disk=False)

    @property
    def _files(self) -> ImageDigest:
        """The name of the files. A single file is named by its digest, because each push makes another manifest."""
        only, *others = self._manifest.layers
        is_one = not others and not is_archive(only)
        return tree_of(f"file {only.digest} {only.title}" if is_one else f"manifest {self._chosen}")


def _image_id(config: Descriptor, place: str) -> ImageId:
    """The image's id, as in other container runtimes. With the disk at another place the image is another VM, so the place
    becomes part of the id."""
    if place == DEFAULT_PLACE:
        return ImageId(config.digest)
    return ImageId(f"sha256:{hashlib.sha256(f'{config.digest} /{place}'.encode()).hexdigest()}")


def _layers(
    image: str,
    layers: Iterable[tuple[Descriptor, str]],
    repository: Repository,
    landing: Landing,
    tree: TreeWriter | None = None,
) -> Iterator[Layer]:
    """`layers`: from the top down, with their diff_ids; a layer without diff_id is the disk itself."""
    for layer, diff in layers:
        part = landing.part(repository.identity(layer), layer.size)
        what = f"layer {layer.digest} of image {image!r}"
        opened = functools.partial(_opened, repository, layer, part, tree)
        yield Layer(what, layer.digest, diff or layer.digest, opened, is_disk=not diff)


def _opened(
    repository: Repository, layer: Descriptor, part: Path | None, tree: TreeWriter | None
) -> Generator[bytes, None, None]:
    chunks = repository.blob(layer, part)
    return chunks if tree is None else _counted(chunks, layer, tree)


def _counted(chunks: Generator[bytes, None, None], layer: Descriptor, tree: TreeWriter) -> Generator[bytes, None, None]:
    """Passes the chunks on, and counts them for the tree's reserved space."""
    with contextlib.closing(chunks):
        for chunk in chunks:
            if _is_dense(layer):
                tree.came(len(chunk))
            yield chunk


def _least_bytes(layers: Iterable[Descriptor]) -> int:
    """The space that the layers take on disk at least: the sum of their sizes, without layers that may have holes.
    Counts files that other layers hide."""
    return sum(layer.size for layer in layers if _is_dense(layer))


def _is_dense(layer: Descriptor) -> bool:
    """Whether the layer's content takes at least the layer's size on disk. Unpacked archives and raw disks may have
    holes and take less."""
    return is_packed(layer) or not (is_archive(layer) or may_be_holes(layer.title))
