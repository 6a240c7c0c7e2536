"""Disk images that are plain files on a web server."""

from __future__ import annotations

from urllib.parse import urlsplit

from virtshim.domain.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.domain.ids import ImageDigest
from virtshim.domain.image import Credentials
from virtshim.images.credentials import basic_login, meant_for
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.http_client import HttpClient, HttpResponse, redacted_url
from virtshim.images.names import HttpLocation, is_loopback
from virtshim.images.pull_cache import Pulled, StoredDiskLookup


def download(
    location: HttpLocation,
    credentials: Credentials | None,
    client: HttpClient,
    disk: DiskWriter,
    known: StoredDiskLookup,
) -> Pulled:
    """Streams the file into `disk`, unless it is known. A digest in the name must be the file's. The client carries the
    location's transport."""
    with _get(location, credentials, client) as answer:
        if answer.status != 200:
            raise _refusal(location, answer)
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise InvalidRequest(
                f"{redacted_url(location.url)} is sent encoded ({encoding[:40]}); serve the plain disk file"
            )
        identity = _identity(location, answer)
        stored = known(identity) if identity else None
        if stored is not None:
            _check_digest(location, stored)
            return Pulled(identity, stored)
        announced = answer.length()
        if announced is not None:
            disk.expect(announced)
        while chunk := answer.read():
            disk.write(chunk)
    if announced is not None and disk.size != announced:
        raise Unavailable(f"{redacted_url(location.url)} broke off after {disk.size} of {announced} bytes; try again")
    _check_digest(location, disk.digest())
    return Pulled(identity)


def _check_digest(location: HttpLocation, digest: ImageDigest) -> None:
    wanted = location.name.digest
    if wanted is not None and str(digest) != wanted:
        raise InvalidRequest(
            f"image {str(location.name)!r}: the file's digest is {digest}, expected {wanted}; "
            "the file has changed or was tampered with"
        )


def _identity(location: HttpLocation, answer: HttpResponse) -> str:
    """A strong ETag of one URL stands for the same bytes (RFC 9110 8.8.1); a weak one, or a date, does not."""
    tag = answer.headers.get("ETag", "")
    if not tag.startswith('"') or answer.length() is None:
        return ""
    return f"{location.url} {redacted_url(answer.url)} {tag} {answer.length()}"


def _get(location: HttpLocation, credentials: Credentials | None, client: HttpClient) -> HttpResponse:
    """Asks without credentials first; a password goes only to the host that was named, and never in the clear."""
    answer = client.get(location.url, {})
    parts = urlsplit(location.url)
    if answer.status != 401 or answer.url != location.url or not meant_for(credentials, parts.netloc):
        return answer
    with answer:
        login = basic_login(credentials)
        if parts.scheme != "https" and not is_loopback(parts.netloc):
            raise PermissionRefused(
                f"{redacted_url(location.url)} wants a password, which is sent over https only; use https"
            )
    return client.get(location.url, {"Authorization": f"Basic {login}"} if login else {})


def _refusal(location: HttpLocation, answer: HttpResponse) -> ShimError:
    where = f"image {location.name.name!r}: {redacted_url(answer.url)}"
    if answer.status in (404, 410):
        return NotFound(f"{where} does not exist (HTTP {answer.status}); check the name and its translation rule")
    if answer.status in (401, 403, 407):
        return PermissionRefused(
            f"{where} is refused (HTTP {answer.status}); check the pod's image pull secrets and the file's permissions"
        )
    return Unavailable(f"{where} answers HTTP {answer.status} where 200 is expected; try again later")
