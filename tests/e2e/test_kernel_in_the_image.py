"""BIOS and UEFI start a VM whose kernel and initial RAM disk are files of an image without a disk."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from guest import BOOT, READY
from imageserver import Registry, push_container_disk
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.images]

ARGUMENTS = (
    "console=ttyS0,115200 loglevel=6 mitigations=off nokaslr tsc=reliable no_timer_check net.ifnames=0 x=a,b,,c /etc"
)

ANNOTATIONS = {
    "virtshim.io/kernel": "/boot/vmlinuz",
    "virtshim.io/initrd": "/boot/initramfs",
    "virtshim.io/kernel-args": ARGUMENTS,
}


@pytest.fixture
def kernel_image(oci_registry: Registry, guest_image: Path, tmp_path: Path) -> str:
    """The reference of an image with the small guest's kernel."""
    subprocess.run(["qemu-img", "convert", "-O", "raw", guest_image, tmp_path / "raw"], check=True)
    files = [tmp_path / name for name in ("vmlinuz", "initramfs")]
    for file in files:
        subprocess.run(["mcopy", "-n", "-i", tmp_path / "raw", f"::{file.name}", file], check=True)
    (tmp_path / "raw").unlink()
    push_container_disk(oci_registry.address, "vms/kernel", None, boot=files)
    return f"{oci_registry.address}/vms/kernel:latest"


def test_a_kernel_of_the_image_starts_with_the_pods_command_line(cri: PodClient, node: Node, kernel_image: str) -> None:
    config = pod_config("kernel", f"{node.directory}/logs/kernel", annotations=ANNOTATIONS)
    image = cri.pull(kernel_image)
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(image), config)
    own = sorted(Path(node.directory, "state", "containers", container).glob("kernel-*"))
    owners = {file.stat().st_uid for file in own}
    assert (len(own), len(owners), [file.stat().st_mode & 0o777 for file in own]) == (2, 1, [0o400, 0o400])
    assert owners != {0}, "its VM's own user"
    cri.start(container)
    wait_for_log(cri.status(container).log_path, READY, BOOT)
    assert cri.exec_sync(container, "cat", "/proc/cmdline").stdout.decode().strip() == ARGUMENTS
    assert "SYSLINUX" not in "\n".join(log_lines(cri.status(container).log_path))
    assert cri.exec_sync(container, "cat", "/sys/class/block/vda/size").stdout == b"2048\n"
    cri.remove_pod(pod)
    assert not any(file.exists() for file in own)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_uefi_starts_a_kernel_of_the_image_with_the_pods_command_line(
    cri: PodClient, node: Node, kernel_image: str
) -> None:
    annotations = {**ANNOTATIONS, "virtshim.io/firmware": "uefi"}
    config = pod_config("kernel-uefi", f"{node.directory}/logs/kernel-uefi", annotations=annotations)
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(cri.pull(kernel_image), memory=256 << 20), config)
    cri.start(container)
    wait_for_log(cri.status(container).log_path, READY, 3 * BOOT)
    assert cri.exec_sync(container, "test", "-d", "/sys/firmware/efi").exit_code == 0
    # The last words are OVMF's, for kernels that look for their initrd there.
    told = cri.exec_sync(container, "cat", "/proc/cmdline").stdout.decode().strip()
    assert told == f"{ARGUMENTS} initrd=initrd"
    assert cri.exec_sync(container, "cat", "/sys/class/block/vda/size").stdout == b"2048\n"
    cri.remove_pod(pod)
