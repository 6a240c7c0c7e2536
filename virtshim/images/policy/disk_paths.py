"""Where the disks of containerDisks are that others packed in their own way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.images.confined.frames import DEFAULT_PLACE
from virtshim.images.names import RegistryLocation
from virtshim.images.policy.origins import is_below, origin_of


@dataclass(frozen=True, slots=True)
class DiskPath:
    """`prefix`: of origins; `path`: absolute, of the disk or of the directory in which it is alone."""

    prefix: str
    path: str


def place_of_disk(paths: Sequence[DiskPath], location: RegistryLocation) -> str:
    """By the longest prefix; without a slash at its beginning."""
    about = [one for one in paths if is_below(origin_of(location), one.prefix)]
    return max(about, key=lambda one: len(one.prefix)).path.strip("/") if about else DEFAULT_PLACE
