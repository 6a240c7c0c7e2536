"""An OCI registry's pull side: manifests, blobs, and the three ways to log in.

Plain HTTP calls rather than oras: that verifies no digest of what it downloads, has no timeouts, follows redirects from
https to http, cannot be cancelled, retries with sleeps, and falls back to the login files of the user that runs it.
https://github.com/opencontainers/distribution-spec, https://distribution.github.io/distribution/spec/auth/
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from virtshim.domain.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.domain.image import Credentials
from virtshim.images.blob_digest import verified
from virtshim.images.credentials import basic_login, meant_for
from virtshim.images.downloads import resumed
from virtshim.images.downloads.partials import also_written, kept
from virtshim.images.http_client import HttpClient, HttpResponse
from virtshim.images.names import RegistryLocation, is_loopback
from virtshim.images.oci_manifest import MAX_MANIFEST_BYTES, MEDIA_TYPES, Descriptor

_MAX_TOKEN_BYTES = 1 << 20
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class Registry:
    """One repository, for one pull. `insecure` are the `host[:port]` that are spoken to without TLS, besides loopback."""

    def __init__(
        self, location: RegistryLocation, credentials: Credentials | None, client: HttpClient, insecure: tuple[str, ...]
    ) -> None:
        self._location = location
        self._credentials = credentials if meant_for(credentials, location.api) else None
        self._withheld = credentials is not None and self._credentials is None
        self._client = client
        self._insecure = insecure
        scheme = "http" if self._may_be_plain(location.api) else "https"
        self._root = f"{scheme}://{location.api}/v2/{location.repository}"
        self._authorization = ""

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """The manifest or index for a tag or digest, and its digest; verified if `reference` is one."""
        what = f"manifest of {self._location.name}"
        with self._get(f"{self._root}/manifests/{reference}", {"Accept": ", ".join(MEDIA_TYPES)}) as answer:
            body = answer.all(MAX_MANIFEST_BYTES)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if ":" in reference and reference != digest:
            raise InvalidRequest(f"the {what} has the digest {digest}, expected {reference}; the registry is damaged")
        return body, digest

    def config(self, descriptor: Descriptor) -> bytes:
        """A small blob, verified."""
        if descriptor.size > MAX_MANIFEST_BYTES:
            raise InvalidRequest(
                f"image {self._location.name.name!r} has a config of more than {MAX_MANIFEST_BYTES} bytes"
            )
        return b"".join(self.blob(descriptor))

    def blob(self, descriptor: Descriptor, part: Path | None = None) -> Generator[bytes, None, None]:
        """A blob as it comes in; raises at its end if it is not what the descriptor says. `part` has its first bytes and gets the
        others: the next pull goes on there if this one breaks off."""
        what = f"blob {descriptor.digest} of image {self._location.name.name!r}"
        yield from verified(self._chunks(descriptor, part), descriptor.digest, descriptor.size, what)

    def identity(self, descriptor: Descriptor) -> str:
        """Of a blob that was given to whoever may read this repository."""
        return f"{self._location.registry}/{self._location.repository} {descriptor.digest}"

    def _chunks(self, descriptor: Descriptor, part: Path | None) -> Iterator[bytes]:
        rest, at = functools.partial(self._rest, descriptor), 0
        if part is None:
            yield from resumed.body(None, 0, rest, self._client.watch)
            return
        for chunk in kept(part):
            at += len(chunk)
            self._client.watch.progressed()
            yield chunk
        if at < descriptor.size:
            yield from also_written(resumed.body(None, at, rest, self._client.watch), part)

    def _rest(self, descriptor: Descriptor, at: int) -> HttpResponse:
        url = f"{self._root}/blobs/{descriptor.digest}"
        return resumed.from_byte(self._get(url, resumed.rest_range(at)), at)

    def _get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Asks; when challenged logs in, once a request: a token may run out during a long pull."""
        answer = self._client.get(url, self._with_login(headers))
        if answer.status == 401 and answer.url == url:
            with answer:
                self._log_in(answer.headers.get("WWW-Authenticate", ""))
            answer = self._client.get(url, self._with_login(headers))
        if answer.status != 200 and (answer.status != 206 or "Range" not in headers):
            with answer:
                raise self._refusal(answer.status)
        return answer

    def _with_login(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {**headers, **({"Authorization": self._authorization} if self._authorization else {})}

    def _log_in(self, challenge: str) -> None:
        """Answers the registry's challenge, which may offer several ways: a token is preferred to the password."""
        lowered = challenge.lower()
        if "bearer " in lowered:
            start = lowered.index("bearer ")
            self._authorization = f"Bearer {self._token(dict(_PARAMETER.findall(challenge[start:])))}"
        elif "basic" in lowered and (login := basic_login(self._credentials)):
            self._authorization = f"Basic {login}"
        else:
            raise self._refusal(401)

    def _token(self, challenge: Mapping[str, str]) -> str:
        credentials = self._credentials
        if credentials is not None and credentials.registry_token:
            return credentials.registry_token
        realm = challenge.get("realm", "")
        self._check_realm(realm)
        asked = {
            "service": challenge.get("service", ""),
            "scope": challenge.get("scope") or f"repository:{self._location.repository}:pull",
        }
        if credentials is not None and credentials.identity_token:
            form = {
                **asked,
                "grant_type": "refresh_token",
                "client_id": "virtshim",
                "refresh_token": credentials.identity_token,
            }
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = self._client.request("POST", realm, headers, urlencode(form).encode())
        else:
            login = basic_login(credentials)
            separator = "&" if "?" in realm else "?"
            url = f"{realm}{separator}{urlencode(asked)}"
            answer = self._client.request("GET", url, {"Authorization": f"Basic {login}"} if login else {})
        with answer:
            if answer.status != 200:
                raise self._refusal(401 if answer.status in (400, 401, 403) else answer.status)
            return self._token_in(answer.all(_MAX_TOKEN_BYTES))

    def _token_in(self, body: bytes) -> str:
        try:
            document = json.loads(body)
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise Unavailable(
                f"registry {self._location.registry}: its login service answers without a token; try again later"
            )
        return token

    def _check_realm(self, realm: str) -> None:
        """The password goes there: it must be TLS, unless the operator trusts that host without."""
        try:
            parts = urlsplit(realm)
            usable = bool(parts.hostname) and parts.username is None and parts.port != 0
        except ValueError:
            usable = False
        else:
            usable = usable and (
                parts.scheme == "https"
                or (parts.scheme == "http" and self._root.startswith("http://") and self._may_be_plain(parts.netloc))
            )
        if not usable:
            raise PermissionRefused(
                f"registry {self._location.registry} sends logins to a place that is not https; list that host in "
                "images.insecure_registries if this is meant"
            )

    def _may_be_plain(self, authority: str) -> bool:
        return authority in self._insecure or (is_loopback(authority) and not authority.endswith(":443"))

    def _refusal(self, status: int) -> ShimError:
        image = f"image {str(self._location.name)!r}: registry {self._location.registry}"
        if status == 404:
            return NotFound(f"{image} does not have it; check the name and the tag")
        if status in (401, 403):
            if self._withheld:
                return PermissionRefused(f"{image} wants a login, and the one given is for another server")
            if self._credentials is None:
                return PermissionRefused(
                    f"{image} wants a login (or has no such repository); give the pod an image pull secret"
                )
            return PermissionRefused(f"{image} refuses the login given; check the pod's image pull secret")
        if status == 429:
            return Unavailable(f"{image} limits the rate of pulls (HTTP 429); try again later")
        return Unavailable(f"{image} answers HTTP {status}; try again later")
