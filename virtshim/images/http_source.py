"""Disk images that are files on a web server."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads import resumed
from virtshim.images.downloads.places import Landing
from virtshim.images.downloads.resumed import answered, refusal, retry_after
from virtshim.images.http_client import HttpClient, HttpResponse, redacted_url
from virtshim.images.layer_child import Layer, Unpacking
from virtshim.images.names import HttpLocation, is_loopback
from virtshim.images.pull_cache import Pulled
from virtshim.images.registries.endpoint import basic_login, meant_for
from virtshim.model.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.model.ids import ImageDigest
from virtshim.model.image import Credentials


def download(
    location: HttpLocation, credentials: Credentials | None, client: HttpClient, landing: Landing, unpacking: Unpacking
) -> Pulled:
    """Downloads the file, unless its disk is stored already. A digest in the name must match the file, packed or unpacked. The
    client must use the location's transport."""
    source = _Source(location, credentials, client)
    with answered(functools.partial(source.ask, {}), client.watch) as answer:
        identity, tag = source.identity(answer), answer.headers.get("ETag", "")
        total = answer.length()
        content = _content(location, identity)
        client.watch.expect(total or 0)
        stored = landing.claim(content, functools.partial(_while_waiting, answer, client)) if identity else None
        if stored is not None:
            if content == identity:
                _check_digest(location, stored)
            return Pulled(content, stored)
        rest = functools.partial(source.rest, identity, tag) if identity else None
        if location.is_packed:
            part = landing.part(identity, total or 0) if identity else None
            begun = None if answer.is_closed else answer
            # Closed here, because a raised error keeps the generator, and so the connection, alive.
            with contextlib.closing(resumed.by_way_of(part, total, begun, rest, client.watch)) as chunks:
                _unpack(location, chunks, total, landing.disk(), unpacking)
            return Pulled(content)
        disk = landing.disk(identity)
        disk.resume(client.watch.progressed)
        client.watch.expect(total or 0, disk.size)
        if total is not None:
            if disk.size > total:
                disk.restart()
            disk.expect(total)
        if disk.size != total:
            begun = None if answer.is_closed or disk.size else answer
            with contextlib.closing(resumed.body(begun, disk.size, rest, client.watch, total)) as chunks:
                for chunk in chunks:
                    disk.write(chunk)
    if total is not None and disk.size != total:
        raise Unavailable(f"{redacted_url(location.url)} broke off after {disk.size} of {total} bytes; try again")
    _check_digest(location, disk.digest())
    return Pulled(identity)


def _content(location: HttpLocation, identity: str) -> str:
    """The disk's key in the pull cache. A packed file's own digest is not stored, so a digest in the name becomes part of the
    key."""
    wanted = location.name.digest if location.is_packed else None
    return f"{identity} {wanted}" if identity and wanted else identity


def _unpack(
    location: HttpLocation, chunks: Iterator[bytes], total: int | None, disk: DiskWriter, unpacking: Unpacking
) -> None:
    sha256 = hashlib.sha256()

    def digested() -> Generator[bytes, None, None]:
        for chunk in chunks:
            sha256.update(chunk)
            yield chunk

    what = redacted_url(location.url)
    unpacking.run(str(location.name), [Layer(what, "", "", digested, is_disk=True)], disk, total)
    if location.name.digest != f"sha256:{sha256.hexdigest()}":
        _check_digest(location, disk.digest())


def _while_waiting(answer: HttpResponse, client: HttpClient) -> None:
    """Called while another pull downloads the same file."""
    answer.close()
    client.watch.progressed()


@dataclass(frozen=True, slots=True)
class _Source:
    """The file on the web server."""

    location: HttpLocation
    credentials: Credentials | None
    client: HttpClient

    def identity(self, answer: HttpResponse) -> str:
        """A strong ETag of one URL always means the same bytes (RFC 9110 8.8.1). "" for a weak ETag or a date, which do not."""
        tag, length = answer.headers.get("ETag", ""), resumed.whole_length(answer)
        if not tag.startswith('"') or length is None:
            return ""
        return f"{self.location.url} {redacted_url(answer.url)} {tag} {length}"

    def rest(self, identity: str, tag: str, at: int, end: int | None = None) -> HttpResponse:
        """The file from byte `at` on. Raises Unavailable if the file has changed."""
        ask = functools.partial(self.ask, {**resumed.rest_range(at, end), "If-Range": tag})
        # Nobody waits for a busy server because of a part: one connection can do without.
        answer = answered(ask, self.client.watch) if end is None else ask()
        try:
            if self.identity(answer) != identity:
                raise Unavailable(f"{redacted_url(self.location.url)} has changed while it was downloaded; try again")
            return resumed.from_byte(answer, at, end)
        except ShimError:
            answer.close()
            raise

    def ask(self, headers: Mapping[str, str]) -> HttpResponse:
        """The file, or the requested part of it. Raises Busy if the server wants to be asked later."""
        answer = self._get(headers)
        try:
            if answer.status != 200 and (answer.status != 206 or "Range" not in headers):
                raise _refusal(self.location, answer)
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise InvalidRequest(
                    f"{redacted_url(self.location.url)} is sent encoded ({encoding[:40]}); serve the plain disk file"
                )
        except ShimError:
            answer.close()
            raise
        return answer

    def _get(self, headers: Mapping[str, str]) -> HttpResponse:
        """Asks without credentials first. Sends a password only to the host in the image's name, and never unencrypted."""
        url = self.location.url
        answer, parts = self.client.get(url, headers), urlsplit(url)
        if answer.status != 401 or answer.url != url or not meant_for(self.credentials, parts.netloc):
            return answer
        with answer:
            login = basic_login(self.credentials)
            if parts.scheme != "https" and not is_loopback(parts.netloc):
                raise PermissionRefused(
                    f"{redacted_url(url)} wants a password, which is sent over https only; use https"
                )
        return self.client.get(url, {**headers, "Authorization": f"Basic {login}"} if login else headers)


def _check_digest(location: HttpLocation, digest: ImageDigest) -> None:
    wanted = location.name.digest
    if wanted is not None and str(digest) != wanted:
        raise InvalidRequest(
            f"image {str(location.name)!r}: the file's digest is {digest}, expected {wanted}; "
            "the file has changed or was tampered with"
        )


def _refusal(location: HttpLocation, answer: HttpResponse) -> ShimError:
    where = f"image {location.name.name!r}: {redacted_url(answer.url)}"
    if answer.status in (404, 410):
        return NotFound(f"{where} does not exist (HTTP {answer.status}); check the name and its translation rule")
    if answer.status in (401, 403, 407):
        return PermissionRefused(
            f"{where} is refused (HTTP {answer.status}); check the pod's image pull secrets and the file's permissions"
        )
    return refusal(f"{where} answers HTTP {answer.status} where 200 is expected", retry_after(answer))
