"""An API server over TLS that accepts the token `secret`, and its own certificate as a client certificate."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import yaml


class Api:
    def __init__(self, place: Path) -> None:
        # Path -> answer: a document, an HTTP status, or a function from the posted body to either. 404 for others.
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, str | None, bool]] = []
        self.certificate, self.key = place / "cert.pem", place / "key.pem"
        argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1,DNS:kubernetes.example",
                "-keyout", str(self.key), "-out", str(self.certificate)]  # fmt: skip
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        outer = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, posted: Any) -> None:
                assert isinstance(self.connection, ssl.SSLSocket)
                shown = bool(self.connection.getpeercert())
                token = self.headers["Authorization"]
                outer.asked.append((self.path, token, shown))
                known = shown or token == "Bearer secret"
                found = outer.answers.get(self.path, 404) if known else 403
                found = found(posted) if callable(found) else found
                body = b"no JSON" if isinstance(found, int) else json.dumps(found).encode()
                self.send_response(found if isinstance(found, int) else 200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Logs nothing to standard error."""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.certificate)
        context.verify_mode = ssl.CERT_OPTIONAL
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def kubeconfig(api: Api, place: Path, user: dict[str, Any], **cluster: Any) -> str:
    whole = {
        "server": f"https://127.0.0.1:{api.server.server_address[1]}/prefix",
        "certificate-authority": "ca.crt",
        **cluster,
    }
    (place / "ca.crt").write_bytes(api.certificate.read_bytes())
    document = {
        "current-context": "here",
        "contexts": [
            {"name": "other", "context": {}},
            {"name": "here", "context": {"cluster": "one", "user": "me"}},
        ],
        "clusters": [{"name": "one", "cluster": whole}],
        "users": [{"name": "me", "user": user}],
    }
    (place / "kubeconfig").write_text(yaml.safe_dump(document))
    return str(place / "kubeconfig")


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
