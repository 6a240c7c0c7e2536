"""What a request has to be before anything is done for it, and what every answer says to the browser.

Whoever can run a program on the node, or show the operator a web page, can send requests here. So: the name in Host is that of
this run, which nobody can guess, Origin is this very page, and the session's cookie is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from virtshim.dashboard.sessions import Sessions

COOKIE: Final = "virtshim-dashboard"

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
    if not sessions.knows(request.cookies.get(COOKIE, "")):
        return _plain(
            401,
            "no session: open the address that `virtshim dashboard` printed; each is good once, and Enter in its terminal "
            "prints another",
        )
    return None


def middleware(sessions: Sessions, name: str, login: str) -> Middleware:
    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        return refusal(request, sessions, name, login) or await handler(request)

    return guarded


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["Server"] = "virtshim"


def _plain(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")
