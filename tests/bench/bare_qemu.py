"""QEMU started by hand: the image with one disk, one network card and a serial console, without libvirt and cloud-init.
QEMU's own network answers DHCP at once."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from bare import ask, connected


def boot_ms(image: Path, memory: int, word: bytes) -> float:
    """Milliseconds from the start of the guest's CPUs until `word` is on the console. `memory`: bytes."""
    with tempfile.TemporaryDirectory(prefix="bare-qemu-", dir="/var/tmp") as directory:
        disk, console, monitor = (f"{directory}/{name}" for name in ("disk", "console", "monitor"))
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", disk], check=True)
        argv = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", f"{memory >> 20}",
                "-display", "none", "-nodefaults", "-no-user-config", "-S", "-qmp", f"unix:{monitor},server,nowait",
                "-drive", f"file={disk},format=qcow2,if=virtio", "-serial", f"file:{console}",
                "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]  # fmt: skip
        process = subprocess.Popen(argv)
        try:
            with connected(monitor, process) as file:
                ask(file, "cont")
                return said_ms(console, word, time.monotonic())
        finally:
            process.kill()
            process.wait()


def said_ms(console: str, word: bytes, started: float) -> float:
    """Until `word` is in the console's log."""
    while word not in Path(console).read_bytes():
        if time.monotonic() - started > 300:
            raise TimeoutError(f"the guest did not say {word.decode()!r}")
        time.sleep(0.005)
    return (time.monotonic() - started) * 1000
