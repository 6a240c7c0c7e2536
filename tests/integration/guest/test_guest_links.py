"""The guest's script links block volumes to their paths. It runs with a fake kernel list of disks."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from virtshim.devices.guest_view import GUEST_LINKS_NOT_LINKED, guest_links_command, guest_serials
from virtshim.devices.values import BlockDevice

pytestmark = [
    pytest.mark.guest,
    pytest.mark.volumes,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount"),
]


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    """Replaces /sys/block: vda is the root disk, vdc a volume, zram0 has no serial."""
    has_serial(tmp_path / "block", "vda", "root")
    has_serial(tmp_path / "block", "vdc", "mnt-data")
    (tmp_path / "block" / "zram0").mkdir()
    return tmp_path / "block"


def has_serial(disks: Path, name: str, serial: str) -> None:
    (disks / name).mkdir(parents=True, exist_ok=True)
    (disks / name / "serial").write_text(serial)  # no newline, as of virtio_blk


def run(disks: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    script = shlex.join(guest_links_command([BlockDevice("/dev/of-the-node", path) for path in paths]))
    look = 'find /mnt -type l -exec sh -c \'echo "$1 $(readlink "$1")"\' - {} \\; | sort'
    script = f"mount --bind {disks} /sys/block; mount -t tmpfs none /mnt; {script}; code=$?; {look}; exit $code"
    words = ["unshare", "--mount", "sh", "-c", script]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_a_volume_is_where_the_pod_expects_it(disks: Path) -> None:
    odd = "/mnt/deep/it's here"
    has_serial(disks, "vdd", guest_serials([BlockDevice("/dev/of-the-node", odd)])[0])
    done = run(disks, "/mnt/data", odd)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["/mnt/data /dev/vdc", f"{odd} /dev/vdd"]


def test_a_missing_disk_is_reported_and_the_others_are_linked(disks: Path) -> None:
    done = run(disks, "/mnt/other", "/mnt/data")
    assert done.returncode == GUEST_LINKS_NOT_LINKED
    assert done.stderr == "/mnt/other: the guest has no disk with the serial mnt-other (its kernel needs virtio_blk)\n"
    assert done.stdout == "/mnt/data /dev/vdc\n"


def test_an_existing_file_in_the_guest_is_not_replaced(disks: Path) -> None:
    has_serial(disks, "vdc", "etc-passwd")
    done = run(disks, "/etc/passwd")
    assert (done.returncode, done.stderr) == (
        GUEST_LINKS_NOT_LINKED,
        "/etc/passwd: the guest has something else there\n",
    )
    assert not Path("/etc/passwd").is_symlink()
