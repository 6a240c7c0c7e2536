"""A kubeconfig: where the API server is, and who asks it."""

from __future__ import annotations

import base64
import binascii
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from virtshim.domain.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Access:
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext = field(repr=False)
    token: str = field(repr=False)


def access(kubeconfig: str, *, verified: bool = False) -> Access:
    """Of the current context. `verified`: the server must show who it is, whatever the file says. Raises OSError, ValueError,
    InvalidRequest, none of which shows what is secret."""
    try:
        document = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
    except yaml.YAMLError:  # which shows the line, and what is secret in it
        raise InvalidRequest("it is no kubeconfig: not valid YAML") from None
    if not isinstance(document, dict):
        raise InvalidRequest("it is no kubeconfig")
    context = _named(document, "contexts", "context", str(document.get("current-context", "")))
    cluster = _named(document, "clusters", "cluster", str(context.get("cluster", "")))
    user = _named(document, "users", "user", str(context.get("user", "")))
    server = urlsplit(str(cluster.get("server", "")))
    if server.scheme != "https" or not server.hostname:
        raise InvalidRequest(f"its server {cluster.get('server')!r} is no https address")
    tls = _server_tls(cluster, kubeconfig, verified=verified)
    _show_who_asks(tls, user, kubeconfig)
    token = str(user.get("token", ""))
    if not token and user.get("tokenFile"):
        token = Path(kubeconfig).parent.joinpath(str(user["tokenFile"])).read_text(encoding="utf-8").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest("its user's token is not one word of ASCII")
    return Access(server.hostname, server.port or 443, server.path.rstrip("/"), tls, token)


def _server_tls(cluster: Mapping[str, Any], kubeconfig: str, *, verified: bool) -> ssl.SSLContext:
    authority = _pem(cluster, "certificate-authority", kubeconfig)
    tls = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
    if cluster.get("insecure-skip-tls-verify") is True:
        if verified:
            raise InvalidRequest(
                "insecure-skip-tls-verify: anybody could be that server; give its certificate-authority instead"
            )
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls


def _show_who_asks(tls: ssl.SSLContext, user: Mapping[str, Any], kubeconfig: str) -> None:
    certificate, key = (_pem(user, name, kubeconfig) for name in ("client-certificate", "client-key"))
    if certificate and key:
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # readable by its owner alone
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    elif "exec" in user or "auth-provider" in user:
        raise InvalidRequest(
            "its user logs in by a program, which is not run here: use one with a token or a certificate"
        )


def _named(document: Mapping[str, Any], table: str, kind: str, name: str) -> Mapping[str, Any]:
    entries = document.get(table)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name:
            found = entry.get(kind)
            return found if isinstance(found, dict) else {}
    raise InvalidRequest(f"it has no {kind} {name!r}")


def _pem(entry: Mapping[str, Any], name: str, kubeconfig: str) -> bytes:
    """Of the field itself, or of the file that it names, relative to the kubeconfig; empty if there is neither."""
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error as exc:
            raise InvalidRequest(f"its {name}-data is not base64") from exc
    return Path(kubeconfig).parent.joinpath(str(entry[name])).read_bytes() if entry.get(name) else b""
