"""A pod's annotation asks for empty disks."""

from __future__ import annotations

import pytest

from virtshim.annotations.parse import parse_vm_options
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.volumes.empty_disks import ANNOTATION, MOST, EmptyDisk, command, parse, refuse_clashes

pytestmark = pytest.mark.volumes

GIB = 1 << 30


def test_a_disk_has_a_name_and_a_size_and_maybe_a_format_and_a_place() -> None:
    text = "scratch: {size: 10Gi, mountPath: //var/lib/data/}\nplain: {size: 16777217, format: raw}"
    assert parse_vm_options({ANNOTATION: text}).empty_disks == (
        EmptyDisk("plain", (16 << 20) + 512, DiskFormat.RAW),
        EmptyDisk("scratch", 10 * GIB, DiskFormat.QCOW2, "/var/lib/data"),
    )


def test_without_empty_disks_nothing_is_run_in_the_guest() -> None:
    assert parse("") == ()
    assert command(parse("plain: {size: 1Gi}")) == ()


def test_a_disk_below_another_mount_path_is_mounted_later() -> None:
    disks = parse("a: {size: 1Gi, mountPath: /data/below}\nb: {size: 1Gi, mountPath: /data}")
    assert command(disks)[4:] == ("b", "/data", "a", "/data/below")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a", "not a YAML mapping"),
        ("a: 10Gi", r"a needs size.*write a: \{size: 10Gi\}"),
        ("a: {mountPath: /x}", "a needs size"),
        ("a: {size: 1Gi, path: /x}", "may have format and mountPath"),
        ("a: {size: many}", "a.size: 'many' is not a quantity"),
        ("a: {size: 1Mi}", "write 16Mi or more"),
        ("a: {size: 1Ei}", "a.size: '1Ei' is too large"),
        ("a: {size: 1Gi, format: ext4}", "neither qcow2 nor raw"),
        ("a: {size: 1Gi, format: [raw]}", "neither qcow2 nor raw"),
        ("root: {size: 1Gi}", "'root' cannot be a disk's name"),
        ("../a: {size: 1Gi}", "cannot be a disk's name"),
        (f"{'a' * 21}: {{size: 1Gi}}", "up to 20 lower-case letters"),
        ("a: {size: 1Gi, mountPath: data}", "a.mountPath: must be an absolute path"),
        ("a: {size: 1Gi, mountPath: /a/../etc}", "must be an absolute path without"),
        ('a: {size: 1Gi, mountPath: "/a\\nb"}', "control characters"),
        ("a: {size: 1Gi, mountPath: /}", "use a path such as /data"),
        ("a: {size: 1Gi, mountPath: /proc/a}", "use a path such as /data"),
        ("a: {size: 1Gi, mountPath: /x}\nb: {size: 1Gi, mountPath: /x/}", "requested twice"),
        ("\n".join(f"d{n}: {{size: 1Gi}}" for n in range(MOST + 1)), f"ask for {MOST} at most"),
    ],
)
def test_invalid_disks_are_refused_with_the_annotations_name_and_the_remedy(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"annotation {ANNOTATION}: .*{told}"):
        parse_vm_options({ANNOTATION: text})


@pytest.mark.parametrize("volume", ["/data", "/data/deep"])
def test_a_volume_is_not_mounted_over_an_empty_disk(volume: str) -> None:
    disks = parse("a: {size: 1Gi, mountPath: /data/deep}")
    with pytest.raises(InvalidRequest, match=f"a.mountPath: /data/deep is in the volume at {volume}; use another"):
        refuse_clashes(disks, [volume], [])


def test_a_volume_inside_or_beside_an_empty_disk_is_no_clash() -> None:
    disks = parse("a: {size: 1Gi, mountPath: /data}\nb: {size: 1Gi}")
    refuse_clashes(disks, ["/data/deep", "/database"], ["dev-xvda"])


def test_a_block_volume_may_not_have_an_empty_disks_name() -> None:
    with pytest.raises(InvalidRequest, match="a block volume of the pod is called data"):
        refuse_clashes(parse("data: {size: 1Gi}"), [], ["data"])
