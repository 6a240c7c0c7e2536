"""VM images: what the store holds and how callers name them."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Final

from virtshim.model.ids import ImageDigest, ImageId

# Of a container whose record cannot be read. No content has it.
UNKNOWN_IMAGE = ImageDigest(f"sha256:{'0' * 64}")


class DiskFormat(enum.Enum):
    QCOW2 = "qcow2"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A download: bytes as the source sends them, `total` 0 while that is not known; `began_at` in nanoseconds since the
    epoch."""

    image: str
    received: int
    total: int
    began_at: int


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an OCI image says of the containers made of it. A plain disk image says nothing."""

    # As in the Dockerfile: a name or a number, and maybe a group behind a colon.
    user: str = ""
    # NAME=VALUE each.
    env: tuple[str, ...] = field(default=(), repr=False)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    working_dir: str = ""
    # `SIGTERM`, `SIGRTMIN+3`; "" if it does not say.
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
    """A kernel, or what one is started with: `path` in the image, digest and bytes of what is there."""

    path: str
    digest: ImageDigest
    size: int


# The disk of an image that has kernels and none of its own: all zeros.
NO_DISK_BYTES: Final = 1 << 20
NO_DISK: Final = ImageDigest(f"sha256:{hashlib.sha256(bytes(NO_DISK_BYTES)).hexdigest()}")


@dataclass(frozen=True, slots=True)
class Image:
    """`id` is the image id in all CRI fields; `digest` names the stored disk, which several images may share; `tags` are the
    names by which it was pulled, `repo_digests` the `name@sha256:...` forms; `size` is bytes of the file as published,
    `virtual_size` the guest-visible bytes; `config` what it says of containers; `boot` what it has below /boot; `tree` its files,
    if a volume can have them. Of an image that is no VM's they are all there is: `digest` names them, too. `taken`: bytes on disk
    of all of it, 0 if nobody has counted them."""

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
    """What kubelet passes with PullImage; used for that one pull, never stored, never logged."""

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
    """Bytes of a file system, and what of them everybody may still write."""

    capacity: int
    available: int

    @property
    def used_percent(self) -> int:
        """As kubelet counts it: rounded up; what is kept for root counts as used."""
        return 100 - min(self.available, self.capacity) * 100 // self.capacity if self.capacity else 0

    def over(self, percent: int) -> int:
        """Bytes to be freed until no more than this is used; 0 or less if nothing is."""
        return self.capacity * (100 - percent) // 100 - self.available


@dataclass(frozen=True, slots=True)
class FilesystemUsage:
    """Bytes and inodes that our files take on the file system mounted at `mountpoint`; `timestamp` in ns. `space`: of that file
    system, where it was asked for."""

    mountpoint: str
    used_bytes: int
    inodes_used: int
    timestamp: int
    space: FilesystemSpace = FilesystemSpace(0, 0)
