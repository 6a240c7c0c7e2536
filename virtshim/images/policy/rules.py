"""Which images an operator lets onto the node, by where they really come from: the rule with the longest prefix decides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from virtshim.domain.errors import PermissionRefused
from virtshim.images.names import HttpLocation, Location, RegistryLocation
from virtshim.images.policy.origins import is_below, origin_of

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
