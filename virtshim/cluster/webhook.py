"""The webhook for evictions: an HTTPS server, which the API server asks.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import socket
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import structlog

from virtshim.cluster.api import Api, ConflictFound
from virtshim.cluster.evictions import ALLOWED, Answer
from virtshim.cluster.reading import part, parts, text
from virtshim.cluster.serving_certificate import ServingCertificate, serving_certificate, trusted
from virtshim.model.errors import ShimError
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import TroubleLog
from virtshim.system.threads import lasting

log = structlog.get_logger(__name__)

PATH: Final = "/evictions"
# The name of the ValidatingWebhookConfiguration.
CONFIGURATION: Final = "virtshim-evictions"
_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
# Bytes of a question: an eviction is small.
_LONGEST: Final = 1 << 20
# Seconds: for a handshake or a request; that an idle connection is kept; between looks at what the API server trusts.
_REQUEST: Final = 10.0
_LOOK: Final = 60.0
_CONNECTIONS: Final = 64
# Seconds for the thread of a connection that was ended.
_DROPPED: Final = 1.0
_TOO_MANY_REQUESTS: Final = 429


class Evictions(Protocol):
    def __call__(self, namespace: str, name: str, *, dry_run: bool) -> Answer:
        """Raises ShimError if no answer is possible now."""


def review(asked: Mapping[str, Any], evicted: Evictions) -> dict[str, Any]:
    """Answers an AdmissionReview. `kubectl drain` asks again after 429 alone."""
    request = part(asked, "request")
    namespace, name = text(request, "namespace"), text(request, "name")
    if text(request, "subResource") != "eviction" or not name:
        found = ALLOWED  # not what this webhook is for
    else:
        # An eviction can be a dry run by its own options, too.
        options = part(part(request, "object"), "deleteOptions")
        dry_run = request.get("dryRun") is True or bool(options.get("dryRun"))
        try:
            found = evicted(namespace, name, dry_run=dry_run)
        except ShimError as exc:
            found = Answer(allowed=False, message=f"virtshim cannot say now whether this pod may go: {exc}")
    response: dict[str, Any] = {"uid": text(request, "uid"), "allowed": found.allowed}
    if not found.allowed:
        response["status"] = {"code": _TOO_MANY_REQUESTS, "reason": "TooManyRequests", "message": found.message}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer is one packet. Otherwise its body waits for 40 ms, until the API server has said that it has the headers.
    wbufsize = -1
    timeout = _REQUEST
    server: _Server

    def setup(self) -> None:
        # Here, in the connection's own thread: a peer that is slow to shake hands keeps nobody waiting.
        self.request.settimeout(_REQUEST)
        self.request = self.server.tls().wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
        self.server.note_waiting(self.request)
        try:
            self.request.do_handshake()
        except OSError:
            self._leave()
            raise
        super().setup()

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self._leave()

    def _leave(self) -> None:
        self.server.note_not_waiting(self.request)
        self.request.close()  # the server knows only the socket without TLS

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST:
            self.close_connection = True
            self._reply(400, {"message": f"an AdmissionReview has at most {_LONGEST} bytes, and a Content-Length"})
            return
        body = self.rfile.read(int(length))
        self.server.note_not_waiting(self.request)
        try:
            self._answer(body)
        finally:
            self.server.note_waiting(self.request)

    def _answer(self, body: bytes) -> None:
        if self.path.partition("?")[0] != PATH:
            self._reply(404, {"message": f"POST an AdmissionReview to {PATH}"})
            return
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            self._reply(400, {"message": "the body is no JSON"})
            return
        self._reply(200, review(asked if isinstance(asked, dict) else {}, self.server.evicted))

    def _reply(self, status: int, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """The controller logs marks; the rest is the API server's audit log's."""


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Any pod can connect. If there are too many connections, a new one takes the place of the one that has waited longest for
    a request, so that slow peers cannot keep the API server out."""

    daemon_threads = True
    request_queue_size = _CONNECTIONS

    def __init__(self, address: tuple[str, int], evicted: Evictions, tls: Callable[[], ssl.SSLContext]) -> None:
        self.evicted = evicted
        self.tls = tls
        self._room = threading.Semaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        # In order of their last request; a dict keeps the order.
        self._waiting: dict[ssl.SSLSocket, None] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False) or (self._drop_one() and self._room.acquire(timeout=_DROPPED)):
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # the system has no thread
                self._room.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def note_waiting(self, connection: ssl.SSLSocket) -> None:
        """The connection waits for a handshake or a request."""
        with self._lock:
            self._waiting[connection] = None

    def note_not_waiting(self, connection: ssl.SSLSocket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)

    def _drop_one(self) -> bool:
        """Ends the connection that has waited longest; its thread then makes room. False if none waits."""
        with self._lock:
            if (longest := next(iter(self._waiting), None)) is None:
                return False
            del self._waiting[longest]
            # Not SSLSocket.shutdown, which would also drop the TLS state that its thread uses.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(longest, socket.SHUT_RDWR)
        return True

    def handle_error(self, _request: Any, client_address: Any) -> None:
        """A peer that shakes hands badly or goes away is no trouble of ours."""
        log.debug("webhook.connection_failed", peer=str(client_address), error=repr(sys.exception()))


