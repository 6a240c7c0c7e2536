"""HTTP for one pull: every wait can be cancelled, redirects never leave TLS, and secrets never reach an error text.

It uses urllib3 instead of requests for three reasons: urllib3 trusts the system's CAs, so an operator's own CA works; it does not
read ~/.netrc; and this module can make the connections, so that a pull can be cancelled while it connects.
"""

from __future__ import annotations

import functools
import http.client
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError
from urllib3.exceptions import SSLError as TlsError

from virtshim.images.connect import ForbiddenNetworks, dial, refuse_forbidden
from virtshim.images.names import is_loopback
from virtshim.images.pull_watch import PullWatch
from virtshim.images.translations import TlsProfile, Transport
from virtshim.model.errors import InvalidRequest, ShimError, Unavailable


class Pace:
    """Judges whether a source sends fast enough: `least` bytes per second in each `window` seconds of waiting. Time spent on
    processing the bytes does not count. Pure."""

    def __init__(self, least: float, window: float) -> None:
        self._least = least
        self._window = window
        self._waited = 0.0
        self._came = 0

    def is_kept(self, count: int, waited: float) -> bool:
        """Whether the source is fast enough after `count` more bytes, which took `waited` seconds of waiting."""
        self._waited += waited
        self._came += count
        if self._waited < self._window:
            return True
        is_kept = self._came >= self._least * self._waited
        self._waited, self._came = 0.0, 0
        return is_kept


CONNECT_TIMEOUT = 10.0
CHUNK = 1 << 18
# Digits of a byte count that fits in 63 bits.
_MOST_DIGITS = 18

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS_FOR_ALL_HOSTS = frozenset({"Accept", "Range", "If-Range"})
_BROKEN = (HTTPError, http.client.HTTPException, OSError, ValueError)


def redacted_url(url: str) -> str:
    """The URL without secrets: its query may have a signature, its user information a password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:300]


def byte_count(text: str) -> int | None:
    """A byte count or position from a header. None if it is not a number or is impossibly large."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


class HttpResponse:
    """A context manager. On exit, closes the connection if the body was not read to its end."""

    def __init__(self, url: str, response: urllib3.BaseHTTPResponse, watch: PullWatch) -> None:
        self.url = url
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._watch = watch
        self._pace = Pace(watch.min_rate, watch.progress_timeout)
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Reads no more. A connection with unread data is closed."""
        self.is_closed = True
        connection: object = self._response.connection
        self._response.close()
        if isinstance(connection, _Endable):
            connection.release()

    def length(self) -> int | None:
        """The body's length as announced; None if the server does not say. Raises Unavailable for an impossible length."""
        text = self.headers.get("Content-Length", "")
        found = byte_count(text)
        if found is None and text.isascii() and text.isdigit():
            raise Unavailable(
                f"{redacted_url(self.url)} announces a length of {len(text)} digits, which no file has; correct the server"
            )
        return found

    def read(self, limit: int = CHUNK) -> bytes:
        """The next bytes as sent, b"" at the end. Raises Unavailable for a body that is shorter than announced, or too slow."""
        began = time.monotonic()
        try:
            chunk = self._response.read1(limit, decode_content=False)
        except _BROKEN as exc:
            self._watch.check()
            raise Unavailable(
                f"download from {redacted_url(self.url)} broke off ({type(exc).__name__}); try again"
            ) from exc
        self._watch.progressed(len(chunk))
        if not self._pace.is_kept(len(chunk), time.monotonic() - began):
            raise Unavailable(
                f"download from {redacted_url(self.url)} was slower than {self._watch.min_rate} bytes a second "
                f"(images.min_rate) for {self._watch.progress_timeout:g} s; try again"
            )
        return chunk

    def skip(self, count: int) -> bool:
        """Reads and drops `count` bytes that an earlier response already delivered. Returns whether they came."""
        while count > 0 and (chunk := self.read(min(count, CHUNK))):
            count -= len(chunk)
            self._watch.had(len(chunk))
        return count <= 0

    def all(self, limit: int) -> bytes:
        """The whole body. Raises InvalidRequest if it is longer than `limit` bytes."""
        body = bytearray()
        while chunk := self.read():
            body += chunk
            if len(body) > limit:
                raise InvalidRequest(
                    f"{redacted_url(self.url)} answers with more than {limit} bytes where few are expected"
                )
        return bytes(body)


