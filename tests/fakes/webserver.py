"""A web server on loopback that each test scripts."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# The value of `images.insecure_registries` of a node that uses this server.
LOOPBACK = ("127.0.0.1", "localhost")

Route = Callable[[http.server.BaseHTTPRequestHandler], None]


class WebServer(http.server.ThreadingHTTPServer):
    """`routes` by path without query. `hang` blocks a route that must not answer; it is set at the end of the test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes: dict[str, Route] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.over = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def url(self, path: str) -> str:
        return f"http://{self.address}{path}"

    def serve(self, path: str, body: bytes, **headers: str) -> str:
        """Serves a plain file."""

        def route(request: http.server.BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                request.send_header(name.replace("_", "-"), value)
            request.end_headers()
            request.wfile.write(body)

        self.routes[path] = route
        return self.url(path)

    def serve_parts(self, path: str, body: bytes, cuts: Iterable[int] = (), etag: str = '"1"') -> str:
        """Serves a file with Range and If-Range. The first answers break off after the given numbers of bytes."""
        left = list(cuts)

        def route(request: http.server.BaseHTTPRequestHandler) -> None:
            wanted = request.headers.get("Range", "")
            is_part = bool(wanted) and request.headers.get("If-Range", etag) == etag
            asked, _, last = wanted.removeprefix("bytes=").partition("-")
            first, behind = int(asked) if is_part else 0, int(last) + 1 if is_part and last else len(body)
            request.send_response(206 if is_part else 200)
            if is_part:
                request.send_header("Content-Range", f"bytes {first}-{behind - 1}/{len(body)}")
            request.send_header("Content-Length", str(behind - first))
            request.send_header("ETag", etag)
            request.end_headers()
            end = min(behind, first + left.pop(0)) if left else behind
            request.wfile.write(body[first:end])
            request.close_connection = end < behind

        self.routes[path] = route
        return self.url(path)

    def ranges(self, path: str) -> list[str]:
        """The Range headers of the requests for that path, "" for the whole file."""
        return [headers.get("Range", "") for asked, headers in self.seen if asked == path]

    def answer(self, path: str, status: int, body: bytes = b"", **headers: str) -> str:
        def route(request: http.server.BaseHTTPRequestHandler) -> None:
            request.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                request.send_header(name.replace("_", "-"), value)
            request.end_headers()
            request.wfile.write(body)

        self.routes[path] = route
        return self.url(path)

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors, because some tests are about clients that leave."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def handle_any(self) -> None:
        path = self.path.partition("?")[0]
        self.server.seen.append((self.path, dict(self.headers)))
        route = self.server.routes.get(path)
        if route is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            route(self)

    do_GET = do_POST = handle_any  # noqa: N815 - the base class looks for these names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def serving() -> Iterator[WebServer]:
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
