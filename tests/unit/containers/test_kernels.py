"""A VM keeps the kernel of its image even if the image is removed."""

from __future__ import annotations

import pytest
from fakes.images import Published
from fakes.world import IMAGE, World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import Firmware
from virtshim.model.ids import ImageDigest, SandboxId
from virtshim.model.image import NO_DISK_BYTES, BootFile
from virtshim.model.image_name import ImageName
from virtshim.model.vm import OffReason, VmSpec

KERNEL = "virtshim.io/kernel"
INITRD = "virtshim.io/initrd"
ARGS = "virtshim.io/kernel-args"
BOTH = {KERNEL: "/boot/vmlinuz", INITRD: "/boot/initrd.img"}
KEEP = {"virtshim.io/root-disk": "pod"}


def digest(word: str) -> ImageDigest:
    return ImageDigest(f"sha256:{word * 64}")


def publish(world: World, kernel: str, initrd: str, content: bytes = b"a disk") -> None:
    boot = (BootFile("/boot/initrd.img", digest(initrd), 3), BootFile("/boot/vmlinuz", digest(kernel), 4))
    world.outside.files.published[ImageName.parse(IMAGE).tagged] = Published(content, boot=boot)
    world.pull(IMAGE)


def vm(world: World, sandbox: SandboxId, attempt: int = 0) -> VmSpec:
    """Of a container that has run and ended."""
    container = world.create(sandbox, attempt=attempt)
    spec = world.outside.vms.spec(world.domain(container))
    world.start(container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    return spec


def copies(world: World, spec: VmSpec) -> list[str]:
    return [world.outside.kernels.copies[path] for path in (spec.kernel_file, spec.initrd_file)]


def test_a_vm_has_its_own_copies_of_kernel_and_ram_disk(world: World) -> None:
    publish(world, "a", "b")
    sandbox = world.run(config=sandbox_config(annotations=BOTH | {ARGS: "console=ttyS0"}))
    first, second = vm(world, sandbox), vm(world, sandbox, 1)
    assert first.hardware.kernel_args == "console=ttyS0"
    assert copies(world, first) == copies(world, second) == [f"/images/boot/{word * 64}" for word in "ab"]
    assert len({first.kernel_file, first.initrd_file, second.kernel_file, second.initrd_file}) == 4
    assert f"/containers/{first.container_id}/" in first.kernel_file


def test_a_kernel_may_boot_without_a_ram_disk_and_by_uefi(world: World) -> None:
    publish(world, "a", "b")
    uefi = {"virtshim.io/firmware": "uefi", KERNEL: "/boot/vmlinuz"}
    spec = vm(world, world.run(config=sandbox_config(annotations=uefi)))
    assert (spec.hardware.firmware, spec.initrd_file, bool(spec.kernel_file)) == (Firmware.UEFI, "", True)


def test_a_kept_disk_keeps_its_kernel(world: World) -> None:
    publish(world, "a", "b")
    config = sandbox_config(annotations=BOTH | KEEP)
    sandbox = world.run(config=config)
    first = vm(world, sandbox)
    publish(world, "c", "d", b"a newer disk")
    second = vm(world, sandbox, 1)
    world.stop_sandbox(sandbox)
    later = vm(world, world.run(attempt=1, config=config), 2)
    files = {(spec.kernel_file, spec.initrd_file) for spec in (first, second, later)}
    assert len(files) == 1
    assert copies(world, later) == [f"/images/boot/{word * 64}" for word in "ab"]
    assert "/pods/" in first.kernel_file


def test_a_pod_on_a_kept_disk_may_ask_for_another_kernel(world: World) -> None:
    publish(world, "a", "b")
    first = vm(world, world.run(config=sandbox_config(annotations=KEEP | {KERNEL: "/boot/vmlinuz"})))
    other = KEEP | {KERNEL: "/boot/initrd.img"}
    later = vm(world, world.run(attempt=1, config=sandbox_config(annotations=other)), 1)
    assert first.kernel_file != later.kernel_file


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (
            {KERNEL: "/boot/x"},
            "annotation virtshim.io/kernel: image .* no file /boot/x; it has /boot/initrd.img, /boot/vmlinuz",
        ),
        (BOTH | {INITRD: "/boot/x"}, "annotation virtshim.io/initrd: image .* has no file /boot/x"),
        ({INITRD: "/boot/initrd.img"}, "annotation virtshim.io/initrd: there is no kernel for it"),
        ({ARGS: "quiet"}, "annotation virtshim.io/kernel-args: there is no kernel for it"),
        (BOTH | {"virtshim.io/firmware": "uefi-secure"}, "annotation virtshim.io/kernel: with secure boot"),
        ({KERNEL: "/vmlinuz"}, "annotation virtshim.io/kernel: '/vmlinuz' is not a file of the image's /boot"),
        ({KERNEL: "/boot/../etc/x"}, "is not a file of the image's /boot; write one like /boot/vmlinuz"),
        (BOTH | {ARGS: "a\nb"}, "is not a kernel command line"),
        (BOTH | {ARGS: "-device"}, "not beginning with -"),
        (BOTH | {ARGS: "a" * 2048}, "at most 2047"),
        (BOTH | {ARGS: "ü"}, "printable ASCII"),
    ],
)
def test_a_kernel_that_cannot_be_booted_is_refused_and_the_annotation_named(
    world: World, annotations: dict[str, str], words: str
) -> None:
    publish(world, "a", "b")
    with pytest.raises(InvalidRequest, match=words):
        world.create(world.run(config=sandbox_config(annotations=annotations)))
    assert world.outside.vms.domains == {}


def test_the_error_for_an_image_without_kernels_says_so(world: World) -> None:
    with pytest.raises(InvalidRequest, match="has no file /boot/vmlinuz; it has none there"):
        world.create(world.run(config=sandbox_config(annotations=BOTH)))


def test_an_image_with_kernels_only_is_not_booted_from_its_empty_disk(world: World) -> None:
    publish(world, "a", "b", bytes(NO_DISK_BYTES))
    with pytest.raises(InvalidRequest, match=r"no disk to boot from; name .*virtshim.io/kernel; .* /boot/vmlinuz"):
        world.create(world.run())
    assert vm(world, world.run("other", config=sandbox_config(annotations=BOTH))).kernel_file


def test_no_kept_disk_is_made_from_an_image_that_cannot_boot(world: World) -> None:
    publish(world, "a", "b")
    with pytest.raises(InvalidRequest, match="no file /boot/x"):
        world.create(world.run(config=sandbox_config(annotations=KEEP | {KERNEL: "/boot/x"})))
    assert world.outside.disks.pod_disks == {}


def test_a_kernel_is_refused_for_a_vm_that_boots_from_a_volume(world: World) -> None:
    publish(world, "a", "b")
    sandbox = world.run(config=sandbox_config(annotations=BOTH))
    with pytest.raises(InvalidRequest, match=r"annotation virtshim.io/kernel: a volume at devicePath / has no place"):
        world.create(sandbox, config=container_config(devices=(CriDevice("/dev/block/pv", "/"),)))