class HttpClient:
    """One pull's connections, kept alive between requests. A context manager. Each thread has its own connections, because the
    watch ends connections by thread."""

    def __init__(self, watch: PullWatch, transport: Transport, forbidden: ForbiddenNetworks) -> None:
        self.watch = watch
        self._transport = transport
        self._forbidden = forbidden
        # The watch ends waits for data. This timeout is only a safeguard.
        connect = transport.connect_timeout or CONNECT_TIMEOUT
        self._timeout = urllib3.Timeout(connect=connect, read=watch.progress_timeout + CONNECT_TIMEOUT)
        self._pools: dict[tuple[int, bool, str], urllib3.PoolManager] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.clear()

    def get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """GET that follows redirects. Only Accept and range headers are sent to other hosts than the first. Raises Unavailable
        (cannot be reached, breaks off) and InvalidRequest (a redirect from https to http or to no http(s) URL, too many
        redirects). The caller must check the status."""
        first, wanted = url, dict(headers)
        for _ in range(self._transport.max_redirects + 1):
            answer = self.request("GET", url, wanted)
            if answer.status not in _REDIRECTS or "Location" not in answer.headers:
                return answer
            with answer:
                url = _next_url(url, answer.headers["Location"])
            if _origin(url) != _origin(first):
                wanted = {name: value for name, value in wanted.items() if name in _HEADERS_FOR_ALL_HOSTS}
        raise InvalidRequest(f"{redacted_url(first)} redirects more than {self._transport.max_redirects} times")

    def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None) -> HttpResponse:
        """Sends one request. Follows no redirect."""
        self.watch.check()
        try:
            response = self._pool(url).request(
                method,
                url,
                body=body,
                headers={"Accept-Encoding": "identity", "User-Agent": "virtshim", **headers},
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=self._timeout,
            )
        except TlsError as exc:
            self.watch.check()
            if _speaks_plain_http(exc):
                raise Unavailable(
                    f"{_host(url)}: TLS failed, because the server speaks plain HTTP; if you trust the network, write http:// "
                    "before the name of a disk, or list the registry in images.insecure_registries"
                ) from exc
            raise Unavailable(
                f"{_host(url)}: TLS failed ({_reason(exc)}); a private CA must be in this node's trust store"
            ) from exc
        except _BROKEN as exc:
            self.watch.check()
            raise Unavailable(
                f"{_host(url)} cannot be reached ({_reason(exc)}); check the name and the network"
            ) from exc
        try:
            self.watch.progressed()
        except ShimError:
            response.close()
            raise
        return HttpResponse(url, response, self.watch)

    def _pool(self, url: str) -> urllib3.PoolManager:
        """One pool per thread, proxy and scheme. Plain HTTP makes no TLS context, because loading the system's CAs takes time."""
        proxy = self._transport.proxy or _environment_proxy(url)
        if proxy:  # the proxy connects to the host; the proxy itself is the operator's choice, so always allowed
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            refuse_forbidden(parts.hostname or "", port, CONNECT_TIMEOUT, self.watch, self._forbidden)
        tls = url.startswith("https://") or proxy.startswith("https://")
        key = (threading.get_ident(), tls, proxy)
        if key not in self._pools:
            options: dict[str, Any] = {"num_pools": 8, "maxsize": 8}
            if tls:
                options["ssl_context"] = self._tls
                if self._transport.tls.server_name:
                    options["server_hostname"] = self._transport.tls.server_name
            self._pools[key] = _guarded(_pool_for(proxy, options), self.watch, None if proxy else self._forbidden)
        return self._pools[key]

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return tls_context(self._transport.tls)


