"""The guest's script makes file systems on empty disks and mounts them. It runs with private mounts on a loop
device."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.loop import loop_device, no_loop_devices

from virtshim.volumes.empty_disks import NOT_MOUNTED, command, parse

pytestmark = [
    pytest.mark.guest,
    pytest.mark.volumes,
    pytest.mark.skipif(**no_loop_devices()),
]

SCRIPT = shlex.join(command(parse("scratch: {size: 16Mi, mountPath: /mnt/deep/data}")))


class Disk:
    """`/sys/block`, where the device has the serial `scratch`."""

    def __init__(self, directory: Path, device: Path) -> None:
        self.device = device
        self._blocks = directory / "block"
        (self._blocks / device.name).mkdir(parents=True)
        (self._blocks / device.name / "serial").write_text("scratch")

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        mounts = f"mount --bind {self._blocks} /sys/block; mount -t tmpfs none /mnt; mount -t tmpfs none /run"
        words = ["unshare", "--mount", "sh", "-c", f"{mounts}; {script}"]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    file = tmp_path / "disk"
    with file.open("wb") as made:
        made.truncate(16 << 20)
    with loop_device(file) as device:
        yield Disk(tmp_path, device)


def test_an_empty_disk_gets_a_file_system_and_is_mounted(disk: Disk) -> None:
    done = disk.run(f"{SCRIPT} && findmnt -n -o SOURCE,FSTYPE /mnt/deep/data")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(disk.device), "ext4"]


def test_data_on_an_empty_disk_survives_a_reboot(disk: Disk) -> None:
    assert disk.run(f"{SCRIPT} && echo mine > /mnt/deep/data/file").returncode == 0
    done = disk.run(f"{SCRIPT} && {SCRIPT} && cat /mnt/deep/data/file && grep -c ' /mnt/deep/data ' /proc/mounts")
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["mine", "1"])


def test_data_that_is_not_a_file_system_is_left_alone_and_reported(disk: Disk) -> None:
    with open(disk.device, "r+b") as file:
        file.write(b"somebody's")
    done = disk.run(SCRIPT)
    assert done.returncode == NOT_MOUNTED
    assert done.stderr.startswith("/mnt/deep/data: mount: ")
    with open(disk.device, "rb") as file:
        assert file.read(10) == b"somebody's"


def test_two_runs_at_once_make_one_file_system(disk: Disk) -> None:
    done = disk.run(f"{SCRIPT} & {SCRIPT}; wait $! && grep -c ' /mnt/deep/data ' /proc/mounts")
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "1")


def test_a_disk_that_the_guest_does_not_see_is_reported(disk: Disk) -> None:
    done = disk.run(shlex.join(command(parse("other: {size: 16Mi, mountPath: /mnt/x}"))))
    assert (done.returncode, done.stderr) == (NOT_MOUNTED, "/mnt/x: the guest has no disk with the serial other\n")
