"""Annotations about a VM's hardware. Pure. The table in docs/annotations.md is made of `ANNOTATIONS`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from virtshim.annotations.options import flag, one_of, shown
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import Cache, Clock, DiskIo, Firmware, HardwareOptions, NicModel, Topology, Video

FIRMWARE: Final = "virtshim.io/firmware"
TPM: Final = "virtshim.io/tpm"
CACHE: Final = "virtshim.io/disk-cache"
IO: Final = "virtshim.io/disk-io"
NIC_MODEL: Final = "virtshim.io/nic-model"
VIDEO: Final = "virtshim.io/video"
TOPOLOGY: Final = "virtshim.io/cpu-topology"
KERNEL: Final = "virtshim.io/kernel"
INITRD: Final = "virtshim.io/initrd"
KERNEL_ARGS: Final = "virtshim.io/kernel-args"

_MOST_OF_A_TOPOLOGY: Final = 255
# The files of an image that a pull keeps (`virtshim.images.confined.frames`).
_BOOT_PATH: Final = re.compile("/boot/[A-Za-z0-9_+][A-Za-z0-9._+-]{0,199}")
# Linux's limit on x86 without the final zero byte.
_MOST_ARGS: Final = 2047
_TOPOLOGY: Final = re.compile(r"([1-9][0-9]{0,2})x([1-9][0-9]{0,2})x([1-9][0-9]{0,2})")


@dataclass(frozen=True, slots=True)
class Annotation:
    """`field`: of HardwareOptions. `values`, `default` and `meaning`: for people, in Markdown. `example`: a valid value other
    than the default. `read`: makes the field's value of the text; its InvalidRequest has the fault and the remedy."""

    name: str
    field: str
    values: str
    default: str
    meaning: str
    example: str
    read: Callable[[str], Any]


def _choice(name: str, field: str, default: Enum, meaning: str) -> Annotation:
    """One of the words of the default's Enum. An empty text means the default."""
    kinds = {str(kind.value): kind for kind in type(default)}
    example = next(word for word, kind in kinds.items() if kind is not default)
    read = one_of({"": default, **kinds}, f"none of {', '.join(kinds)}; write one of them, or remove it")
    words = ", ".join(f"`{word}`" for word in kinds)
    return Annotation(name, field, words, f"`{default.value}`", meaning, example, read)


def _flag(name: str, field: str, meaning: str) -> Annotation:
    return Annotation(name, field, "`true`, `false`", "`false`", meaning, "true", flag)


def _topology(text: str) -> Topology | None:
    if not text:
        return None
    found = _TOPOLOGY.fullmatch(text)
    if found is None or (topology := Topology(*map(int, found.groups()))).count > _MOST_OF_A_TOPOLOGY:
        raise InvalidRequest(
            f"{shown(text)} is not SOCKETSxCORESxTHREADS; write one like 1x2x2, at most {_MOST_OF_A_TOPOLOGY} in all"
        )
    return topology


