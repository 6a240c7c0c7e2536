"""Root opens the images below a disk, read-only and for one start."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from leaks import OpenedSince

from virtshim.model.errors import InternalError, NotFound
from virtshim.vm.disk_chains import hand_over_images, volumes_handed_over


class Domain:
    """Takes copies, as libvirt does."""

    def __init__(self) -> None:
        self.got: dict[str, tuple[str, int]] = {}

    def FDAssociate(self, name: str, descriptors: Sequence[int], flags: int) -> None:  # noqa: N802
        (one,) = descriptors
        self.got[name] = (os.readlink(f"/proc/self/fd/{one}"), fcntl.fcntl(one, fcntl.F_GETFL) & os.O_ACCMODE)


def handed_over(*images: tuple[str, str]) -> Domain:
    domain = Domain()
    hand_over_images(cast("Any", domain), images)
    return domain


def test_each_image_is_handed_over_for_reading_and_closed_afterwards(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.touch()
    opened = OpenedSince()
    assert handed_over(("image0", str(image))).got == {"image0": (str(image), os.O_RDONLY)}
    assert opened.count() == 0


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"the image {tmp_path}/gone, .* does not exist; pull it again"):
        handed_over(("image0", f"{tmp_path}/gone"))


@pytest.mark.hostile
def test_a_link_in_place_of_an_image_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "image").symlink_to("/etc/shadow")
    with pytest.raises(InternalError, match=f"the image {tmp_path}/image"):
        handed_over(("image0", f"{tmp_path}/image"))


@pytest.mark.volumes
def test_a_disk_in_a_volume_is_handed_over_with_its_access_mode_for_the_start_only(tmp_path: Path) -> None:
    for name in ("written", "read"):
        (tmp_path / name).touch()
    opened = OpenedSince()
    domain = Domain()
    volumes = [("volume1", f"{tmp_path}/written", False), ("volume2", f"{tmp_path}/read", True)]
    with volumes_handed_over(cast("Any", domain), volumes):
        got = dict(domain.got)
    assert got == {"volume1": (f"{tmp_path}/written", os.O_RDWR), "volume2": (f"{tmp_path}/read", os.O_RDONLY)}
    assert {path for path, _ in domain.got.values()} == {"/dev/null"}
    assert opened.count() == 0


@pytest.mark.volumes
def test_a_failed_start_leaves_libvirt_no_disk_of_a_volume(tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    domain = Domain()
    with (
        pytest.raises(ValueError, match="no start"),
        volumes_handed_over(cast("Any", domain), [("v", f"{tmp_path}/disk", False)]),
    ):
        raise ValueError("no start")
    with pytest.raises(NotFound, match="a disk of the VM, does not exist any more"):
        volumes_handed_over(cast("Any", domain), [("w", f"{tmp_path}/gone", False)]).__enter__()
    assert {path for path, _ in domain.got.values()} == {"/dev/null"}


@pytest.mark.hostile
def test_a_link_or_fifo_in_place_of_a_disk_in_a_volume_is_not_handed_over(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "fifo")
    domain = Domain()
    for name in ("link", "fifo"):
        with pytest.raises(InternalError, match=f"{tmp_path}/{name}, which is a disk of the VM"):
            volumes_handed_over(cast("Any", domain), [("v", f"{tmp_path}/{name}", True)]).__enter__()
    assert {path for path, _ in domain.got.values()} == {"/dev/null"}
