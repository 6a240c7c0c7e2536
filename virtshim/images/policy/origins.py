"""Where images really come from. Pure.

An origin is `registry/repository`, a URL without its scheme, or `file:/path`: what image translations and default registries lead
to, not what a pod wrote.
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from virtshim.domain.errors import InvalidRequest
from virtshim.images.names import FileLocation, Location, RegistryLocation

_DEFAULT_PORTS = {"https": 443, "http": 80}
# Names of one registry.
_DEFAULT_REGISTRY = "docker.io"
_ITS_HOSTS = frozenset({_DEFAULT_REGISTRY, f"index.{_DEFAULT_REGISTRY}", f"registry-1.{_DEFAULT_REGISTRY}"})


def is_below(origin: str, prefix: str) -> bool:
    """A prefix ends at a component's end: nothing of `registry/teamwork` is below `registry/team`. All is below ""."""
    prefix = prefix.strip("/")
    return not prefix or origin == prefix or origin.startswith(f"{prefix}/")


def origin_of(location: Location) -> str:
    """Raises InvalidRequest for a URL that a server may understand as another one's path."""
    if isinstance(location, RegistryLocation):
        return f"{_registry(location.registry)}/{location.repository}"
    if isinstance(location, FileLocation):
        return f"file:{location.path}"
    parts = urlsplit(location.url)
    host = (parts.hostname or "").lower().removesuffix(".")
    if ":" in host:
        host = f"[{host}]"
    if parts.port is not None and parts.port != _DEFAULT_PORTS.get(parts.scheme):
        host += f":{parts.port}"
    path = unquote(parts.path)
    words = path.split("/")[1:]
    if not {"", ".", ".."}.isdisjoint(words[:-1]) or words[-1:] in (["."], [".."]) or "\\" in path:
        raise InvalidRequest(
            f"image {str(location.name)!r}: its path has empty, . or .. components, so images.policy cannot tell where it "
            "comes from; write the path as it is"
        )
    return f"{host}{path}"


def _registry(authority: str) -> str:
    """One spelling: in lower case, without the port that https has, without a final dot, Docker Hub by its name."""
    host, colon, port = authority.lower().rpartition(":")
    if not colon or not port.isdecimal():
        host, port = authority.lower(), ""
    host = host.removesuffix(".")
    if port in ("", "443"):
        return _DEFAULT_REGISTRY if host in _ITS_HOSTS else host
    return f"{host}:{port}"
