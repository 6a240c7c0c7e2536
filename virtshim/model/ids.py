"""Identifiers: parsed once at the edge and opaque inside. Names of netns, domains and files are computed from them."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from virtshim.model.errors import InvalidRequest

_HEX64 = re.compile(r"[0-9a-f]{64}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")

# The namespace of virtshim's UUIDv5 names. Its value is arbitrary, but must never change.
_DOMAIN_NAMESPACE = uuid.UUID("6f3f3d0e-6f0a-5d5c-9a43-7b2b6a1f5c11")


@dataclass(frozen=True, slots=True, order=True)
class SandboxId:
    """64 lower-case hex digits."""

    value: str

    def __post_init__(self) -> None:
        if not _HEX64.fullmatch(self.value):
            raise InvalidRequest(f"not a sandbox id: {self.value[:80]!r} (64 hex digits expected)")

    @property
    def short(self) -> str:
        """First 20 hex digits: long enough to be unique, short enough for socket paths and netns names."""
        return self.value[:20]

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, order=True)
class ContainerId:
    """64 lower-case hex digits."""

    value: str

    def __post_init__(self) -> None:
        if not _HEX64.fullmatch(self.value):
            raise InvalidRequest(f"not a container id: {self.value[:80]!r} (64 hex digits expected)")

    @property
    def short(self) -> str:
        """First 20 hex digits: long enough to be unique, short enough for socket paths (108 bytes at most)."""
        return self.value[:20]

    def domain_uuid(self) -> uuid.UUID:
        """The libvirt domain's UUID, unless the pod asks for another one."""
        return uuid.uuid5(_DOMAIN_NAMESPACE, self.value)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, order=True)
class ImageId:
    """CRI's image id: `sha256:` and 64 lower-case hex digits. It is the digest of an OCI image's config (with the
    disk's path, if an operator names one), or of a plain disk."""

    value: str

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.value):
            raise InvalidRequest(f"not an image id: {self.value[:80]!r} (sha256:<64 hex digits> expected)")

    @property
    def hex(self) -> str:
        return self.value.removeprefix("sha256:")

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, order=True)
class ImageDigest:
    """`sha256:` and 64 lower-case hex digits: the digest of the disk file as it was published. Several images may share it."""

    value: str

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.value):
            raise InvalidRequest(f"not an image digest: {self.value[:80]!r} (sha256:<64 hex digits> expected)")

    @property
    def hex(self) -> str:
        return self.value.removeprefix("sha256:")

    def __str__(self) -> str:
        return self.value
