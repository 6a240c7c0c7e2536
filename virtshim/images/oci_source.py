"""Images in OCI registries: the one file below /disk of a containerDisk, and kernels below /boot, are streamed out of its layers,
all files are unpacked for who mounts the image as a volume."""

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
    """Brings the disk and the files, unless the manifest's are known. Every blob's digest and size are checked here, every
    layer's diff_id where it is unpacked. `watch` learns how much there is. `allow` is given the digest that the name means,
    before anything that it leads to is looked at, and raises if that is not to be used. `place`: below which path of its file
    system the disk is. `as_files`: an artifact's only file is no disk."""
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
    said = image_config(config, image)
    content = f"{chosen} /{place} /{BOOT_PLACE}"
    stored = landing.claim(content, watch.progressed, repository.name)
    size = sum(layer.size for layer in manifest.layers)
    watch.expect(size)
    arriving, has_disk = ArrivingBoot(landing.beside), True
    if stored is None:
        diffs = diff_ids(config, manifest, wanted, image)
        described = zip(reversed(manifest.layers), reversed(diffs), strict=True)
        written, tree = landing.disk(), landing.tree()
        tree.expect(_least(manifest.layers))
        layers = _layers(image, described, repository, landing, tree)
        has_disk = unpacking.run(image, layers, written, size, place, arriving, tree)
        if not written.size and not arriving.is_empty:
            for _ in range(NO_DISK_BYTES // _PIECE):  # holes
                written.write(bytes(_PIECE))
    ids = (_id(manifest.config, place), _whole(arriving, image), _files_of(manifest))
    return Pulled(content, stored, listed, said, *ids, has_disk=has_disk)


def _files_of(manifest: Manifest) -> ImageDigest:
    """By what was digested here. The child alone knows that layers are those of a config, and layers may have taken it over.
    So layers that are packed in another way are other files."""
    layers = " ".join(layer.digest for layer in manifest.layers)
    return tree_of(f"config {manifest.config.digest} layers {layers}")


def _whole(arriving: ArrivingBoot, image: str) -> Sequence[tuple[BootFile, Path]]:
    try:
        return arriving.finished()
    except ValueError as exc:
        raise InternalError(f"image {image!r}: what unpacks its layers answers with nonsense; pull it again") from exc


@dataclass(frozen=True, slots=True)
class _Artifact:
    """Files as layers, each with its name. Its config says nothing of them, and is that of many others."""

    _image: str
    _chosen: str
    _listed: str
    _manifest: Manifest
    _repository: Repository
    _landing: Landing
    _unpacking: Unpacking
    _watch: PullWatch

    def disk(self, disk: Descriptor) -> Pulled:
        """If it is the only layer, and is not packed, it is the only file, too, by the title of its first pull: by another it is
        the same image."""
        stored = self._landing.claim(self._chosen, self._watch.progressed, self._repository.name)
        self._watch.expect(disk.size)
        is_called_so = bool(DISK_NAME.search(disk.title))
        if stored is None:
            layers = _layers(self._image, ((disk, ""),), self._repository, self._landing)
            writer = self._landing.disk()
            self._unpacking.run(self._image, layers, writer, disk.size)
            if len(self._manifest.layers) == 1 and writer.digest().value == disk.digest:
                artifact_files_add_disk(self._landing.tree(), disk)
        tree = None if len(self._manifest.layers) > 1 else tree_of(f"disk {disk.digest}")
        return Pulled(self._chosen, stored, self._listed, tree=tree, may_be_file=not is_called_so)

    def files(self) -> Pulled:
        stored = self._landing.claim(self._chosen, self._watch.progressed, self._repository.name)
        layers = self._manifest.layers
        self._watch.expect(sum(layer.size for layer in layers))
        if stored is None:
            tree = self._landing.tree()
            tree.expect(_least(layers))
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
        """One file that is pushed again has another manifest."""
        only, *others = self._manifest.layers
        is_one = not others and not is_archive(only)
        return tree_of(f"file {only.digest} {only.title}" if is_one else f"manifest {self._chosen}")


def _id(config: Descriptor, place: str) -> ImageId:
    """As a container runtime knows the image. Taken from another place it is another VM: two such have ids of their own."""
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
    """From the top one down, with their diff_ids; without one it is the disk itself."""
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
    """Passed on; the tree is told what has come of that which it expects."""
    with contextlib.closing(chunks):
        for chunk in chunks:
            if _is_dense(layer):
                tree.came(len(chunk))
            yield chunk


def _least(layers: Iterable[Descriptor]) -> int:
    """Bytes of them that do not become less on disk, but for what layers hide of those below them."""
    return sum(layer.size for layer in layers if _is_dense(layer))


def _is_dense(layer: Descriptor) -> bool:
    """Whether it takes no less on disk than on its way: what is not packed may be holes for the most part."""
    return is_packed(layer) or not (is_archive(layer) or may_be_holes(layer.title))
