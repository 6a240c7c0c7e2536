"""Requests to one host of an OCI registry, and the three ways to log in.

The library oras is not used: it does not verify digests, has no timeouts, follows redirects from https to http, cannot be
cancelled, sleeps between retries, and falls back to the login files of its user.
https://github.com/opencontainers/distribution-spec, https://distribution.github.io/distribution/spec/auth/
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Container, Mapping
from urllib.parse import quote, urlencode, urlsplit

from virtshim.images.downloads.resumed import refusal, retry_after
from virtshim.images.http_client import HttpClient, HttpResponse
from virtshim.images.names import DEFAULT_REGISTRY_HOSTS, RegistryLocation, host_of, is_loopback
from virtshim.images.registries.hosts_toml import RegistryHost
from virtshim.model.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.model.image import Credentials

# kubelet's credentials, as HTTP headers. Pure. No credential may reach a log or an error text.


def basic_login(credentials: Credentials | None) -> str:
    """base64 of `user:password`, "" if there is none. Raises InvalidRequest for a malformed `auth`."""
    if credentials is None:
        return ""
    if credentials.username or credentials.password:
        return base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
    if not credentials.auth:
        return ""
    try:
        # Docker's own decoder also removes NUL padding.
        login = base64.b64decode(credentials.auth, validate=True).rstrip(b"\0")
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest("the credentials' auth field is not base64; correct the image pull secret") from exc
    if b":" not in login:
        raise InvalidRequest("the credentials' auth field is not user:password; correct the image pull secret")
    return base64.b64encode(login).decode()


def meant_for(credentials: Credentials | None, authority: str) -> bool:
    """Whether these credentials may be sent to `host[:port]`: they name this server, or none."""
    if credentials is None:
        return False
    server = credentials.server_address.partition("://")[2] or credentials.server_address
    server = server.partition("/")[0]
    if not server:
        return True
    if {host_of(server), host_of(authority)} <= DEFAULT_REGISTRY_HOSTS:
        return True
    has_port = ":" in server.rpartition("]")[2]
    return host_of(server) == host_of(authority) and (not has_port or server == authority)


_MAX_TOKEN_BYTES = 1 << 20
_ABSENT = frozenset({404})
# Hostile registries may send headers of megabytes. The lookbehind keeps the search linear: a name is never retried from its
# middle.
_MAX_CHALLENGE = 4096
_PARAMETER = re.compile(r'(?<!\w)(\w+)="([^"]*)"')


class Endpoint:
    """One host that serves one repository, for one pull. `insecure`: the `host[:port]` that may be used without TLS, besides
    loopback. `root`: the repository's URL on that host, without the query."""

    def __init__(
        self,
        location: RegistryLocation,
        host: RegistryHost,
        credentials: Credentials | None,
        client: HttpClient,
        insecure: tuple[str, ...],
    ) -> None:
        self._location = location
        self._host = host
        self._insecure = insecure
        self._authority = urlsplit(host.url).netloc if host.url else location.api
        self._credentials = credentials if meant_for(credentials, self._authority) else None
        self._withheld = credentials is not None and self._credentials is None
        self._client = client
        own = f"{'http' if self._may_be_plain(location.api) else 'https'}://{location.api}/v2"
        self.root = f"{host.url or own}/{location.repository}"
        # A mirror of several registries must know which one is meant.
        self._query = "" if self._authority in (location.api, location.registry) else f"?ns={quote(location.registry)}"
        self._authorization = ""

    @property
    def is_mirror(self) -> bool:
        return bool(self._query)

    def may(self, capability: str) -> bool:
        return capability in self._host.may

    def get(self, path: str, headers: Mapping[str, str], absent: Container[int] = _ABSENT) -> HttpResponse:
        """Requests a path of the repository. Logs in when challenged, once per request, because a token may expire in a long
        pull. Raises NotFound for the statuses `absent`, Busy if the host wants to be asked later."""
        url = f"{self.root}/{path}{self._query}"
        answer = self._asked(url, headers)
        if answer.status != 200 and (answer.status != 206 or "Range" not in headers):
            with answer:
                if answer.status in absent:
                    raise self._refusal(404)
                raise self._refusal(answer.status, retry_after(answer))
        return answer

    def _asked(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        answer = self._client.get(url, self._with_login(headers))
        if answer.status == 401 and answer.url == url:
            with answer:
                self._log_in(answer.headers.get("WWW-Authenticate", ""))
            answer = self._client.get(url, self._with_login(headers))
        return answer

    def _with_login(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {
            **self._host.headers,
            **headers,
            **({"Authorization": self._authorization} if self._authorization else {}),
        }

    def _log_in(self, challenge: str) -> None:
        """Answers the registry's challenge. If it offers several ways, prefers a token to the password."""
        if len(challenge) > _MAX_CHALLENGE:
            raise PermissionRefused(
                f"registry {self._location.registry} answers with a login challenge of {len(challenge)} characters, where at "
                f"most {_MAX_CHALLENGE} are expected; correct the registry"
            )
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
        """The password is sent to the realm, so it must use TLS, unless the operator trusts that host without TLS."""
        try:
            parts = urlsplit(realm)
            usable = bool(parts.hostname) and parts.username is None and parts.port != 0
        except ValueError:
            usable = False
        else:
            usable = usable and (
                parts.scheme == "https"
                or (parts.scheme == "http" and self.root.startswith("http://") and self._may_be_plain(parts.netloc))
            )
        if not usable:
            raise PermissionRefused(
                f"registry {self._location.registry} sends logins to a URL that is not https; if that is intended, list its "
                "host in images.insecure_registries"
            )

    def _may_be_plain(self, authority: str) -> bool:
        """Whether the host may be used without TLS. A hosts.toml allows it with an http:// URL."""
        if self._host.url.startswith("http://") and authority == self._authority:
            return True
        return authority in self._insecure or (is_loopback(authority) and not authority.endswith(":443"))

    def _refusal(self, status: int, seconds: int | None = None) -> ShimError:
        image = f"image {str(self._location.name)!r}: registry {self._location.registry}"
        if self.is_mirror:
            image += f", asked at {self._authority},"
        if status == 404:
            return NotFound(f"{image} does not have it; check the name and the tag")
        if status in (401, 403):
            if self._withheld:
                return PermissionRefused(f"{image} wants a login, but the given one is for another server")
            if self._credentials is None:
                return PermissionRefused(
                    f"{image} wants a login (or has no such repository); give the pod an image pull secret"
                )
            return PermissionRefused(f"{image} refuses the given login; check the pod's image pull secret")
        if status == 429:
            return refusal(f"{image} limits the rate of pulls (HTTP 429)", seconds)
        return refusal(f"{image} answers HTTP {status}", seconds)
