"""Which images may be pulled, by their origin, and where their disks are. The rule with the longest prefix decides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from virtshim.images.confined.frames import DEFAULT_PLACE
from virtshim.images.names import (
    DEFAULT_REGISTRY,
    DEFAULT_REGISTRY_HOSTS,
    FileLocation,
    HttpLocation,
    Location,
    RegistryLocation,
)
from virtshim.model.errors import InvalidRequest, PermissionRefused

# An origin is `registry/repository`, a URL without its scheme, or `file:/path`. It is where the image really comes from,
# after image translations and default registries, not the name in the pod.

_DEFAULT_PORTS = {"https": 443, "http": 80}


def is_below(origin: str, prefix: str) -> bool:
    """Whether `prefix` covers `origin`. A prefix has whole components: `registry/team` does not cover `registry/teamwork`. ""
    covers everything."""
    prefix = prefix.strip("/")
    return not prefix or origin == prefix or origin.startswith(f"{prefix}/")


def origin_of(location: Location) -> str:
    """Raises InvalidRequest for a URL whose path a server may read as another path."""
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
    """The registry in one spelling: lower case, no port 443, no final dot, and `docker.io` for Docker Hub's hosts."""
    host, colon, port = authority.lower().rpartition(":")
    if not colon or not port.isdecimal():
        host, port = authority.lower(), ""
    host = host.removesuffix(".")
    if port in ("", "443"):
        return DEFAULT_REGISTRY if host in DEFAULT_REGISTRY_HOSTS else host
    return f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class DiskPath:
    """The disk's path in containerDisks of other layouts. `prefix`: of origins. `path`: absolute; the disk, or a directory with
    only the disk."""

    prefix: str
    path: str


def place_of_disk(paths: Sequence[DiskPath], location: RegistryLocation) -> str:
    """The path for the image, without a leading slash."""
    about = [one for one in paths if is_below(origin_of(location), one.prefix)]
    return max(about, key=lambda one: len(one.prefix)).path.strip("/") if about else DEFAULT_PLACE


Requirement = Literal["nothing", "digest", "signature", "refuse"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`prefix`: of origins. `keys`: PEM files of public keys that verify signatures."""

    prefix: str
    require: Requirement
    keys: tuple[str, ...] = ()


def keys_wanted(rules: Sequence[Rule], location: Location) -> tuple[str, ...] | None:
    """Files of the keys, one of which must have signed the image; None if no signature is needed. Raises PermissionRefused for an
    image that the rules refuse, InvalidRequest for one whose origin is ambiguous."""
    if not rules:
        return None
    origin = origin_of(location)
    about = [rule for rule in rules if is_below(origin, rule.prefix)]
    if not about:
        return None
    rule = max(about, key=lambda one: len(one.prefix.strip("/")))
    source = f"images.policy for {rule.prefix!r}" if rule.prefix.strip("/") else "images.policy for all other images"
    image = str(location.name)
    match rule.require:
        case "nothing":
            if rule.prefix.strip("/") and location.name.digest is None and _is_plain(location):
                raise PermissionRefused(
                    f"image {image!r} comes over plain HTTP, so anybody on the network path can replace it ({source}); "
                    "write https://, or NAME@sha256:..."
                )
            return None
        case "refuse":
            raise PermissionRefused(
                f"image {image!r}, of {origin}, is not allowed on this node ({source}: refuse); use an allowed registry"
            )
        case "digest":
            if location.name.digest is None:
                raise PermissionRefused(
                    f"image {image!r} is named without its digest ({source}: digest); write NAME@sha256:..."
                )
            return None
        case "signature":
            if not isinstance(location, RegistryLocation):
                raise PermissionRefused(
                    f"image {image!r} does not come from a registry, so it has no signatures ({source}: signature); "
                    "publish it in a registry and sign it with cosign"
                )
            return rule.keys


def _is_plain(location: Location) -> bool:
    """Whether the image comes over plain HTTP. A prefix has no scheme, but it means the server itself, not an impostor."""
    return isinstance(location, HttpLocation) and urlsplit(location.url).scheme == "http"