def _boot_file(example: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text and not _BOOT_PATH.fullmatch(text):
            raise InvalidRequest(f"{shown(text)} is not a file of the image's /boot; write one like {example}")
        return text

    return read


def _kernel_args(text: str) -> str:
    """The arguments are a word of QEMU's command line, which vmwrapper reads."""
    if not (text.isascii() and (text == "" or text.isprintable())) or len(text) > _MOST_ARGS or text.startswith("-"):
        raise InvalidRequest(
            f"{shown(text)} is not a kernel command line; write printable ASCII, at most {_MOST_ARGS} characters, not "
            "beginning with -"
        )
    return text


ANNOTATIONS: Final[tuple[Annotation, ...]] = (
    _choice(
        FIRMWARE,
        "firmware",
        Firmware.BIOS,
        "what starts the guest ([UEFI and TPM](hardware.md#uefi-and-tpm))",
    ),
    _flag(TPM, "tpm", "a TPM 2.0 ([UEFI and TPM](hardware.md#uefi-and-tpm))"),
    _choice(
        CACHE,
        "cache",
        Cache.WRITEBACK,
        "how QEMU writes files that are disks: `none` bypasses the node's page cache, `writethrough` waits for each write, "
        "`directsync` does both. `none` and `directsync` need a file system with O_DIRECT. Block volumes are always `none`, "
        "[disk images on volumes](images.md#a-disk-in-a-file-system) always `writeback`",
    ),
    _choice(
        IO,
        "io",
        DiskIo.THREADS,
        f"what writes files that are disks: QEMU's threads, or the kernel's AIO; `native` needs `{CACHE}` `none` or `directsync`",
    ),
    _choice(
        NIC_MODEL,
        "nic_model",
        NicModel.VIRTIO,
        "the model of the pod's NICs, for guests without virtio drivers. Devices of the host keep their own model",
    ),
    _choice(
        VIDEO,
        "video",
        Video.VGA,
        "the video card of `virtshim.io/vnc`; without that annotation `virtio` is refused",
    ),
    Annotation(
        "virtshim.io/watchdog",
        "watchdog",
        "`reset`",
        "none",
        "an i6300esb watchdog: if the guest's watchdog daemon stops feeding it, the guest is reset",
        "reset",
        one_of(
            {"": False, "reset": True},
            "not a watchdog action; write reset, or remove it (ending the VM would look like the guest's end)",
        ),
    ),
    Annotation(
        TOPOLOGY,
        "topology",
        "`SOCKETSxCORESxTHREADS`",
        "one socket, one thread per core",
        "how the guest sees its vCPUs. The product must be the maximum number of vCPUs of the VM (`virtshim.io/max-vcpus`; the "
        "node's `vm.room_vcpus` does not count). Some systems are licensed by sockets",
        "1x1x1",
        _topology,
    ),
    _flag(
        "virtshim.io/hyperv",
        "hyperv",
        "Hyper-V's enlightenments, which Windows uses. Without KVM the VM has none",
    ),
    _choice(
        "virtshim.io/clock",
        "clock",
        Clock.UTC,
        "the time of the hardware clock at the start. Windows expects local time (of the node's time zone)",
    ),
    _flag(
        "virtshim.io/tablet", "tablet", "a USB tablet, which keeps the screen's pointer where the viewer's pointer is"
    ),
    Annotation(
        KERNEL,
        "kernel",
        "`/boot/NAME`",
        "none",
        "a kernel of the image, started in place of a boot loader ([a kernel in the image](hardware.md#a-kernel-in-the-image))",
        "/boot/vmlinuz",
        _boot_file("/boot/vmlinuz"),
    ),
    Annotation(
        INITRD,
        "initrd",
        "`/boot/NAME`",
        "none",
        f"the kernel's initial RAM disk; needs `{KERNEL}`",
        "/boot/initrd.img",
        _boot_file("/boot/initrd.img"),
    ),
    Annotation(
        KERNEL_ARGS,
        "kernel_args",
        "text",
        "none",
        f"the kernel's command line; needs `{KERNEL}`. Without `console=ttyS0` the container's log stays empty",
        "console=ttyS0 root=/dev/vda1",
        _kernel_args,
    ),
)


def refuse_unfit_annotations(
    options: HardwareOptions, *, on_volume: bool, vcpus: int, screen: bool, queues: int
) -> None:
    """Raises InvalidRequest for options that cannot go together. `on_volume`: whether the VM boots from a block volume,
    which has no room for what firmware and TPM remember, so that their state would not follow the volume to another
    node. `vcpus`: the most that it can ever have. `screen`: whether it has one. `queues`: requested for each NIC, 0 if
    the pod does not say."""
    if options.io is DiskIo.NATIVE and not options.cache.is_direct:
        raise InvalidRequest(f"annotation {IO}: native needs {CACHE} none or directsync; write it, or remove this one")
    if options.topology is not None and options.topology.count != vcpus:
        raise InvalidRequest(
            f"annotation {TOPOLOGY}: it has {options.topology.count} vCPUs, but the VM can have {vcpus}; "
            "make the product the same, or remove it"
        )
    if options.video is not Video.VGA and not screen:
        raise InvalidRequest(
            f'annotation {VIDEO}: a video card needs a screen; write virtshim.io/vnc: "true", or remove this annotation'
        )
    if options.nic_model is not NicModel.VIRTIO and queues > 1:
        raise InvalidRequest(
            f"annotation virtshim.io/nic-queues: a NIC of {NIC_MODEL} {options.nic_model.value} has one queue; remove "
            "one of the two"
        )
    _refuse_kernel(options)
    if on_volume:
        _refuse_state(options)


def _refuse_kernel(options: HardwareOptions) -> None:
    for name, value in ((INITRD, options.initrd), (KERNEL_ARGS, options.kernel_args)):
        if value and not options.kernel:
            raise InvalidRequest(f"annotation {name}: there is no kernel for it; write {KERNEL}, or remove it")
    if options.kernel and options.firmware is Firmware.SECURE:
        raise InvalidRequest(
            f"annotation {KERNEL}: with secure boot the firmware only starts signed programs on a disk, no separate kernel; "
            f"write {FIRMWARE} uefi, or remove it"
        )


def _refuse_state(options: HardwareOptions) -> None:
    remedy = "boot from a disk of the node (virtshim.io/root-disk: pod), or remove the annotation"
    if options.firmware.is_uefi:
        raise InvalidRequest(
            f"annotation {FIRMWARE}: a volume at devicePath / has no place for UEFI's variables; {remedy}"
        )
    if options.kernel:
        raise InvalidRequest(
            f"annotation {KERNEL}: a volume at devicePath / has no place for the kernel that belongs to it; {remedy}"
        )
    if options.tpm:
        raise InvalidRequest(f"annotation {TPM}: a volume at devicePath / has no place for a TPM's state; {remedy}")


def table() -> str:
    """The Markdown table of the page."""
    rows = [f"| `{one.name}` | {one.values} | {one.default} | {one.meaning} |" for one in ANNOTATIONS]
    return "\n".join(["| annotation | values | default | meaning |", "|---|---|---|---|", *rows])
