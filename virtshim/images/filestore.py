"""The image store on disk: disks by content, and images' files for volumes.

<directory>/                 0711: the QEMU user may open files in it, but not list it
  sha256/<hex>               one complete disk, 0640 for its readers, never changed; named by the digest of the published disk
  boot/<hex>                 files from images' /boot, for root only
  trees/<hex>/               the files of an image (see `trees.store`)
  incoming/<random>          unfinished disks and files, 0700; removed at start
  partial/<boot>/<hex>       downloads that broke off (see `downloads.places`)
  known/<hex>                the stored disk for each source's identity (see `pull_cache`)
  records/<hex>.json         copies of the database's image records (see `virtshim.store.copies`)
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from virtshim.images import file_source, http_source, oci_source
from virtshim.images.confinement import Account, ConfinedChild, Parser, account
from virtshim.images.connect import ForbiddenNetworks
from virtshim.images.downloads.places import Ground, Landing, Partials
from virtshim.images.downloads.room import Room, Turns
from virtshim.images.http_client import HttpClient
from virtshim.images.kernels import StoredBoot
from virtshim.images.layer_child import Unpacking
from virtshim.images.names import FileLocation, HttpLocation, Location, RegistryLocation, resolve
from virtshim.images.policy import DiskPath, Rule, keys_wanted, place_of_disk
from virtshim.images.ports import FetchedImage, SentDisk
from virtshim.images.pull_cache import PullCache, Pulled
from virtshim.images.pull_watch import PullsUnderWay, PullWatch
from virtshim.images.registries.endpoint import Endpoint
from virtshim.images.registries.hosts_toml import hosts_of
from virtshim.images.registries.repository import Repository
from virtshim.images.translations import Transport, read_translations
from virtshim.images.trees.store import Trees, digests_in
from virtshim.images.verify import FIRST_BYTES, judged_before, verify
from virtshim.model.errors import Aborted, InternalError, InvalidRequest, NotFound, ResourceExhausted
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import BootFile, Credentials, DiskFormat, FilesystemSpace, FilesystemUsage, PullProgress
from virtshim.model.image_name import ImageName
from virtshim.system.files import OUT_OF_SPACE, make_directory, mountpoint, remove_tree, sync

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`translations_dir`, `registry_hosts_dir`: "" for none. `download_protocol`: https or http. `insecure_registries`:
    `host[:port]`, including allowed servers on loopback. `max_bytes`: limit of a disk, as published and as the guest sees it.
    `progress_timeout`: seconds without a byte. `min_rate`: bytes per second. `pull_timeout`: seconds for a whole pull, 0 for no
    limit. `forbidden_networks`: in CIDR form. `parser_user`: the user that reads downloaded files, "" for the default. `policy`:
    which images may be pulled, all if empty. `file_dirs`: directories for file:// images. `disk_paths`: paths of disks in
    containerDisks, if not below /disk."""

    translations_dir: str = ""
    registry_hosts_dir: str = ""
    download_protocol: str = "https"
    insecure_registries: tuple[str, ...] = ()
    max_bytes: int = 1 << 40
    progress_timeout: float = 60.0
    min_rate: int = 1024
    pull_timeout: float = 0.0
    forbidden_networks: tuple[str, ...] = ()
    parser_user: str = ""
    policy: tuple[Rule, ...] = ()
    file_dirs: tuple[str, ...] = ()
    disk_paths: tuple[DiskPath, ...] = ()


def _counted(chunks: Iterator[bytes], watch: PullWatch) -> Iterator[bytes]:
    for chunk in chunks:
        watch.progressed(len(chunk))
        yield chunk
    if watch.total and watch.received != watch.total:
        raise InvalidRequest(
            f"image {watch.name!r}: {watch.received} bytes were sent where {watch.total} were announced; "
            "send a disk that nobody writes to"
        )


class _NotADisk(Exception):
    """An artifact's only file is not a disk; `str()` says why."""


