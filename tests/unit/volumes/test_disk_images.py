"""A pod names the volumes that are disks, because they hold a disk's image."""

from __future__ import annotations

import pytest

from virtshim.annotations.parse import parse_vm_options
from virtshim.model.container import Mount
from virtshim.model.errors import InvalidRequest
from virtshim.volumes.disk_images import DISK_IMAGES_ANNOTATION, disk_images_parse
from virtshim.volumes.pod_mounts import image_mounts, volumes_of
from virtshim.volumes.shares import SharedVolume

pytestmark = pytest.mark.volumes


def test_the_pod_names_disk_images_by_their_mount_paths() -> None:
    assert parse_vm_options({DISK_IMAGES_ANNOTATION: "/data\n\n  //srv/b/ \n"}).disk_images == ("/data", "/srv/b")
    assert disk_images_parse("") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data", "not an absolute path"),
        ("/a/../b", "not an absolute path"),
        ("/data\n/data/", "/data is listed twice"),
        ("//", "devicePath / in volumeDevices"),
        ("\n".join(f"/d{n}" for n in range(25)), "name 24 at most"),
    ],
)
def test_a_value_that_is_no_mount_path_is_refused_with_the_remedy(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"annotation {DISK_IMAGES_ANNOTATION}: .*{told}"):
        parse_vm_options({DISK_IMAGES_ANNOTATION: text})


def test_a_disk_image_volume_is_not_shared_and_others_are() -> None:
    mounts = [Mount("/data/", "/pods/1/a", readonly=True), Mount("/other", "/pods/1/b")]
    assert volumes_of(mounts, {}, images=("/data",)) == ((SharedVolume("/other", "/pods/1/b"),), ())
    assert image_mounts(mounts, {}, "", ("/data", "/none")) == [(Mount("/data", "/pods/1/a", readonly=True), True)]
