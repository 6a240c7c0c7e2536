"""Reads a kubeconfig: the API server's address, and the credentials."""

from __future__ import annotations

import base64
import binascii
import json
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

# The supported fields of a user and of a cluster. Any other field could change the identity or the server, so it is refused.
_CERTIFICATE: Final = {"client-certificate", "client-certificate-data", "client-key", "client-key-data"}
_AUTHORITY: Final = {"certificate-authority", "certificate-authority-data", "insecure-skip-tls-verify"}
_OF_USER: Final = {"token", "tokenFile", *_CERTIFICATE, "extensions"}
_OF_CLUSTER: Final = {"server", "tls-server-name", *_AUTHORITY, "disable-compression", "api-version", "extensions"}

_IMPERSONATION: Final = (
    "virtshim does not impersonate others: remove the field, and use a user that has the rights itself"
)
_BASIC: Final = "API servers no longer accept passwords: use a user with a token or a certificate"
_PROGRAM: Final = "virtshim does not run a login program: use a user with a token or a certificate"
_PROXY: Final = "virtshim uses no proxy: remove the field, and name a server that this node reaches itself"
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
_UNKNOWN: Final = "virtshim does not know this field, which may change the user or the server: correct or remove it"


@dataclass(frozen=True, slots=True)
class Access:
    """`server_name`: the name that the server's certificate must have."""

    host: str
    port: int
    prefix: str
    server_name: str
    tls: ssl.SSLContext = field(repr=False)
    token: str = field(repr=False)


def access(kubeconfig: str, *, verified: bool = False) -> Access:
    """The access by the file's current context. `verified`: refuse a file that turns the check of the server's certificate off.
    Raises OSError, ValueError, InvalidRequest; none of them shows a secret."""
    try:
        document = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
    except yaml.YAMLError:  # YAMLError shows the line, which may hold a secret
        raise InvalidRequest("it is not a kubeconfig: not valid YAML") from None
    if not isinstance(document, dict):
        raise InvalidRequest("it is not a kubeconfig")
    context = _named(document, "contexts", "context", str(document.get("current-context", "")))
    cluster = _named(document, "clusters", "cluster", str(context.get("cluster", "")))
    user = _named(document, "users", "user", str(context.get("user", "")))
    _refuse_unsupported("cluster", cluster, _OF_CLUSTER)
    _refuse_unsupported("user", user, _OF_USER)
    server = _server(str(cluster.get("server", "")))
    tls = _server_tls(cluster, kubeconfig, verified=verified)
    has_certificate = _load_certificate(tls, user, kubeconfig)
    token = _token(user, kubeconfig)
    if not token and not has_certificate:
        raise InvalidRequest(
            "its user has neither a token nor a certificate, so its requests would be anonymous: add one of them"
        )
    host = server.hostname or ""
    name = str(cluster.get("tls-server-name") or host)
    return Access(host, server.port or 443, server.path.rstrip("/"), name, tls, token)


# What kubelet gives a pod with a service account.
_SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


def access_in_cluster(environment: Mapping[str, str], directory: str = _SERVICE_ACCOUNT) -> Access:
    """The access of a pod by its service account. kubelet renews the token, so it is read again for each request. Raises OSError,
    ValueError, InvalidRequest."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise InvalidRequest(
            "KUBERNETES_SERVICE_HOST is not set, so this program does not run in a pod: name a kubeconfig (--kubeconfig)"
        )
    token = Path(directory, "token").read_text(encoding="utf-8").strip()
    tls = ssl.create_default_context(cafile=str(Path(directory, "ca.crt")))
    return Access(host, int(port), "", host, tls, token)


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """`node`: the node that the token is bound to, "" for none. `issued`, `expires`: seconds since the epoch; None: not known."""

    node: str = ""
    issued: float | None = None
    expires: float | None = None


def token_claims(token: str) -> TokenClaims:
    """What a service account's token says of itself; nothing for other tokens. Only the API server can tell whether it is true.

    https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/#bound-service-account-tokens"""
    try:
        _, body, _ = token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        node = claims.get("kubernetes.io", {}).get("node", {}).get("name", "")
        issued, expires = (claims.get(name) for name in ("iat", "exp"))
    except (ValueError, AttributeError, RecursionError):
        return TokenClaims()
    times = (float(one) if isinstance(one, int | float) else None for one in (issued, expires))
    return TokenClaims(str(node), *times)


def _refuse_unsupported(whose: str, entry: Mapping[str, Any], supported: Container[str]) -> None:
    for name, value in entry.items():
        if value and name not in supported:
            raise InvalidRequest(f"its {whose}'s {escaped(str(name), 40)}: {_WHY_NOT.get(name, _UNKNOWN)}")


def _server(address: str) -> SplitResult:
    if "@" in address:  # the address is not shown, because it may hold a password
        raise InvalidRequest("its cluster's server: the address has a user; write https://, without the user")
    found = urlsplit(address)
    if found.scheme != "https" or not found.hostname or found.query or found.fragment:
        raise InvalidRequest(f"its server {address!r} is not an https address")
    return found


def _token(user: Mapping[str, Any], kubeconfig: str) -> str:
    token, file = str(user.get("token") or ""), user.get("tokenFile")
    if token and file:
        raise InvalidRequest("its user's token and tokenFile: programs differ in which one they use; remove one")
    if file:
        token = Path(kubeconfig).parent.joinpath(str(file)).read_text(encoding="utf-8").strip()
        if not token:
            raise InvalidRequest("its user's tokenFile is empty: write a token to it")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest("its user's token is not one word of ASCII")
    return token


def _server_tls(cluster: Mapping[str, Any], kubeconfig: str, *, verified: bool) -> ssl.SSLContext:
    authority = _pem(cluster, "certificate-authority", kubeconfig)
    tls = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
    if cluster.get("insecure-skip-tls-verify") is True:
        if verified:
            raise InvalidRequest(
                "insecure-skip-tls-verify: anybody could pose as the server; set certificate-authority instead"
            )
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls


def _load_certificate(tls: ssl.SSLContext, user: Mapping[str, Any], kubeconfig: str) -> bool:
    """Loads the client certificate. False if there is none."""
    certificate, key = (_pem(user, name, kubeconfig) for name in ("client-certificate", "client-key"))
    if bool(certificate) != bool(key):
        missing = "client-key" if certificate else "client-certificate"
        raise InvalidRequest(
            f"its user has no {missing}: a certificate needs its key, and a key its certificate; add it"
        )
    if certificate:
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # only its owner may read it
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name, password=_no_passphrase)
    return bool(certificate)


def _no_passphrase() -> str:
    """Keeps OpenSSL from asking for a passphrase on the terminal."""
    raise InvalidRequest("its user's client-key has a passphrase, which nobody can enter: use a key without one")


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
    """The content of `name`-data, or of the file `name` relative to the kubeconfig; b"" if the entry has neither."""
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error as exc:
            raise InvalidRequest(f"its {name}-data is not base64") from exc
    return Path(kubeconfig).parent.joinpath(str(entry[name])).read_bytes() if entry.get(name) else b""
