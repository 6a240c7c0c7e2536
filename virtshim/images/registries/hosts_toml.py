"""Reads containerd's certs.d: which hosts serve a registry's images, and how to connect to each.

    <directory>/<host>_<port>_/  or  <host>:<port>/  or  <host>/  or else  _default/
        hosts.toml                         server, [host."https://..."]; each with capabilities, ca, client, skip_verify, header,
                                           override_path, dial_timeout, proxy
        *.crt, *.cert with *.key           without hosts.toml: CAs and a client certificate, as for Docker

The files are read for each pull, so that edits take effect at once.
https://github.com/containerd/containerd/blob/main/docs/hosts.md
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from virtshim.images.translations import TlsProfile, Transport
from virtshim.model.errors import InvalidRequest

PULL, RESOLVE = "pull", "resolve"

_CAPABILITIES = frozenset({PULL, RESOLVE, "push"})
_MAX_BYTES = 1 << 20
_API = "/v2"
_REGISTRY = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9.:\[\]-]*")
_PROXIES = ("http://", "https://")
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h))+")
_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_LONGEST_DURATION = 64
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_KINDS: Mapping[type, str] = {dict: "a table", list: "a list", str: "text", bool: "true or false"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RegistryHost:
    """`url`: the beginning of its API, without a final slash; "" for the registry itself. `may`: whether the host may resolve
    tags and serve blobs."""

    url: str = ""
    may: frozenset[str] = frozenset({PULL, RESOLVE})
    transport: Transport = Transport()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def hosts_of(registry: str, directory: str) -> tuple[RegistryHost, ...]:
    """The hosts in the order to ask them; only the registry itself if no file configures it. Raises InvalidRequest that names a
    bad or unreadable file, because silently ignoring a mirror would pull from another source."""
    place = _place(registry, Path(directory)) if directory else None
    if place is None:
        return (RegistryHost(),)
    file = place / "hosts.toml"
    try:
        text = _contents(file)
    except FileNotFoundError:
        return (_by_certificates(place),)
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise _wrong(file, f"is not TOML ({exc})") from exc
    return _hosts(document, file)


def _place(registry: str, directory: Path) -> Path | None:
    if not _REGISTRY.fullmatch(registry):
        return None
    host, colon, port = registry.rpartition(":")
    names = [f"{host}_{port}_"] if colon and host else []
    for place in (directory / name for name in (*names, registry, "_default")):
        try:
            if place.is_dir():
                return place
        except OSError as exc:
            raise _wrong(place, f"cannot be read ({exc.strerror})") from exc
    return None


def _hosts(document: Mapping[str, Any], file: Path) -> tuple[RegistryHost, ...]:
    tables = _checked(document.get("host", {}), dict, file, "host")
    named = [(str(name), _checked(table, dict, file, f"host {name!r}")) for name, table in tables.items()]
    server = _checked(document.get("server", ""), str, file, "server")
    return (*(_host(name, table, file) for name, table in named), _host(server, document, file))


def _host(name: str, table: Mapping[str, Any], file: Path) -> RegistryHost:
    may = [str(word).lower() for word in _checked(table.get("capabilities", []), list, file, "capabilities")]
    if not _CAPABILITIES.issuperset(may):
        raise _wrong(file, f"has a capability that is not {', '.join(sorted(_CAPABILITIES))}")
    proxy = _checked(table.get("proxy", ""), str, file, "proxy")
    if proxy and not proxy.startswith(_PROXIES):
        raise _wrong(file, "has a proxy that is not http:// or https://; others are not supported")
    tls = TlsProfile(
        cas=tuple(_pem(path, file) for path in _paths(table, "ca", file)),
        client=_client(table, file),
        insecure=_checked(table.get("skip_verify", False), bool, file, "skip_verify"),
        beside_system=True,
    )
    timeout = _seconds(_checked(table.get("dial_timeout", ""), str, file, "dial_timeout"), file)
    return RegistryHost(
        _url(name, _checked(table.get("override_path", False), bool, file, "override_path"), file) if name else "",
        frozenset(may or _CAPABILITIES) & {PULL, RESOLVE},
        Transport(proxy=proxy.rstrip("/"), tls=tls, connect_timeout=timeout),
        _headers(_checked(table.get("header", {}), dict, file, "header"), file),
    )


def _url(name: str, override_path: bool, file: Path) -> str:
    text = name if "://" in name else f"https://{name}"
    if not _is_host(text):
        raise _wrong(file, f"names {name[:200]!r}, which is not an http(s) URL of a host")
    parts = urlsplit(text)
    path = posixpath.normpath(parts.path) if parts.path else ""
    path = "" if path == "/" else path
    if not path.endswith(_API) and not override_path:
        path += _API
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username and parts.port != 0
    except ValueError:
        return False


def _paths(table: Mapping[str, Any], key: str, file: Path) -> list[str]:
    value = table.get(key, [])
    return [_checked(path, str, file, key) for path in (value if isinstance(value, list) else [value])]


def _client(table: Mapping[str, Any], file: Path) -> tuple[str, str] | None:
    """The client certificate: one path of a file with both certificate and key, or a pair of paths. A "" key is in the first
    file."""
    value = table.get("client", [])
    pairs = [pair if isinstance(pair, list) else [pair, ""] for pair in (value if isinstance(value, list) else [value])]
    if not pairs:
        return None
    if len(pairs) > 1 or len(pairs[0]) != 2:
        raise _wrong(file, "has more than one client certificate for a host, which is not supported")
    certificate, key = (_checked(path, str, file, "client") for path in pairs[0])
    return _pem(certificate, file), _pem(key or certificate, file)


def _headers(table: Mapping[str, Any], file: Path) -> Mapping[str, str]:
    headers = {}
    for name, value in table.items():
        words = [
            _checked(word, str, file, f"header {name}") for word in (value if isinstance(value, list) else [value])
        ]
        headers[name] = ", ".join(words)
        if not name.isascii() or any(ord(char) < 32 for char in name + headers[name]):
            raise _wrong(file, f"has a header {name[:40]!r} that cannot be sent")
    return headers


def _seconds(text: str, file: Path) -> float | None:
    if not text:
        return None
    if len(text) > _LONGEST_DURATION or not _DURATION.fullmatch(text):
        raise _wrong(file, f"has a dial_timeout {text[:40]!r}; write it as 1s or 500ms")
    return sum(float(number) * _SECONDS[unit] for number, unit in _LENGTH.findall(text))


def _by_certificates(place: Path) -> RegistryHost:
    cas = tuple(_contents(path) for path in sorted(place.glob("*.crt")))
    certificates = [path for path in sorted(place.glob("*.cert")) if path.with_suffix(".key").exists()]
    if len(certificates) > 1:
        raise _wrong(place, "has more than one client certificate, which is not supported")
    client = (_contents(certificates[0]), _contents(certificates[0].with_suffix(".key"))) if certificates else None
    return RegistryHost(transport=Transport(tls=TlsProfile(cas, client, beside_system=True)))


def _pem(path: str, file: Path) -> str:
    """The text of a file. `path` is relative to `file`, which names it."""
    try:
        return _contents(file.parent / path)
    except FileNotFoundError as exc:
        raise _wrong(file, f"names {path!r}, which does not exist") from exc


def _contents(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _wrong(path, f"is larger than {_MAX_BYTES} bytes")
        return data.decode()
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise _wrong(path, f"cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise _wrong(path, "is not UTF-8") from exc


def _checked(value: Any, kind: type[_T], file: Path, what: str) -> _T:
    if not isinstance(value, kind):
        raise _wrong(file, f"has {what} that is not {_KINDS[kind]}")
    return value


def _wrong(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{file} {why}; correct it, or remove it")
