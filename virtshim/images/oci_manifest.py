"""Parses OCI and Docker (schema 2) manifests and configs. Pure.

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
# Limits of a config's part about containers, because each container's record contains it.
_MAX_CONFIG_CHARS = 64 << 10
_MAX_CONFIG_WORDS = 1000
_USER = re.compile(r"[^:\0\s]{1,256}(:[^:\0\s]{1,256})?")
_MAX_ID = 2**32 - 1
_MAX_SIZE = 1 << 60
_REALTIME_SIGNAL = re.compile(r"SIGRTM(?:IN\+|AX-)(?:[1-9]|[12][0-9]|30)")
_FIRST_REALTIME, _LAST_REALTIME = 34, 64
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
# Machines whose names differ in uname and in OCI (Go's GOARCH).
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`size`: in bytes. `platform`: `os/architecture`, "" if the descriptor has none. `variant`: e.g. v8. `title`: the file
    name of an artifact's layer."""

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
    """`layers`: the lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def architecture(machine: str) -> str:
    """OCI's name for uname's `machine`."""
    return _ARCHITECTURES.get(machine, machine)


def parse_manifest(body: bytes, image: str) -> Index | Manifest:
    """`image`: for error texts. Raises InvalidRequest."""
    document = _object(body, image)
    if document.get("schemaVersion") != 2:
        raise _bad(image, "its manifest is of an old or unknown schema; push it again with a current tool")
    # Readers would disagree which image such a manifest means (CVE-2021-41190).
    if "manifests" in document and ("layers" in document or "config" in document):
        raise _bad(image, "its manifest is ambiguous: an index and an image at once")
    if "manifests" in document:
        return Index(tuple(_descriptor(entry, image) for entry in _list(document, "manifests", image)))
    layers = tuple(_descriptor(entry, image) for entry in _list(document, "layers", image))
    if not 1 <= len(layers) <= _MAX_LAYERS:
        raise _bad(image, f"it has {len(layers)} layers; a containerDisk has 1 to {_MAX_LAYERS}")
    return Manifest(_descriptor(document.get("config"), image), layers)


def choose(index: Index, wanted: str, image: str) -> Descriptor:
    """The manifest for platform `wanted` (such as `linux/amd64`). Prefers one without variant. Raises NotFound."""
    fitting = [entry for entry in index.manifests if entry.platform == wanted]
    if not fitting:
        offered = sorted({entry.platform for entry in index.manifests if entry.platform} - {"unknown/unknown"})
        raise NotFound(
            f"image {image!r} has no variant for {wanted}, this node's platform; it has {', '.join(offered[:8])}"
        )
    return min(fitting, key=lambda entry: bool(entry.variant))


def diff_ids(body: bytes, manifest: Manifest, wanted: str, image: str) -> tuple[str, ...]:
    """Digests of the unpacked layers, the lowest first. Raises InvalidRequest, also for an image of another architecture."""
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
    """Whether this config is not an image's: it does not list the layers."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return True
    return not isinstance(document, dict) or "rootfs" not in document


def artifact_disk(manifest: Manifest, image: str) -> Descriptor | None:
    """The artifact's disk: its only file, or the only file with a disk's name. Raises InvalidRequest if there are several
    disks."""
    files = [layer for layer in manifest.layers if not is_archive(layer)]
    disks = files if len(files) == 1 else [layer for layer in files if DISK_NAME.search(layer.title)]
    if len(disks) > 1:
        raise _bad(
            image,
            f"it is an artifact with {len(disks)} disks; push one, with a title that ends in .qcow2, .img or .raw, "
            "or build a containerDisk: FROM scratch, ADD disk.qcow2 /disk/",
        )
    return disks[0] if disks else None


def is_archive(layer: Descriptor) -> bool:
    return "tar" in re.split("[.+]", layer.media_type)


def is_packed(layer: Descriptor) -> bool:
    return not {"gzip", "zstd"}.isdisjoint(re.split("[.+]", layer.media_type))


def image_config(body: bytes, image: str) -> ImageConfig:
    """The config's part about containers. Raises InvalidRequest."""
    config = _object(body, image).get("config")
    if config is None:
        return ImageConfig()
    if not isinstance(config, dict):
        raise _bad(image, "its config is malformed")
    env = _words(config, "Env", image)
    if any(setting.partition("=")[0] == "" or "=" not in setting for setting in env):
        raise _bad(image, "its config's Env has an entry that is not NAME=VALUE")
    return ImageConfig(
        user=_user(_word(config, "User", image), image),
        env=env,
        entrypoint=_words(config, "Entrypoint", image),
        cmd=_words(config, "Cmd", image),
        working_dir=_word(config, "WorkingDir", image),
        stop_signal=_signal(_word(config, "StopSignal", image), image),
    )


def _word(config: Mapping[str, Any], key: str, image: str) -> str:
    return "".join(_checked([config[key]] if config.get(key) is not None else [], key, image))


def _words(config: Mapping[str, Any], key: str, image: str) -> tuple[str, ...]:
    return _checked(config.get(key) or [], key, image)


def _checked(words: Any, key: str, image: str) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) and _is_plain(word) for word in words):
        raise _bad(image, f"its config's {key} is malformed")
    if len(words) > _MAX_CONFIG_WORDS or sum(map(len, words)) > _MAX_CONFIG_CHARS:
        raise _bad(image, f"its config's {key} is too long")
    return tuple(words)


def _is_plain(word: str) -> bool:
    """Whether the word can be part of a command line."""
    return "\0" not in word and not any("\ud800" <= char <= "\udfff" for char in word)


def _user(text: str, image: str) -> str:
    # The pattern limits the length first, because Python refuses to convert very long numbers.
    if text and (not _USER.fullmatch(text) or any(int(part) > _MAX_ID for part in text.split(":") if part.isdecimal())):
        raise _bad(image, f"its config's User {text[:80]!r} is not a user; write USER name, or USER number:number")
    return text


def _signal(text: str, image: str) -> str:
    """The signal's name. As in kill(1), SIG is optional in `text`; as in Docker, `text` may be a number."""
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
    raise _bad(image, f"its config's StopSignal {text[:40]!r} is not a signal; write STOPSIGNAL SIGTERM")


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
        raise _bad(image, "its manifest holds a descriptor without a size, or with an impossible size")
    annotations = value.get("annotations")
    title = annotations.get(_TITLE) if isinstance(annotations, dict) else None
    texts = (str(value.get("mediaType") or "")[:200], str(title or "")[:200])
    if not isinstance(platform, dict):
        return Descriptor(digest, size, "", "", *texts)
    system, machine, variant = (str(platform.get(key) or "")[:40] for key in ("os", "architecture", "variant"))
    return Descriptor(digest, size, f"{system}/{machine}", variant, *texts)


def _bad(image: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"image {image!r} cannot be used: {why}")
