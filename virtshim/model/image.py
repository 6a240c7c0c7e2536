"""VM images: what the store holds and how callers name them."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Final

from virtshim.model.ids import ImageDigest, ImageId

# For a container whose record cannot be read. No content has this digest.
UNKNOWN_IMAGE = ImageDigest(f"sha256:{'0' * 64}")


class DiskFormat(enum.Enum):
    QCOW2 = "qcow2"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A running download: bytes as the source sends them. `total`: 0 while unknown. `began_at`: nanoseconds since the
    epoch."""

    image: str
    received: int
    total: int
    began_at: int


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The OCI image's defaults for containers. A plain disk image has none."""

    # As in the Dockerfile: a name or a number, optionally with a group after a colon.
    user: str = ""
    # Each is NAME=VALUE.
    env: tuple[str, ...] = field(default=(), repr=False)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    working_dir: str = ""
    # `SIGTERM`, `SIGRTMIN+3`; "" if unset.
    stop_signal: str = ""

    @property
    def user_name(self) -> str:
        """The user without the group; "" for a numeric one."""
        name = self.user.partition(":")[0]
        return "" if name.isdecimal() else name

    @property
    def uid(self) -> int | None:
        """None unless the user is a number."""
        number = self.user.partition(":")[0]
        return int(number) if number.isdecimal() else None


@dataclass(frozen=True, slots=True)
class BootFile:
    """A kernel, or a file that it is started with: `path` in the image, digest and size."""

    path: str
    digest: ImageDigest
    size: int


# The disk of an image that has kernels but no disk of its own: all zeros.
NO_DISK_BYTES: Final = 1 << 20
NO_DISK: Final = ImageDigest(f"sha256:{hashlib.sha256(bytes(NO_DISK_BYTES)).hexdigest()}")


@dataclass(frozen=True, slots=True)
class Image:
    """`id`: the image id in all CRI fields. `digest`: of the stored disk, which several images may share. `tags`: the
    names by which it was pulled. `repo_digests`: the `name@sha256:...` forms. `size`: bytes of the file as published.
    `virtual_size`: the bytes that the guest sees. `config`: the image's defaults for containers. `boot`: its files
    below /boot. `tree`: its files, if it can be a volume. An image that is not a VM's has only a tree, and `digest`
    names that. `taken`: bytes on disk of all its parts, 0 if they were not counted."""

    id: ImageId
    digest: ImageDigest
    tags: tuple[str, ...]
    repo_digests: tuple[str, ...]
    size: int
    virtual_size: int
    format: DiskFormat
    pulled_at: int
    pinned: bool = False
    config: ImageConfig = ImageConfig()
    boot: tuple[BootFile, ...] = ()
    tree: ImageDigest | None = None
    taken: int = 0

    @property
    def has_disk(self) -> bool:
        return self.digest != self.tree


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that kubelet passes with PullImage. Used for that pull only, never stored, never logged."""

    username: str = ""
    password: str = ""
    auth: str = ""
    server_address: str = ""
    identity_token: str = ""
    registry_token: str = ""

    def __repr__(self) -> str:
        return "Credentials(<hidden>)"


@dataclass(frozen=True, slots=True)
class FilesystemSpace:
    """A file system's size in bytes, and how much of it unprivileged users may still write."""

    capacity: int
    available: int

    @property
    def used_percent(self) -> int:
        """The used percentage as kubelet counts it: rounded up, and space reserved for root counts as used."""
        return 100 - min(self.available, self.capacity) * 100 // self.capacity if self.capacity else 0

    def over(self, percent: int) -> int:
        """Bytes to free until usage is at most this percentage; 0 or less if nothing needs to be freed."""
        return self.capacity * (100 - percent) // 100 - self.available


@dataclass(frozen=True, slots=True)
class FilesystemUsage:
    """Bytes and inodes that virtshim's files take on the file system mounted at `mountpoint`. `timestamp`: nanoseconds.
    `space`: of that file system, if it was read."""

    mountpoint: str
    used_bytes: int
    inodes_used: int
    timestamp: int
    space: FilesystemSpace = FilesystemSpace(0, 0)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Used percentages of the images' file system: from `high` on, unused images are removed until `low` is reached. A
    `high` of 100 turns the removal off."""

    high: int = 100
    low: int = 80
