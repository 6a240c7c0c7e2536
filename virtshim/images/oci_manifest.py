"""OCI and Docker (schema 2) manifests: bytes in, values out. Pure.

https://github.com/opencontainers/image-spec/blob/main/manifest.md, image-index.md, config.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from virtshim.domain.errors import InvalidRequest, NotFound

MEDIA_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_MANIFEST_BYTES = 4 << 20

_MAX_LAYERS = 127
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
# What uname calls a machine and what OCI does (Go's GOARCH), where they differ.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`size` is in bytes. `platform` is `os/architecture`, "" if the descriptor has none; `variant` e.g. v8."""

    digest: str
    size: int
    platform: str = ""
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`layers` from the lowest up."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def architecture(machine: str) -> str:
    """OCI's name for what uname calls `machine`."""
    return _ARCHITECTURES.get(machine, machine)


def parse_manifest(body: bytes, image: str) -> Index | Manifest:
    """`image` is for error texts. Raises InvalidRequest."""
    document = _object(body, image)
    if document.get("schemaVersion") != 2:
        raise _bad(image, "its manifest is of an old or unknown schema; push it again with a current tool")
    # Both at once can be read as two different images (CVE-2021-41190).
    if "manifests" in document and ("layers" in document or "config" in document):
        raise _bad(image, "its manifest is ambiguous: an index and an image at once")
    if "manifests" in document:
        return Index(tuple(_descriptor(entry, image) for entry in _list(document, "manifests", image)))
    layers = tuple(_descriptor(entry, image) for entry in _list(document, "layers", image))
    if not 1 <= len(layers) <= _MAX_LAYERS:
        raise _bad(image, f"it has {len(layers)} layers; a containerDisk has 1 to {_MAX_LAYERS}")
    return Manifest(_descriptor(document.get("config"), image), layers)


def choose(index: Index, wanted: str, image: str) -> Descriptor:
    """The manifest for platform `wanted` (`linux/amd64`), one without variant before others. Raises NotFound."""
    fitting = [entry for entry in index.manifests if entry.platform == wanted]
    if not fitting:
        offered = sorted({entry.platform for entry in index.manifests if entry.platform} - {"unknown/unknown"})
        raise NotFound(
            f"image {image!r} has no variant for {wanted}, this node's platform; it has {', '.join(offered[:8])}"
        )
    return min(fitting, key=lambda entry: bool(entry.variant))


def diff_ids(body: bytes, manifest: Manifest, wanted: str, image: str) -> tuple[str, ...]:
    """Digests of the uncompressed layers, lowest first. Raises InvalidRequest, also for an image of another architecture."""
    document = _object(body, image)
    found = document.get("architecture")
    if isinstance(found, str) and found and found != wanted.partition("/")[2]:
        raise _bad(image, f"it is made for {found[:40]}, this node is {wanted}")
    rootfs = document.get("rootfs")
    if not isinstance(rootfs, dict):
        raise _bad(image, "it is an artifact, not an image; build a containerDisk: FROM scratch, ADD disk.qcow2 /disk/")
    digests = _list(rootfs, "diff_ids", image)
    if len(digests) != len(manifest.layers) or not all(isinstance(d, str) and _SHA256.fullmatch(d) for d in digests):
        raise _bad(image, "its config's diff_ids do not match its layers")
    return tuple(digests)


def _object(body: bytes, image: str) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise _bad(image, "its manifest or config is not JSON") from exc
    if not isinstance(document, dict):
        raise _bad(image, "its manifest or config is not a JSON object")
    return document


def _list(document: Mapping[str, Any], key: str, image: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise _bad(image, f"its manifest or config has no list {key}")
    return value


def _descriptor(value: Any, image: str) -> Descriptor:
    if not isinstance(value, dict):
        raise _bad(image, "its manifest holds something that is not a descriptor")
    digest, size, platform = value.get("digest"), value.get("size"), value.get("platform")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise _bad(image, "its manifest holds a digest that is not sha256; others are not supported")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise _bad(image, "its manifest holds a descriptor without size")
    if not isinstance(platform, dict):
        return Descriptor(digest, size)
    system, machine, variant = (str(platform.get(key) or "")[:40] for key in ("os", "architecture", "variant"))
    return Descriptor(digest, size, f"{system}/{machine}", variant)


def _bad(image: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"image {image!r} cannot be used: {why}")
