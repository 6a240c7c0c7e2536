"""What a disk is based on is opened by root, for reading, for the one start."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from virtshim.domain.errors import InternalError, NotFound
from virtshim.hypervisor.chains.open_images import hand_over


class Domain:
    """Takes copies, as libvirt does."""

    def __init__(self) -> None:
        self.got: dict[str, tuple[str, int]] = {}

    def FDAssociate(self, name: str, descriptors: Sequence[int], flags: int) -> None:  # noqa: N802
        (one,) = descriptors
        self.got[name] = (os.readlink(f"/proc/self/fd/{one}"), fcntl.fcntl(one, fcntl.F_GETFL) & os.O_ACCMODE)


def handed_over(*images: tuple[str, str]) -> Domain:
    domain = Domain()
    hand_over(cast("Any", domain), images)
    return domain


def test_each_is_handed_over_for_reading_and_not_kept(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.touch()
    before = os.listdir("/proc/self/fd")
    assert handed_over(("image0", str(image))).got == {"image0": (str(image), os.O_RDONLY)}
    assert os.listdir("/proc/self/fd") == before


def test_one_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"the image {tmp_path}/gone, .* is not there; pull it again"):
        handed_over(("image0", f"{tmp_path}/gone"))


@pytest.mark.hostile
def test_a_link_in_its_place_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "image").symlink_to("/etc/shadow")
    with pytest.raises(InternalError, match=f"the image {tmp_path}/image"):
        handed_over(("image0", f"{tmp_path}/image"))
