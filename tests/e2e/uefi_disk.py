"""The small guest as a UEFI disk: kernel, command line and initramfs in one program at UEFI's default path."""

from __future__ import annotations

import subprocess
from pathlib import Path

_STUB = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub"
_MIB = 1 << 20


def make(guest: Path, made: Path) -> None:
    """Makes the disk. `guest`: the small guest's BIOS disk."""
    folder = made.parent
    raw = folder / "bios.raw"
    _run("qemu-img", "convert", "-O", "raw", str(guest), str(raw))
    for name in ("vmlinuz", "initramfs", "syslinux.cfg"):
        _run("mcopy", "-n", "-i", str(raw), f"::{name}", str(folder / name))
    raw.unlink()
    words = (folder / "syslinux.cfg").read_text().split("APPEND", 1)[1].strip()
    (folder / "cmdline").write_text(words)
    program, image = folder / "BOOTX64.EFI", folder / "uefi.raw"
    sections = ((".cmdline", "cmdline", 0x30000), (".linux", "vmlinuz", 0x2000000), (".initrd", "initramfs", 0x3000000))
    options = [
        word
        for section, name, at in sections
        for word in ("--add-section", f"{section}={folder / name}", "--change-section-vma", f"{section}={at:#x}")
    ]
    _run("objcopy", *options, _STUB, str(program))
    _run("mkfs.vfat", "-C", "-F", "16", str(image), str((program.stat().st_size // _MIB + 8) * 1024))
    _run("mmd", "-i", str(image), "::EFI", "::EFI/BOOT")
    _run("mcopy", "-i", str(image), str(program), "::EFI/BOOT/BOOTX64.EFI")
    _run("qemu-img", "convert", "-O", "qcow2", str(image), str(made))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
