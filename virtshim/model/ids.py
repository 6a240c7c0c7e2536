"""Identifiers: parsed once at the edge and opaque inside. Names of netns, domains and files are computed from them."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import ClassVar

from virtshim.model.errors import InvalidRequest

_HEX64 = re.compile(r"[0-9a-f]{64}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")

# The namespace of virtshim's UUIDv5 names. Its value is arbitrary, but must never change.
_DOMAIN_NAMESPACE = uuid.UUID("6f3f3d0e-6f0a-5d5c-9a43-7b2b6a1f5c11")


@dataclass(frozen=True, slots=True, order=True)
class _Id:
    """An id equals and precedes only ids of its own kind."""

    value: str
    _form: ClassVar[re.Pattern[str]]
    _what: ClassVar[str]

    def __post_init__(self) -> None:
        if not self._form.fullmatch(self.value):
            expected = "64 hex digits" if self._form is _HEX64 else "sha256:<64 hex digits>"
            raise InvalidRequest(f"not {self._what}: {self.value[:80]!r} ({expected} expected)")

    def __str__(self) -> str:
        return self.value


class _OwnId(_Id):
    """64 lower-case hex digits."""

    __slots__ = ()
    _form = _HEX64

    @property
    def short(self) -> str:
        """First 20 hex digits: long enough to be unique, short enough for socket paths (108 bytes at most) and netns names."""
        return self.value[:20]


class _Digest(_Id):
    """`sha256:` and 64 lower-case hex digits."""

    __slots__ = ()
    _form = _SHA256

    @property
    def hex(self) -> str:
        return self.value.removeprefix("sha256:")


@dataclass(frozen=True, slots=True, order=True)
class SandboxId(_OwnId):
    _what = "a sandbox id"


@dataclass(frozen=True, slots=True, order=True)
class ContainerId(_OwnId):
    _what = "a container id"

    def domain_uuid(self) -> uuid.UUID:
        """The libvirt domain's UUID, unless the pod asks for another one."""
        return uuid.uuid5(_DOMAIN_NAMESPACE, self.value)


@dataclass(frozen=True, slots=True, order=True)
class ImageId(_Digest):
    """CRI's image id. It is the digest of an OCI image's config (with the disk's path, if an operator names one), or of a plain
    disk."""

    _what = "an image id"


@dataclass(frozen=True, slots=True, order=True)
class ImageDigest(_Digest):
    """The digest of the disk file as it was published. Several images may share it."""

    _what = "an image digest"