class Webhook:
    """Serves, and keeps the API server's trust in its certificate up to date."""

    def __init__(self, address: tuple[str, int], host: str, evicted: Evictions, api: Api, clock: Clock) -> None:
        """`host`: the name by which the API server calls it. Raises OSError."""
        self._host = host
        self._api = api
        self._clock = clock
        self._certificate: ServingCertificate = serving_certificate(host, clock.now_ns() / 1e9)
        self._server = _Server(address, evicted, lambda: self._certificate.tls)
        self._closing = threading.Event()
        self._failures = TroubleLog(log, over="webhook.trusted_again")

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        lasting(self._server.serve_forever, "webhook")
        lasting(self._keep_trusted, "webhook-trust")
        log.info("webhook.serving", port=self.port, host=self._host)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _keep_trusted(self) -> None:
        while True:
            try:
                self.tell_certificate()
                self._failures.over()
            except OSError as exc:  # OpenSSL reads the key of a new certificate from a file
                remedy = "make room in the directory of temporary files; until then the former certificate serves"
                self._failures.met("webhook.not_renewed", error=str(exc), remedy=remedy)
            except (ShimError, LookupError) as exc:
                remedy = (
                    f"apply the ValidatingWebhookConfiguration {CONFIGURATION}; until then budgets alone protect VMs"
                )
                self._failures.met("webhook.untrusted", error=str(exc), remedy=remedy)
            if self._clock.wait(self._closing, _LOOK):
                return

    def tell_certificate(self) -> None:
        """Writes the certificate into the API server's configuration, and makes a new one in time. Raises ShimError,
        LookupError (the configuration is not there)."""
        now = self._clock.now_ns() / 1e9
        if now > self._certificate.renew_at:
            self._certificate = serving_certificate(self._host, now)
        path = f"{_CONFIGURATIONS}/{CONFIGURATION}"
        found = self._api.get(path)
        webhooks = []
        for one in parts(found, "webhooks"):
            client = dict(part(one, "clientConfig"))
            had = _decoded(text(client, "caBundle"))
            if self._certificate.text.strip() not in had:
                client["caBundle"] = base64.b64encode(trusted(had, self._certificate.text).encode()).decode()
            webhooks.append({**one, "clientConfig": client})
        if webhooks != found.get("webhooks"):
            version = text(found["metadata"], "resourceVersion")
            with contextlib.suppress(ConflictFound):  # the next look writes it
                self._api.change(path, {"metadata": {"resourceVersion": version}, "webhooks": webhooks})


def _decoded(bundle: str) -> str:
    try:
        return base64.b64decode(bundle, validate=True).decode("ascii")
    except ValueError:
        return ""
