"""Virtlet's flexVolumes are empty disks."""

from __future__ import annotations

import json

import pytest

from virtshim.model.container import Mount
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.volumes.disk_images import flex_volumes_parse
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.pod_mounts import flex_mounts, there, volumes_of

pytestmark = pytest.mark.volumes

HOST = "/var/lib/kubelet/pods/0b5e/volumes/virtlet~flexvolume_driver/scratch"


def disk(volume: str = "scratch", guest: str = "/data", **options: object) -> EmptyDisk:
    return flex_volumes_parse(json.dumps(options).encode(), volume, guest)


def test_a_flex_volume_with_a_capacity_is_an_empty_disk_of_that_size() -> None:
    of_kubelet = {"kubernetes.io/readwrite": "rw", "uuid": "7a6a", "part": "1"}
    assert disk(type="qcow2", capacity="2GiB", **of_kubelet) == EmptyDisk(
        "scratch", 2 << 30, DiskFormat.QCOW2, "/data", is_volume=True
    )
    assert disk(type="raw", capacity="64MiB").format is DiskFormat.RAW


@pytest.mark.parametrize(
    ("capacity", "size"),
    [
        ("1024MB", 1024 * 10**6),
        ("100", 10**8),
        (" 32 M ", 32 << 20),
        ("1G", 1 << 30),
        ("1GB", 10**9),
        ("33554432bytes", 32 << 20),
    ],
)
def test_the_capacity_is_read_as_by_virtlet_and_libvirt(capacity: str, size: int) -> None:
    assert disk(type="qcow2", capacity=capacity).size_bytes == -(-size // 512) * 512


def test_without_a_capacity_virtlets_default_applies() -> None:
    assert disk(type="qcow2").size_bytes == 1024 * 10**6


@pytest.mark.parametrize("name", ["root", "seed", "a-volume-with-a-very-long-name", "a.b", "-"])
def test_a_name_that_no_disk_can_have_is_converted(name: str) -> None:
    found = disk(name, type="qcow2").name
    assert found != name
    assert len(found) <= 20
    assert found == disk(name, type="qcow2").name != disk(f"{name}x", type="qcow2").name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "type 'None' is neither qcow2 nor raw"),
        ({"type": "ceph", "pool": "x"}, "use a PVC of ceph-csi"),
        ({"type": "raw", "path": "/dev/sdb"}, "use a PVC with volumeMode Block"),
        ({"type": "raw"}, "needs capacity"),
        ({"type": "qcow2", "capacity": "much"}, "write 1024MB"),
        ({"type": "qcow2", "capacity": "1XB"}, "write 1024MB"),
        ({"type": "qcow2", "capacity": 7}, "write 1024MB"),
        ({"type": "qcow2", "capacity": "1"}, "are too few"),
        ({"type": "qcow2", "capacity": "1EiB"}, "are too many"),
    ],
)
def test_an_unsupported_flex_volume_is_refused_with_the_mount_and_the_remedy(
    options: dict[str, object], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"config.mounts\[/data\]: .*{told}"):
        disk(**options)


def test_a_reserved_mount_path_or_malformed_options_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"config.mounts\[/proc/x\].container_path: .*cannot be a mount of a disk"):
        disk(guest="/proc/x", type="qcow2")
    with pytest.raises(InvalidRequest, match="not a JSON object"):
        flex_volumes_parse(b"[1]", "a", "/data")
    with pytest.raises(InvalidRequest, match="not a JSON object"):
        flex_volumes_parse(b"[" * 100_000, "a", "/data")


def test_a_flex_volumes_mount_is_not_shared_from_the_node() -> None:
    mount = Mount("/data/", HOST)
    assert flex_mounts([mount, Mount("/x", "/srv")], {}, "0b5e") == [("/data", HOST)]
    assert volumes_of([mount], {}, "0b5e") == ((), ())
    assert there([mount], {}, []) == [mount]


def test_another_pods_flex_volume_is_an_ordinary_host_directory() -> None:
    assert flex_mounts([Mount("/data", HOST)], {}, "another") == []
    assert volumes_of([Mount("/data", HOST)], {}, "another")[0] != ()
