"""Loop devices, if the machine can have them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def no_loop_devices() -> dict[str, Any]:
    """The reason for pytest's skipif."""
    is_there = os.geteuid() == 0 and os.path.exists("/dev/loop-control")
    return {"condition": not is_there, "reason": "NOT TO BE HAD HERE: no loop devices, or no root"}


@contextlib.contextmanager
def loop_device(file: Path) -> Iterator[Path]:
    """A loop device that is detached at once: the kernel frees it with its last user, so none outlives a killed test."""
    device = _attached(file)
    held = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        subprocess.run(["losetup", "--detach", device], check=True)
        yield device
    finally:
        os.close(held)


def _attached(file: Path) -> Path:
    """Tries several devices, because concurrent tests may take one that was free a moment ago."""
    said = ""
    for _ in range(10):
        done = subprocess.run(
            ["losetup", "--find", "--show", file], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            return Path(done.stdout.strip())
        said = done.stderr
    raise AssertionError(f"no loop device for {file}: {said}")
