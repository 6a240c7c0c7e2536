"""A kubeconfig: where the API server is, and who asks it."""

from __future__ import annotations

import base64
import binascii
import ssl
import tempfile
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import yaml

from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped

# What is done of a user and of a cluster; whatever else has a value could change who asks, or whom.
_CERTIFICATE: Final = {"client-certificate", "client-certificate-data", "client-key", "client-key-data"}
_AUTHORITY: Final = {"certificate-authority", "certificate-authority-data", "insecure-skip-tls-verify"}
_OF_USER: Final = {"token", "tokenFile", *_CERTIFICATE, "extensions"}
_OF_CLUSTER: Final = {"server", "tls-server-name", *_AUTHORITY, "disable-compression", "api-version", "extensions"}

_IMPERSONATION: Final = (
    "it asks in another's name, which is not done here: remove it, and use a user that has the rights itself"
)
_BASIC: Final = "API servers take no passwords any more: use a user with a token or a certificate"
_PROGRAM: Final = "its user logs in by a program, which is not run here: use one with a token or a certificate"
_PROXY: Final = "no proxy is used here: remove it, and name a server that this node reaches itself"
_WHY_NOT: Final = {
    "as": _IMPERSONATION,
    "as-uid": _IMPERSONATION,
    "as-groups": _IMPERSONATION,
    "as-user-extra": _IMPERSONATION,
    "username": _BASIC,
    "password": _BASIC,
    "exec": _PROGRAM,
    "auth-provider": _PROGRAM,
    "proxy-url": _PROXY,
}
_UNKNOWN: Final = "it is not known here, and might change who asks or who is asked: correct or remove it"


@dataclass(frozen=True, slots=True)
class Access:
    """`server_name`: what the server's certificate has to be for."""

    host: str
    port: int
    prefix: str
    server_name: str
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
    _refuse_others("cluster", cluster, _OF_CLUSTER)
    _refuse_others("user", user, _OF_USER)
    server = _server(str(cluster.get("server", "")))
    tls = _server_tls(cluster, kubeconfig, verified=verified)
    shown = _show_who_asks(tls, user, kubeconfig)
    token = _token(user, kubeconfig)
    if not token and not shown:
        raise InvalidRequest(
            "its user has neither a token nor a certificate: it would ask as nobody; give it one of them"
        )
    host = server.hostname or ""
    name = str(cluster.get("tls-server-name") or host)
    return Access(host, server.port or 443, server.path.rstrip("/"), name, tls, token)


def _refuse_others(whose: str, entry: Mapping[str, Any], done: Container[str]) -> None:
    for name, value in entry.items():
        if value and name not in done:
            raise InvalidRequest(f"its {whose}'s {escaped(str(name), 40)}: {_WHY_NOT.get(name, _UNKNOWN)}")


def _server(address: str) -> SplitResult:
    if "@" in address:  # whose password is not shown
        raise InvalidRequest("its cluster's server: there is a user in the address; write it without, and https://")
    found = urlsplit(address)
    if found.scheme != "https" or not found.hostname or found.query or found.fragment:
        raise InvalidRequest(f"its server {address!r} is no https address")
    return found


def _token(user: Mapping[str, Any], kubeconfig: str) -> str:
    token, file = str(user.get("token") or ""), user.get("tokenFile")
    if token and file:
        raise InvalidRequest("its user's token and tokenFile: programs differ on which of them counts; remove one")
    if file:
        token = Path(kubeconfig).parent.joinpath(str(file)).read_text(encoding="utf-8").strip()
        if not token:
            raise InvalidRequest("its user's tokenFile is empty: have a token written there")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest("its user's token is not one word of ASCII")
    return token


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


def _show_who_asks(tls: ssl.SSLContext, user: Mapping[str, Any], kubeconfig: str) -> bool:
    """Whether there is a certificate to show."""
    certificate, key = (_pem(user, name, kubeconfig) for name in ("client-certificate", "client-key"))
    if bool(certificate) != bool(key):
        missing = "client-key" if certificate else "client-certificate"
        raise InvalidRequest(f"its user has no {missing}: a certificate and its key go together; add it")
    if certificate:
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # readable by its owner alone
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name, password=_no_passphrase)
    return bool(certificate)


def _no_passphrase() -> str:
    """In place of OpenSSL's question on the terminal."""
    raise InvalidRequest("its user's client-key has a passphrase, for which nobody can be asked: give it without")


def _named(document: Mapping[str, Any], table: str, kind: str, name: str) -> Mapping[str, Any]:
    entries = document.get(table)
    found = [
        entry.get(kind)
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and entry.get("name") == name
    ]
    if not found:
        raise InvalidRequest(f"it has no {kind} {name!r}")
    if len(found) > 1:
        raise InvalidRequest(f"it has {len(found)} {table} named {name!r}: rename or remove all but one")
    return found[0] if isinstance(found[0], dict) else {}


def _pem(entry: Mapping[str, Any], name: str, kubeconfig: str) -> bytes:
    """Of the field itself, or of the file that it names, relative to the kubeconfig; empty if there is neither."""
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error as exc:
            raise InvalidRequest(f"its {name}-data is not base64") from exc
    return Path(kubeconfig).parent.joinpath(str(entry[name])).read_bytes() if entry.get(name) else b""