def tls_context(profile: TlsProfile) -> ssl.SSLContext:
    """Trusts the profile's CAs; also the system's if the profile has none or asks for both. Raises InvalidRequest for bad PEM."""
    try:
        context = ssl.create_default_context(cadata="\n".join(profile.cas) or None)
        if profile.beside_system:
            context.load_default_certs()
        if profile.client:
            # The ssl module takes files only, so these are files in memory.
            certificate, key = (_memory_file(text) for text in profile.client)
            try:
                context.load_cert_chain(f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}", password=_no_password)
            finally:
                os.close(certificate)
                os.close(key)
    except (ssl.SSLError, OSError, ValueError) as exc:
        raise InvalidRequest(
            "a certificate or key in the image's transport is not usable PEM; correct its file"
        ) from exc
    if profile.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Endable:
    """A connection that the watch can end."""

    _watch: PullWatch
    _guarded: socket.socket | None = None

    def guard(self, watch: PullWatch, connected: socket.socket) -> None:
        self.release()
        self._watch, self._guarded = watch, watch.guard(connected)

    def release(self) -> None:
        if self._guarded is not None:
            self._watch.release(self._guarded)


def _guarded(
    manager: urllib3.PoolManager, watch: PullWatch, forbidden: ForbiddenNetworks | None
) -> urllib3.PoolManager:
    """Makes the manager's connections with `dial`, by overriding `_new_conn`, as urllib3's own SOCKS support does."""

    def new_connection(connection: Plain | Secure) -> socket.socket:
        timeout = connection.timeout
        seconds = timeout if isinstance(timeout, (int, float)) else CONNECT_TIMEOUT
        host, port = connection.host.strip("[]"), connection.port or connection.default_port
        connected = dial(host, port, seconds, watch, forbidden)
        try:
            connection.guard(watch, connected)
        except ShimError:
            connected.close()
            raise
        connected.settimeout(seconds)
        return connected

    class Plain(_Endable, HTTPConnection):
        def _new_conn(self) -> socket.socket:
            return new_connection(self)

    class Secure(_Endable, HTTPSConnection):
        def _new_conn(self) -> socket.socket:
            return new_connection(self)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

        def _validate_conn(self, conn: Any) -> None:
            """As in urllib3, but without its warning about unverified certificates, which the operator asked for."""
            if conn.is_closed:
                conn.connect()

    manager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}
    return manager


def _pool_for(proxy: str, options: dict[str, Any]) -> urllib3.PoolManager:
    if not proxy:
        return urllib3.PoolManager(**options)
    parts = urlsplit(proxy)
    headers = None
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = urllib3.make_headers(proxy_basic_auth=login)
    return urllib3.ProxyManager(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", proxy_headers=headers, **options)


def _environment_proxy(url: str) -> str:
    """The proxy from http_proxy, https_proxy and no_proxy, as curl reads them. "" for loopback addresses."""
    parts = urlsplit(url)
    proxies = urllib.request.getproxies_environment()
    proxy = proxies.get(parts.scheme, proxies.get("all", ""))
    if not proxy or is_loopback(parts.netloc) or urllib.request.proxy_bypass(parts.netloc):
        return ""
    if "://" not in proxy:
        return f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise InvalidRequest(
            "the proxy in this daemon's environment is not http:// or https://; others are not supported"
        )
    return proxy


def _next_url(url: str, location: str) -> str:
    following = ""
    try:
        following = urljoin(url, location)
        parts = urlsplit(following)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(f"{redacted_url(url)} redirects to something that is not an http(s) URL")
    if url.startswith("https://") and not following.startswith("https://"):
        raise InvalidRequest(
            f"{redacted_url(url)} redirects from https to http ({redacted_url(following)}), which is refused"
        )
    return following


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _speaks_plain_http(exc: BaseException | None) -> bool:
    """OpenSSL's reason for an answer that is no TLS record at all; its name depends on the version."""
    while exc is not None:
        if isinstance(exc, ssl.SSLError) and exc.reason in (
            "WRONG_VERSION_NUMBER",
            "HTTP_REQUEST",
            "RECORD_LAYER_FAILURE",
        ):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def _reason(exc: BaseException) -> str:
    """The system's text of the innermost cause. urllib3's own texts contain the URL, so they are not used."""
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, ssl.SSLCertVerificationError):
            return inner.verify_message
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        if isinstance(inner, TimeoutError):
            return "timed out"
        inner = inner.__cause__ or inner.__context__
    return type(exc).__name__


def _memory_file(text: str) -> int:
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode())
    return fd


def _no_password() -> str:
    """Without this callback OpenSSL would ask for the password of an encrypted key on the terminal."""
    raise InvalidRequest("a key in the image's transport is encrypted; store it without a passphrase")
