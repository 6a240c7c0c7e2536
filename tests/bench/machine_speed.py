"""Measures the machine's own speed, without virtshim: a bare QEMU's boot, a sync, a fork. A slow day shows there."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from bare_qemu import boot_ms
from figures import Figures, timed

_TIMES = 20
_BLOCK = bytes(4096)


def machine_round(guest: Path, directory: str, figures: Figures) -> None:
    """`directory`: on the disk whose syncs are measured, the node's."""
    figures.add("machine_boot_ms", boot_ms(guest, 128 << 20, b"virtshim-guest: ready"), "ms")
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(_TIMES):
            file.write(_BLOCK)
            figures.add("machine_sync_ms", timed(lambda: os.fsync(file.fileno())), "ms")
    for _ in range(_TIMES):
        figures.add("machine_fork_ms", timed(lambda: subprocess.run(["/bin/true"], check=True)), "ms")
