"""Which images an operator lets onto the node, by where they really come from: the rule with the longest prefix decides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from virtshim.images.confined.frames import DEFAULT_PLACE
from virtshim.images.names import FileLocation, HttpLocation, Location, RegistryLocation
from virtshim.model.errors import InvalidRequest, PermissionRefused

# Where images really come from. Pure.
#
# An origin is `registry/repository`, a URL without its scheme, or `file:/path`: what image translations and default
# registries lead to, not what a pod wrote.

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


# Where the disks of containerDisks are that others packed in their own way. Pure.


@dataclass(frozen=True, slots=True)
class DiskPath:
    """`prefix`: of origins; `path`: absolute, of the disk or of the directory in which it is alone."""

    prefix: str
    path: str


def place_of_disk(paths: Sequence[DiskPath], location: RegistryLocation) -> str:
    """By the longest prefix; without a slash at its beginning."""
    about = [one for one in paths if is_below(origin_of(location), one.prefix)]
    return max(about, key=lambda one: len(one.prefix)).path.strip("/") if about else DEFAULT_PLACE


Requirement = Literal["nothing", "digest", "signature", "refuse"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`prefix`: of origins. `keys`: PEM files of public keys, for signatures."""

    prefix: str
    require: Requirement
    keys: tuple[str, ...] = ()


def keys_wanted(rules: Sequence[Rule], location: Location) -> tuple[str, ...] | None:
    """Files of the keys of which one must have signed the image; None: no signature is needed. Raises PermissionRefused for an
    image that the rules do not let in, InvalidRequest for one whose place cannot be told."""
    if not rules:
        return None
    origin = origin_of(location)
    about = [rule for rule in rules if is_below(origin, rule.prefix)]
    if not about:
        return None
    rule = max(about, key=lambda one: len(one.prefix.strip("/")))
    said = f"images.policy for {rule.prefix!r}" if rule.prefix.strip("/") else "images.policy for all other images"
    image = str(location.name)
    match rule.require:
        case "nothing":
            if rule.prefix.strip("/") and location.name.digest is None and _is_plain(location):
                raise PermissionRefused(
                    f"image {image!r} comes by plain HTTP, and anybody on the way can replace it ({said}); write https://, or "
                    "NAME@sha256:..."
                )
            return None
        case "refuse":
            raise PermissionRefused(
                f"image {image!r}, of {origin}, is not allowed on this node ({said}: refuse); use an allowed registry"
            )
        case "digest":
            if location.name.digest is None:
                raise PermissionRefused(
                    f"image {image!r} is named without its digest ({said}: digest); write NAME@sha256:..."
                )
            return None
        case "signature":
            if not isinstance(location, RegistryLocation):
                raise PermissionRefused(
                    f"image {image!r} comes from no registry, so it has no signatures ({said}: signature); "
                    "publish it in a registry and sign it with cosign"
                )
            return rule.keys


def _is_plain(location: Location) -> bool:
    """A prefix has no scheme. Who lets a server's images in means the server, and not whoever answers in its place."""
    return isinstance(location, HttpLocation) and urlsplit(location.url).scheme == "http"
