"""QEMU by hand: the image booted without libvirt, network or cloud-init."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path


def boot_ms(image: Path) -> float:
    """From the start of the process to the guest's first byte on the serial console."""
    with tempfile.TemporaryDirectory(prefix="bare-qemu-") as directory:
        log = f"{directory}/serial"
        argv = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-m", "64", "-display", "none",
                "-nodefaults", "-no-user-config", "-serial", f"file:{log}", "-device", "virtio-scsi-pci",
                "-drive", f"file={image},format=qcow2,if=none,id=root,snapshot=on", "-device", "scsi-hd,drive=root"]  # fmt: skip
        started = time.monotonic()
        process = subprocess.Popen(argv)
        try:
            while not (os.path.exists(log) and os.path.getsize(log)):
                if time.monotonic() - started > 60 or process.poll() is not None:
                    raise TimeoutError("the null guest wrote nothing under plain QEMU")
                time.sleep(0.001)
            return (time.monotonic() - started) * 1000
        finally:
            process.kill()
            process.wait()
