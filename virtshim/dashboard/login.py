"""The login of the dashboard: sessions, the checks of every request, and the security headers of every answer.

Any local user, and any web page that the operator opens, can send requests to the dashboard. Therefore a request is served only
if Host is the name of this run, which nobody can guess, Origin is this page, and the session's cookie is present.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

# Sessions: a token that works once, and the sessions that tokens were exchanged for. They exist only in memory.
#
# Only digests are kept and compared, so that response times do not reveal the secret.

# Most sessions at the same time. One more ends the oldest session.
_SESSIONS: Final = 16
_BYTES: Final = 32
# No secret is longer. A longer one is refused without a digest.
_LONGEST: Final = 128


class Sessions:
    def __init__(self) -> None:
        self._token: bytes | None = None
        self._known: dict[bytes, None] = {}

    def new_token(self) -> str:
        """A new token. An unused earlier token becomes void."""
        token = secrets.token_urlsafe(_BYTES)
        self._token = _digest(token)
        return token

    def exchange(self, token: str) -> str | None:
        """Returns the secret of a new session; None if the token is wrong or was used."""
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
    """The digest of any header value. Bytes that are not UTF-8 arrive as surrogates."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


LOGIN_COOKIE: Final = "virtshim-dashboard"

# Scripts come only from the dashboard's files. Styles may be inline, because the terminal sets the size of its letters by script.
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
    """Whether a Host header has this name, on any port: an SSH tunnel may use another one."""
    called, colon, port = host.partition(":")
    return called == name and (not colon or port.isdecimal())


def refusal(request: web.Request, sessions: Sessions, name: str, login: str) -> web.Response | None:
    """The answer that refuses the request; None if the request is allowed. `name`: the page's host. `login`: the only path that
    is allowed without a session."""
    host = request.headers.get("Host", "")
    if not is_called(host, name):
        return _plain(421, "wrong host name; open the URL that `virtshim dashboard` printed")
    origin = request.headers.get("Origin")
    upgrades = "upgrade" in request.headers.get("Connection", "").lower()
    if origin is None and (upgrades or request.method not in ("GET", "HEAD")):
        return _plain(403, "a request that changes something needs an Origin header")
    if origin is not None and origin != f"http://{host}":
        return _plain(403, "requests from pages of other sites are refused")
    if request.path == login:
        return None
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return _plain(403, "requests from pages of other sites are refused")
    if not sessions.knows(request.cookies.get(LOGIN_COOKIE, "")):
        return _plain(
            401,
            "no session; open the URL that `virtshim dashboard` printed. Each URL works once, and Enter in its terminal "
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
