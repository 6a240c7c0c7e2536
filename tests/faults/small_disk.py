"""A small file system that can be filled to the last block, and broken so that the kernel makes it read-only."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

_MIB = 1 << 20


def _run(*argv: str, good: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in good, f"{argv}: {done.stdout}{done.stderr}"


def missing() -> str:
    """Why this machine cannot have one; "" if it can."""
    return "" if os.path.exists("/dev/loop-control") else "NOT TO BE HAD HERE: the kernel has no loop devices"


class SmallDisk:
    """ext4 in a file, on a loop device."""

    def __init__(self, image: Path, mountpoint: Path, megabytes: int) -> None:
        self._image = image
        self.mountpoint = mountpoint
        self._ballast = mountpoint / "ballast"
        with image.open("wb") as file:
            file.truncate(megabytes * _MIB)
        _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        mountpoint.mkdir(parents=True)

    def mount(self, *options: str) -> None:
        _run("mount", "-o", ",".join(("loop", *options)), str(self._image), str(self.mountpoint))

    def unmount(self) -> None:
        _run("umount", str(self.mountpoint))

    def fill(self, leaving: int = 0) -> None:
        """Fills it except for so many bytes."""
        size = self._ballast.stat().st_size if self._ballast.exists() else 0
        with self._ballast.open("ab") as file:
            if leaving:
                room = os.fstatvfs(file.fileno())
                os.posix_fallocate(file.fileno(), size, room.f_bavail * room.f_frsize - leaving)
            else:
                for step in (_MIB, 64 << 10, 1 << 10):
                    size = _grow(file.fileno(), size, step)
            os.fsync(file.fileno())

    def free(self) -> None:
        self._ballast.unlink()
        _run("sync", "--file-system", str(self.mountpoint))

    def break_(self) -> None:
        """Breaks it as a disk error does: every write fails with EROFS until it is unmounted and repaired."""
        subprocess.run(["mount", "-o", "remount,abort", str(self.mountpoint)], capture_output=True, check=False)
        try:
            (self.mountpoint / "probe").touch()
        except OSError as exc:
            assert exc.errno == errno.EROFS
            return
        raise AssertionError("the file system still takes writes")

    def repair(self) -> None:
        """Repairs it as an operator does; no file of it may be open."""
        self.unmount()
        _run("e2fsck", "-f", "-y", str(self._image), good=(0, 1))  # 1: errors corrected
        self.mount()


def _grow(file: int, size: int, step: int) -> int:
    try:
        while True:
            os.posix_fallocate(file, size, step)
            size += step
    except OSError as exc:
        assert exc.errno == errno.ENOSPC
        return size
