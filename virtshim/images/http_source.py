"""Disk images that are plain files on a web server."""

from __future__ import annotations

from urllib.parse import urlsplit

from virtshim.domain.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.domain.image import Credentials
from virtshim.images.credentials import basic_login, meant_for
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.http_client import Answer, HttpClient, shown
from virtshim.images.names import HttpLocation, is_loopback


def download(location: HttpLocation, credentials: Credentials | None, client: HttpClient, disk: DiskWriter) -> None:
    """Streams the file into `disk`. A digest in the name must be the file's. The client carries the location's transport."""
    with _get(location, credentials, client) as answer:
        if answer.status != 200:
            raise _refusal(location, answer)
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequest(
                f"{shown(location.url)} is sent in an encoding nobody asked for ({answer.headers['Content-Encoding'][:40]}); "
                "serve the plain disk file"
            )
        announced = answer.length()
        if announced is not None:
            disk.expect(announced)
        while chunk := answer.read():
            disk.write(chunk)
    if announced is not None and disk.size != announced:
        raise Unavailable(f"{shown(location.url)} broke off after {disk.size} of {announced} bytes; try again")
    wanted = location.name.digest
    if wanted is not None and str(disk.digest()) != wanted:
        raise InvalidRequest(
            f"image {str(location.name)!r}: the file's digest is {disk.digest()}, wanted is {wanted}; "
            "the file has changed or was tampered with"
        )


def _get(location: HttpLocation, credentials: Credentials | None, client: HttpClient) -> Answer:
    """Asks without credentials first; a password goes only to the host that was named, and never in the clear."""
    answer = client.get(location.url, {})
    parts = urlsplit(location.url)
    login = basic_login(credentials) if meant_for(credentials, parts.netloc) else ""
    if answer.status != 401 or not login or answer.url != location.url:
        return answer
    with answer:
        if parts.scheme != "https" and not is_loopback(parts.netloc):
            raise PermissionRefused(f"{shown(location.url)} wants a password, which is sent over https only; use https")
    return client.get(location.url, {"Authorization": f"Basic {login}"})


def _refusal(location: HttpLocation, answer: Answer) -> ShimError:
    where = f"image {location.name.name!r}: {shown(answer.url)}"
    if answer.status in (404, 410):
        return NotFound(f"{where} does not exist (HTTP {answer.status}); check the name and its translation rule")
    if answer.status in (401, 403, 407):
        return PermissionRefused(
            f"{where} is refused (HTTP {answer.status}); check the pod's image pull secrets and the file's permissions"
        )
    return Unavailable(f"{where} answers HTTP {answer.status} where 200 is expected; try again later")
