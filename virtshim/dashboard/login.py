"""What a request has to be before anything is done for it, and what every answer says to the browser.

Whoever can run a program on the node, or show the operator a web page, can send requests here. So: the name in Host is that of
this run, which nobody can guess, Origin is this very page, and the session's cookie is there.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

# Who may look: a token that is good once, and the sessions that tokens were exchanged for. In memory alone; no I/O.
#
# Only digests are kept, and compared as a whole, so that how long an answer takes tells nothing of the secret.

# Browsers at once. One more ends the oldest session.
_SESSIONS: Final = 16
_BYTES: Final = 32
# What nobody's secret is longer than: a request with more is not worth a digest.
_LONGEST: Final = 128


class Sessions:
    def __init__(self) -> None:
        self._token: bytes | None = None
        self._known: dict[bytes, None] = {}

    def new_token(self) -> str:
        """One that nobody has used becomes void."""
        token = secrets.token_urlsafe(_BYTES)
        self._token = _digest(token)
        return token

    def exchange(self, token: str) -> str | None:
        """A new session's secret; None if the token is not the one, or was used."""
        if self._token is None or len(token) > _LONGEST or not secrets.compare_digest(_digest(token), self._token):
            return None
        self._token = None
        secret = secrets.token_urlsafe(_BYTES)
        self._known[_digest(secret)] = None
        while len(self._known) > _SESSIONS:
            del self._known[next(iter(self._known))]
        return secret

    def knows(self, secret: str) -> bool:
        return len(secret) <= _LONGEST and _digest(secret) in self._known

    def end(self, secret: str) -> None:
        self._known.pop(_digest(secret), None)


def _digest(secret: str) -> bytes:
    """Of anything that a header may hold: bytes that are no UTF-8 come as surrogates."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


LOGIN_COOKIE: Final = "virtshim-dashboard"

# Scripts are files of ours. Styles may also be written by scripts: the terminal measures its letters and sets their size so.
_CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _CSP,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_called(host: str, name: str) -> bool:
    """Of a Host header: on any port, as an SSH tunnel may have another one."""
    called, colon, port = host.partition(":")
    return called == name and (not colon or port.isdecimal())


def refusal(request: web.Request, sessions: Sessions, name: str, login: str) -> web.Response | None:
    """Why nothing is done for it; None if all is well. `name`: the page's host; `login`: the one path that a browser without a
    session may ask for."""
    host = request.headers.get("Host", "")
    if not is_called(host, name):
        return _plain(421, "this is not the name of the dashboard: open the address that `virtshim dashboard` printed")
    origin = request.headers.get("Origin")
    upgrades = "upgrade" in request.headers.get("Connection", "").lower()
    if origin is None and (upgrades or request.method not in ("GET", "HEAD")):
        return _plain(403, "a request that does something needs its Origin")
    if origin is not None and origin != f"http://{host}":
        return _plain(403, "another site's page may ask nothing here")
    if request.path == login:
        return None
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return _plain(403, "another site's page may ask nothing here")
    if not sessions.knows(request.cookies.get(LOGIN_COOKIE, "")):
        return _plain(
            401,
            "no session: open the address that `virtshim dashboard` printed; each is good once, and Enter in its terminal "
            "prints another",
        )
    return None


def login_middleware(sessions: Sessions, name: str, login: str) -> Middleware:
    @web.middleware
    async def with_login(request: web.Request, handler: _Handler) -> web.StreamResponse:
        return refusal(request, sessions, name, login) or await handler(request)

    return with_login


async def add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["Server"] = "virtshim"


def _plain(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")
