"""Shared volumes: their values, and which paths in the guest they may have. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.text import escaped

# The tag by which the guest finds the device that serves all of them.
TAG: Final = "virtshim"
MOST_SHARES: Final = 256
_LONGEST_PATH: Final = 4095
# The guest's own directories.
_NEVER: Final = ("/", "/proc", "/sys", "/dev", "/run")
_NEVER_BELOW: Final = ("/proc/", "/sys/")


@dataclass(frozen=True, slots=True)
class VolumeImage:
    """An image that is a volume: its files, its id, and the image_ref that CRI shows."""

    tree: ImageDigest
    id: ImageId
    image_ref: str


@dataclass(frozen=True, slots=True)
class SharedVolume:
    """`guest`: its normalized path in the guest. `follows`: whether the guest sees what the node mounts below it later.
    `image`: whose files these are; they stay as long as the container's record."""

    guest: str
    host: str
    readonly: bool = False
    follows: bool = False
    image: VolumeImage | None = None


class Placed(Protocol):
    """A volume of any kind, with its place."""

    @property
    def guest(self) -> str: ...
    @property
    def host(self) -> str: ...


def check_shares(volumes: Iterable[Placed]) -> Sequence[str]:
    """The faults of the volumes; each names the path."""
    volumes = list(volumes)
    faults = [fault for volume in volumes[: MOST_SHARES + 1] if (fault := _fault(volume))]
    paths = [volume.guest for volume in volumes]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    faults += [f"config.mounts[{escaped(path, 200)}] is requested twice; remove one" for path in twice[:10]]
    if len(volumes) > MOST_SHARES:
        faults.append(f"config.mounts: {len(volumes)} volumes; a virtual machine has at most {MOST_SHARES}")
    return faults


def refuse_odd(volumes: Iterable[Placed]) -> None:
    """Raises InvalidRequest."""
    if faults := check_shares(volumes):
        raise InvalidRequest("; ".join(faults))


def _fault(volume: Placed) -> str:
    where = f"config.mounts[{escaped(volume.guest, 200)}]"
    for name, path in (("container_path", volume.guest), ("host_path", volume.host)):
        if not path.startswith("/") or "\0" in path or len(path.encode(errors="replace")) > _LONGEST_PATH:
            return f"{where}.{name}: must be an absolute path of at most {_LONGEST_PATH} bytes"
    if volume.guest in _NEVER or volume.guest.startswith(_NEVER_BELOW):
        return f"{where}: the guest's own {volume.guest.split('/')[1] or 'root directory'} cannot be a volume; use another path"
    return ""
