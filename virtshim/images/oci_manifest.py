"""OCI and Docker (schema 2) manifests: bytes in, values out. Pure.

https://github.com/opencontainers/image-spec/blob/main/manifest.md, image-index.md, config.md
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from virtshim.model.errors import InvalidRequest, NotFound
from virtshim.model.image import ImageConfig

MEDIA_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_MANIFEST_BYTES = 4 << 20

DISK_NAME = re.compile(r"\.(?:qcow2?|img|raw)(?:\.(?:gz|xz|zst))?$")

_TITLE = "org.opencontainers.image.title"
_MAX_LAYERS = 127
# Of what a config says of containers: it goes into the records of all of them.
_MAX_CONFIG_CHARS = 64 << 10
_MAX_CONFIG_WORDS = 1000
_USER = re.compile(r"[^:\0\s]{1,256}(:[^:\0\s]{1,256})?")
_MAX_ID = 2**32 - 1
_MAX_SIZE = 1 << 60
_REALTIME_SIGNAL = re.compile(r"SIGRTM(?:IN\+|AX-)(?:[1-9]|[12][0-9]|30)")
_FIRST_REALTIME, _LAST_REALTIME = 34, 64
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
# What uname calls a machine and what OCI does (Go's GOARCH), where they differ.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`size` is in bytes. `platform` is `os/architecture`, "" if the descriptor has none; `variant` e.g. v8; `title` the file's
    name, of an artifact's layer."""

    digest: str
    size: int
    platform: str = ""
    variant: str = ""
    media_type: str = ""
    title: str = ""


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


def is_artifact(body: bytes) -> bool:
    """Whether this is no image's config: it does not say what the layers are."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return True
    return not isinstance(document, dict) or "rootfs" not in document


def artifact_disk(manifest: Manifest, image: str) -> Descriptor | None:
    """The layer of an artifact that is a disk: its only file, or the only one called like a disk. Raises InvalidRequest if there
    are several."""
    files = [layer for layer in manifest.layers if not is_archive(layer)]
    disks = files if len(files) == 1 else [layer for layer in files if DISK_NAME.search(layer.title)]
    if len(disks) > 1:
        raise _bad(
            image,
            f"it is an artifact with {len(disks)} layers that are disks; push one, its title ending in .qcow2, .img or .raw, "
            "or build a containerDisk: FROM scratch, ADD disk.qcow2 /disk/",
        )
    return disks[0] if disks else None


def is_archive(layer: Descriptor) -> bool:
    return "tar" in re.split("[.+]", layer.media_type)


def is_packed(layer: Descriptor) -> bool:
    return not {"gzip", "zstd"}.isdisjoint(re.split("[.+]", layer.media_type))


def image_config(body: bytes, image: str) -> ImageConfig:
    """What the image's config says of containers. Raises InvalidRequest."""
    said = _object(body, image).get("config")
    if said is None:
        return ImageConfig()
    if not isinstance(said, dict):
        raise _bad(image, "its config is malformed")
    env = _words(said, "Env", image)
    if any(setting.partition("=")[0] == "" or "=" not in setting for setting in env):
        raise _bad(image, "its config's Env holds what is not NAME=VALUE")
    return ImageConfig(
        user=_user(_word(said, "User", image), image),
        env=env,
        entrypoint=_words(said, "Entrypoint", image),
        cmd=_words(said, "Cmd", image),
        working_dir=_word(said, "WorkingDir", image),
        stop_signal=_signal(_word(said, "StopSignal", image), image),
    )


def _word(said: Mapping[str, Any], key: str, image: str) -> str:
    return "".join(_checked([said[key]] if said.get(key) is not None else [], key, image))


def _words(said: Mapping[str, Any], key: str, image: str) -> tuple[str, ...]:
    return _checked(said.get(key) or [], key, image)


def _checked(words: Any, key: str, image: str) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) and _is_plain(word) for word in words):
        raise _bad(image, f"its config's {key} is malformed")
    if len(words) > _MAX_CONFIG_WORDS or sum(map(len, words)) > _MAX_CONFIG_CHARS:
        raise _bad(image, f"its config's {key} is too long")
    return tuple(words)


def _is_plain(word: str) -> bool:
    """Whether a command line can carry it."""
    return "\0" not in word and not any("\ud800" <= char <= "\udfff" for char in word)


def _user(text: str, image: str) -> str:
    # What is too long for a user is not counted: Python refuses to.
    if text and (not _USER.fullmatch(text) or any(int(part) > _MAX_ID for part in text.split(":") if part.isdecimal())):
        raise _bad(image, f"its config's User {text[:80]!r} is no user; write USER name, or USER number:number")
    return text


def _signal(text: str, image: str) -> str:
    """By its name. kill(1) takes it with and without SIG, Docker numbers as well."""
    if not text:
        return ""
    name = f"SIG{text.upper().removeprefix('SIG')}"
    if name in signal.Signals.__members__ or _REALTIME_SIGNAL.fullmatch(name):
        return name
    number = int(text) if re.fullmatch("[0-9]{1,2}", text) else 0
    if _FIRST_REALTIME < number < _LAST_REALTIME:
        return f"SIGRTMIN+{number - _FIRST_REALTIME}"
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    raise _bad(image, f"its config's StopSignal {text[:40]!r} is no signal; write STOPSIGNAL SIGTERM")


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
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MAX_SIZE:
        raise _bad(image, "its manifest holds a descriptor without size, or with one that nothing has")
    annotations = value.get("annotations")
    title = annotations.get(_TITLE) if isinstance(annotations, dict) else None
    said = (str(value.get("mediaType") or "")[:200], str(title or "")[:200])
    if not isinstance(platform, dict):
        return Descriptor(digest, size, "", "", *said)
    system, machine, variant = (str(platform.get(key) or "")[:40] for key in ("os", "architecture", "variant"))
    return Descriptor(digest, size, f"{system}/{machine}", variant, *said)


def _bad(image: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"image {image!r} cannot be used: {why}")
