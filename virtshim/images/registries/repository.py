"""Manifests and blobs of one repository, for one pull, from the first of its hosts that has them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from virtshim.images.downloads import resumed
from virtshim.images.downloads.resumed import Busy, answered
from virtshim.images.http_client import HttpResponse
from virtshim.images.names import RegistryLocation
from virtshim.images.oci_manifest import MAX_MANIFEST_BYTES, MEDIA_TYPES, Descriptor
from virtshim.images.pull_watch import PullWatch
from virtshim.images.registries.endpoint import Endpoint
from virtshim.images.registries.hosts_toml import PULL, RESOLVE
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, NotFound, ShimError, Unavailable


def verified(chunks: Iterator[bytes], digest: str, size: int | None, what: str) -> Iterator[bytes]:
    """Passes `chunks` on. At the end, raises InvalidRequest unless they had this digest and, if given, this size. Pure."""
    seen, sha256 = 0, hashlib.sha256()
    for chunk in chunks:
        seen += len(chunk)
        if size is not None and seen > size:
            raise InvalidRequest(f"{what} is longer than the {size} bytes its manifest says; push the image again")
        sha256.update(chunk)
        yield chunk
    if size is not None and seen != size:
        raise InvalidRequest(f"{what} has {seen} bytes where its manifest says {size}; push the image again")
    if f"sha256:{sha256.hexdigest()}" != digest:
        raise InvalidRequest(
            f"{what} has the digest sha256:{sha256.hexdigest()}, expected {digest}; push the image again"
        )


log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_INDEX = "application/vnd.oci.image.index.v1+json"
# Statuses of registries that do not have this call, as in cosign. They cannot mean that the image is missing, because its
# manifest was found.
_KNOWS_NO_REFERRERS = frozenset({400, 404, 405, 406})


class Repository:
    """`endpoints` are asked in order until one has the content."""

    def __init__(self, location: RegistryLocation, endpoints: Sequence[Endpoint], watch: PullWatch) -> None:
        self._location = location
        self._endpoints = endpoints
        self._watch = watch

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """The manifest or index for a tag or digest, and its digest. If `reference` is a digest, it is verified."""
        need = PULL if ":" in reference else RESOLVE
        return self._first(need, functools.partial(self._manifest, reference))

    def referrers(self, digest: str) -> bytes:
        """The index of content that refers to a manifest. Raises NotFound if the registry keeps no such index, or an empty one: a
        mirror's index, or one newer than the content, may be empty although a tag refers to the manifest."""

        def ask(endpoint: Endpoint) -> bytes:
            with endpoint.get(f"referrers/{digest}", {"Accept": _INDEX}, _KNOWS_NO_REFERRERS) as answer:
                body = answer.all(MAX_MANIFEST_BYTES)
            if not _lists_any(body):
                raise NotFound(f"registry {self._location.registry} lists nothing that refers to {digest}")
            return body

        return self._first(RESOLVE, ask)

    def config(self, descriptor: Descriptor) -> bytes:
        """A small blob, verified."""
        if descriptor.size > MAX_MANIFEST_BYTES:
            raise InvalidRequest(
                f"image {self._location.name.name!r} has a config of more than {MAX_MANIFEST_BYTES} bytes"
            )
        return b"".join(self.blob(descriptor))

    def blob(self, descriptor: Descriptor, part: Path | None = None) -> Generator[bytes, None, None]:
        """The bytes of a blob. Raises at the end if they do not match the descriptor. `part`: a file with the blob's first
        bytes, to which the rest is appended, so that the next pull can continue."""
        what = f"blob {descriptor.digest} of image {self._location.name.name!r}"
        rest = functools.partial(self._rest, descriptor)
        chunks = resumed.by_way_of(part, descriptor.size, None, rest, self._watch)
        yield from verified(chunks, descriptor.digest, descriptor.size, what)

    @property
    def name(self) -> str:
        return f"{self._location.registry}/{self._location.repository}"

    def identity(self, descriptor: Descriptor) -> str:
        """The blob's identity in this repository. It includes the repository, because not everybody may read it."""
        return f"{self.name} {descriptor.digest}"

    def _manifest(self, reference: str, endpoint: Endpoint) -> tuple[bytes, str]:
        with endpoint.get(f"manifests/{reference}", {"Accept": ", ".join(MEDIA_TYPES)}) as answer:
            body = answer.all(MAX_MANIFEST_BYTES)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if ":" in reference and reference != digest:
            raise InvalidRequest(
                f"the manifest of {self._location.name} has the digest {digest}, expected {reference}; the registry is damaged"
            )
        return body, digest

    def _rest(self, descriptor: Descriptor, at: int, end: int | None = None) -> HttpResponse:
        def ask(endpoint: Endpoint) -> HttpResponse:
            answer = endpoint.get(f"blobs/{descriptor.digest}", resumed.rest_range(at, end))
            return resumed.from_byte(answer, at, end)

        # Nobody waits for a busy host because of a part: one connection can do without.
        return self._first(PULL, ask) if end is None else self._first_now(PULL, ask)

    def _first(self, need: str, ask: Callable[[Endpoint], _T]) -> _T:
        """The answer of the first host that has the capability and the content. Waits if a host is busy and the last one, the
        registry itself, is busy or unavailable. Raises the last host's error."""
        return answered(functools.partial(self._first_now, need, ask), self._watch)

    def _first_now(self, need: str, ask: Callable[[Endpoint], _T]) -> _T:
        """Like `_first`, but does not wait: raises Busy if waiting may help."""
        able = [endpoint for endpoint in self._endpoints if endpoint.may(need)]
        soonest: list[int] = []
        for endpoint in able[:-1]:
            try:
                return ask(endpoint)
            except DeadlineExceeded:
                raise
            except ShimError as exc:
                soonest += [exc.seconds] if isinstance(exc, Busy) else []
                log.info("image.mirror.passed_over", image=str(self._location.name), error=str(exc))
        if not able:
            raise InvalidRequest(
                f"image {str(self._location.name)!r}: no host in the hosts.toml of {self._location.registry} has the "
                f"capability {need}; give it to one"
            )
        try:
            return ask(able[-1])
        except Unavailable as exc:
            soonest += [exc.seconds] if isinstance(exc, Busy) else []
            if not soonest:
                raise
            raise Busy(str(exc), min(soonest)) from exc


def _lists_any(index: bytes) -> bool:
    try:
        return bool(json.loads(index)["manifests"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