class ImageFileStore:
    """Implements `virtshim.images.ports.ImageFiles`. Thread-safe. One process owns the directory."""

    def __init__(
        self,
        directory: str,
        settings: ImageSettings,
        readers: Callable[[], int | None] = lambda: None,
        parser: Callable[[Account], Parser] = ConfinedChild,
    ) -> None:
        """`readers`: returns the group that may read disks: root's, or QEMU's if QEMU opens disks itself; None lets everybody
        read them. `parser`: makes a reader of downloaded files that runs as that user."""
        self._readers = readers
        self._make_parser = parser
        self._root = Path(directory)
        self._files = self._root / "sha256"
        self._incoming = self._root / "incoming"
        self._known = self._root / "known"
        self.boot = StoredBoot(self._root / "boot")
        self._memory = PullCache(str(self._known))
        self._partials = Partials(self._root / "partial")
        self._ground = Ground(self._incoming, self._partials, Turns(), Room(), self._stored_before)
        self._trees = Trees(self._root / "trees", self._incoming)
        self._pulls = PullsUnderWay()
        self.change(settings)

    def change(self, settings: ImageSettings) -> None:
        """Applies from the next pull on. A running pull may use the old or the new settings."""
        self._settings = settings
        self._forbidden = ForbiddenNetworks(settings.forbidden_networks, settings.insecure_registries)

    def fetch(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> FetchedImage:
        name = ImageName.parse(reference)
        translations = read_translations(self._settings.translations_dir) if self._settings.translations_dir else []
        location = resolve(name, translations, self._settings.download_protocol)
        keys = keys_wanted(self._settings.policy, location)
        bring = functools.partial(self._download, location, credentials, keys, cancelled)
        with self._prepared(name):
            try:
                return self._stored(name, functools.partial(bring, as_files=False), cancelled)
            except _NotADisk as exc:
                log.info("image.artifact.no_disk", image=str(name), why=str(exc))
                return self._stored(name, functools.partial(bring, as_files=True), cancelled)

    def load(self, reference: str, sent: SentDisk, cancelled: threading.Event) -> FetchedImage:
        name = ImageName.parse(reference)
        # The operator may take any time to send the disk, and can end the call.
        with self._prepared(name), PullWatch(str(name), cancelled, math.inf) as watch, self._pulls.listed(watch):
            watch.expect(sent.total)
            unpacking = Unpacking(self._settings.max_bytes, self._parser, watch.check, watch.progressed)
            counted = SentDisk(sent.total, _counted(sent.chunks, watch))
            return self._stored(name, lambda landing: file_source.receive(name, counted, landing, unpacking), cancelled)

    @contextlib.contextmanager
    def _prepared(self, name: ImageName) -> Iterator[None]:
        with self._partials_make_room(), self._store_errors(name):
            self._make_directories()
            self._partials.forget_old()
            yield

    def _stored(self, name: ImageName, bring: Callable[[Landing], Pulled], cancelled: threading.Event) -> FetchedImage:
        with Landing(self._ground, str(name), self._settings.max_bytes) as landing:
            pulled = bring(landing)
            boot: tuple[BootFile, ...] = ()
            if pulled.known is not None:
                digest, boot = pulled.known, self._memory.boot(pulled.identity)
            elif not pulled.has_disk and pulled.tree is not None:
                digest = pulled.tree
                self._publish_files(landing, name, pulled.tree, "")
            else:
                digest, boot = self._publish_disk(landing, name, cancelled, pulled), self._publish_boot(pulled.boot)
            tree = pulled.tree if pulled.known is None else self._memory.tree(pulled.identity)
            tree = tree if self._trees.has(tree) else None
            if pulled.identity and pulled.known is None:
                self._memory.remember(pulled.identity, digest, boot, tree)
            with self._not_removed(name):
                found, virtual_size, size = self._judged_before(digest)
        return FetchedImage(
            id=pulled.image or ImageId(digest.value),
            digest=digest,
            tag="" if name.digest else name.tagged,
            repo_digest=name.with_digest(pulled.manifest or str(digest)),
            size=size,
            virtual_size=virtual_size,
            format=found,
            config=pulled.config,
            boot=boot,
            tree=tree,
        )

    def _publish_disk(
        self, landing: Landing, name: ImageName, cancelled: threading.Event, pulled: Pulled
    ) -> ImageDigest:
        """Publishes the disk and the image's files. If the files cannot be a volume, the image can still be a VM's."""
        digest, path = landing.finished()
        # The confined child runs as another user and must read the file. No other user can reach this directory.
        path.chmod(0o644)
        try:
            verify(str(path), str(name), self._settings.max_bytes, self._parser, cancelled)
        except InvalidRequest as exc:
            if pulled.may_be_file:
                raise _NotADisk(str(exc)) from exc
            raise
        self._publish(path, digest, path.stat().st_size)
        if landing.files is not None and pulled.tree is not None:
            try:
                self._publish_files(landing, name, pulled.tree, self.path(digest))
            except InvalidRequest as exc:
                log.warning("image.no_volume", image=str(name), why=str(exc))
        return digest

    def _publish_files(self, landing: Landing, name: ImageName, tree: ImageDigest, disk: str) -> None:
        with self._not_removed(name):
            self._trees.publish(landing.files, tree, str(name), disk)

    def under_way(self) -> Sequence[PullProgress]:
        return self._pulls.progress()

    def path(self, digest: ImageDigest, below: str | None = None) -> str:
        return str(self._files / digest.hex) if below is None else self._trees.path(digest, below)

    def format_of(self, digest: ImageDigest) -> DiskFormat:
        """Reads only the header: the disk was judged when it was pulled, and never changes."""
        try:
            with open(self.path(digest), "rb") as file:
                return judged_before(file.read(FIRST_BYTES), 0)[0]
        except OSError as exc:
            raise NotFound(
                f"the kept disk is based on image {digest}, which is not on this node; pull the image by this digest"
            ) from exc

    def delete(self, digest: ImageDigest) -> None:
        with self._store_errors(digest):
            Path(self.path(digest)).unlink(missing_ok=True)
            self._trees.delete(digest)
            self._memory.keep_only(self.stored())

    def stored(self) -> frozenset[ImageDigest]:
        return self._disks() | self._trees.stored()

    def _disks(self) -> frozenset[ImageDigest]:
        """Regular files alone: no links, no directories."""
        found = ((self._files / str(one).removeprefix("sha256:"), one) for one in digests_in(self._files))
        return frozenset(one for path, one in found if path.is_file() and not path.is_symlink())

    def describe(self, digest: ImageDigest) -> FetchedImage:
        with self._store_errors(digest):
            found, virtual_size, size = self._judged_before(digest)
        tree = digest if self._trees.has(digest) else None
        return FetchedImage(ImageId(digest.value), digest, "", "", size, virtual_size, found, tree=tree)

    def sweep(self) -> None:
        with self._store_errors(self._root):
            self._make_directories()
            for name in os.listdir(self._incoming):
                remove_tree(str(self._incoming), name)
            self._partials.forget_old()
            _ = self._group
            for digest in self._disks():  # an earlier version may have stored them, for another group
                self._let_read(Path(self.path(digest)))
            self._memory.keep_only(self.stored())

    def filesystem_usage(self, *of: ImageDigest) -> FilesystemUsage:
        """Counts directories too, but not holes. Images' trees were counted when they were stored."""
        with self._store_errors(self._root):
            beside = map(self.path, of) if of else self._trees.beside(self._root)
            used, inodes = self._trees.space(of or self._trees.stored(), beside)
            mounted_at = mountpoint(self._root)
            whole = os.statvfs(mounted_at)  # the store's own directory may not exist yet
        space = FilesystemSpace(whole.f_blocks * whole.f_frsize, whole.f_bavail * whole.f_frsize)
        return FilesystemUsage(mounted_at, used, inodes, time.time_ns(), space)

    def _download(
        self,
        location: Location,
        credentials: Credentials | None,
        keys: Sequence[str] | None,
        cancelled: threading.Event,
        landing: Landing,
        *,
        as_files: bool,
    ) -> Pulled:
        transport = location.transport if isinstance(location, HttpLocation) else Transport()
        with (
            PullWatch(str(location.name), cancelled, self._settings.progress_timeout, self._settings.min_rate) as watch,
            self._pulls.listed(watch),
            contextlib.ExitStack() as clients,
        ):
            if self._settings.pull_timeout:
                watch.limit(self._settings.pull_timeout)
            unpacking = Unpacking(self._settings.max_bytes, self._parser, watch.check, watch.progressed)
            if isinstance(location, FileLocation):
                return file_source.copy(location, self._settings.file_dirs, landing, unpacking, watch.progressed)
            if isinstance(location, HttpLocation):
                if transport.timeout is not None:
                    watch.limit(transport.timeout)
                client = clients.enter_context(HttpClient(watch, transport, self._forbidden))
                return http_source.download(location, credentials, client, landing, unpacking)
            repository = self._repository(location, credentials, watch, clients)
            place = place_of_disk(self._settings.disk_paths, location)

            def allow(digest: str) -> None:
                if keys is not None:
                    # Imported here, because its library takes memory that most nodes do not need.
                    from virtshim.images.cosign import check_signed

                    check_signed(location.name.name, digest, keys, repository)

            return oci_source.download(location, repository, landing, unpacking, watch, allow, place, as_files=as_files)

    def _repository(
        self,
        location: RegistryLocation,
        credentials: Credentials | None,
        watch: PullWatch,
        clients: contextlib.ExitStack,
    ) -> Repository:
        endpoints = []
        for host in hosts_of(location.registry, self._settings.registry_hosts_dir):
            client = clients.enter_context(HttpClient(watch, host.transport, self._forbidden.but_not(host.url)))
            endpoints.append(Endpoint(location, host, credentials, client, self._settings.insecure_registries))
        return Repository(location, endpoints, watch)

    def _judged_before(self, digest: ImageDigest) -> tuple[DiskFormat, int, int]:
        """Format, guest-visible bytes and file size of a stored disk. A tree has only a size. The parser's user may not read
        stored disks; it need not, because they never change."""
        if self._trees.has(digest):
            return DiskFormat.RAW, 0, self._trees.size(digest)
        with open(self.path(digest), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return *judged_before(file.read(FIRST_BYTES), size), size

    @property
    def _parser(self) -> Parser:
        """Looks its user up each time, because the user may have been created since."""
        return self._make_parser(account(self._settings.parser_user))

    def _stored_before(self, identity: str) -> ImageDigest | None:
        """The stored disk or tree, if everything that came with it is stored too."""
        digest, tree = self._memory.digest(identity), self._memory.tree(identity)
        if digest is None or not (Path(self.path(digest)).is_file() or self._trees.has(digest)):
            return None
        is_whole = all(Path(self.boot.path(one.digest)).is_file() for one in self._memory.boot(identity))
        return digest if is_whole and (tree is None or self._trees.has(tree)) else None

    def _publish(self, path: Path, digest: ImageDigest, size: int) -> None:
        """Keeps an existing file of the same content, because running VMs have it open."""
        final = Path(self.path(digest))
        if final.is_file() and final.stat().st_size == size:
            return
        self._let_read(path)
        path.replace(final)
        sync(self._files)

    def _publish_boot(self, arrived: Sequence[tuple[BootFile, Path]]) -> tuple[BootFile, ...]:
        for one, path in arrived:
            self.boot.take(path, one.digest)
        return tuple(one for one, _ in arrived)

    @functools.cached_property
    def _group(self) -> int | None:
        """Determined once, at start, so that a pull does not need libvirt."""
        return self._readers()

    def _let_read(self, path: Path) -> None:
        if self._group is None:
            path.chmod(0o644)
            return
        os.chown(path, -1, self._group)
        path.chmod(0o640)

    def _make_directories(self) -> None:
        for directory, mode in (
            (self._root, 0o711),
            (self._files, 0o711),
            (self._incoming, 0o700),
            (self._known, 0o700),
            (self._trees.directory, 0o700),
        ):
            make_directory(directory, mode)
        self.boot.make_directory()
        self._partials.make_directory()

    @contextlib.contextmanager
    def _partials_make_room(self) -> Iterator[None]:
        """If a disk does not fit, removes all partial downloads, so that the next try has more space."""
        try:
            yield
        except ResourceExhausted:
            self._partials.forget_old(0)
            raise

    @contextlib.contextmanager
    def _not_removed(self, name: ImageName) -> Iterator[None]:
        """A stored disk may be deleted before its pull has returned."""
        try:
            yield
        except FileNotFoundError as exc:
            raise Aborted(f"image {str(name)!r} was removed while it was pulled; repeat the pull") from exc

    @contextlib.contextmanager
    def _store_errors(self, what: object) -> Iterator[None]:
        """Turns system errors of the store's files into domain errors."""
        try:
            yield
        except OSError as exc:
            if exc.errno in OUT_OF_SPACE:
                raise ResourceExhausted(f"image {what}: no space left in {self._root}; free some") from exc
            raise InternalError(f"image {what}: the image store {self._root} fails: {exc.strerror}") from exc
