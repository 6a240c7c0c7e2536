"""The guest's script mounts volumes. It runs with private mounts, and a directory stands for virtiofs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from virtshim.volumes.memory_volumes import MemoryVolume, Tmpfs
from virtshim.volumes.mount_script import BUSY, NO_MODULE, NOT_MOUNTED, command, not_mounted
from virtshim.volumes.shares import SharedVolume

pytestmark = [
    pytest.mark.volumes,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount"),
]


def run(
    tmp_path: Path,
    volumes: list[SharedVolume],
    before: str = "",
    after: str = "",
    memory: Sequence[MemoryVolume] = (),
) -> subprocess.CompletedProcess[str]:
    """`before` and `after`: shell, around two runs of the script. `mount -t virtiofs` binds `device`."""
    programs, device = tmp_path / "bin", tmp_path / "device"
    for directory in (programs, device, tmp_path / "guest"):
        directory.mkdir(exist_ok=True)
    (programs / "mount").write_text(
        '#!/bin/sh\n[ "$2" = virtiofs ] || exec /bin/mount "$@"\n'
        f'[ -d "{device}" ] && exec /bin/mount -o bind "{device}" "$4"\necho no such device >&2\nexit 32\n'
    )
    (programs / "modprobe").write_text("#!/bin/sh\nexit 1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    script = f"{shlex.join(command(volumes, memory=memory))} || exit $?"
    start = f"mount -t tmpfs none /run && PATH={programs}:$PATH && {before or ':'}"
    whole = "\n".join((start, script, script, after or ":"))
    words = ["unshare", "--mount", "sh", "-c", whole]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_each_volume_is_mounted_once_even_if_nested_or_oddly_named(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / "device" / str(number)).mkdir(parents=True)
    (tmp_path / "device" / "2").write_text("a file")
    (tmp_path / "device" / "1" / "x").write_text("inner")
    top = str(tmp_path / "guest" / "a ,\n$(exit 7)'")
    volumes = [SharedVolume(top, "/"), SharedVolume(f"{top}/sub", "/", readonly=True), SharedVolume(f"{top}.cnf", "/")]
    look = f"cat {shlex.quote(top)}/sub/x {shlex.quote(top)}.cnf; grep -c guest/ /proc/self/mountinfo"
    after = f"{look}; ls /run/virtshim-volumes.*"
    done = run(tmp_path, volumes, after=after)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["innera file3", "0", "1", "2", ""]


def test_a_killed_run_does_not_block_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "device" / "0").mkdir(parents=True)
    before = "state=/run/virtshim-volumes.$(cat /proc/sys/kernel/random/boot_id); mkdir $state; sh -c 'echo $$' > $state/lock"
    done = run(tmp_path, [SharedVolume(str(tmp_path / "guest" / "a"), "/")], before)
    assert done.returncode == 0, done.stderr


def test_an_unfinished_run_is_waited_for_and_is_not_a_failure(tmp_path: Path) -> None:
    (tmp_path / "device" / "0").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").write_text("#!/bin/sh\n")
    before = "state=/run/virtshim-volumes.$(cat /proc/sys/kernel/random/boot_id); mkdir $state; echo $$ > $state/lock"
    done = run(tmp_path, [SharedVolume(str(tmp_path / "guest" / "a"), "/")], before)
    assert (done.returncode, done.stderr) == (BUSY, "another run of this script has not ended\n")


def test_a_failed_mount_is_reported(tmp_path: Path) -> None:
    """The device is missing; a kernel without virtiofs gives another error."""
    done = run(tmp_path, [SharedVolume(str(tmp_path / "guest" / "a"), "/")], f"rmdir {tmp_path}/device")
    has = any(line.split()[-1] == "virtiofs" for line in Path("/proc/filesystems").read_text().splitlines())
    assert done.returncode == (NOT_MOUNTED if has else NO_MODULE)
    assert ("no such device" if has else "module virtiofs") in done.stderr


def test_a_tmpfs_volume_is_mounted_once_with_its_size_mode_group_and_submounts(tmp_path: Path) -> None:
    (tmp_path / "device" / "0").mkdir(parents=True)
    (tmp_path / "device" / "0" / "shared").touch()
    top = str(tmp_path / "guest" / "a cache's")
    memory = MemoryVolume(top, "/host", Tmpfs(1 << 20, 0o2777, 0, 1234))
    look = f"cd {shlex.quote(top)}; stat -fc '%T %S %b' .; stat -c '%a %u %g' .; ls sub; grep -c virtshim-memory /proc/mounts"
    done = run(tmp_path, [SharedVolume(f"{top}/sub", "/")], after=look, memory=(memory,))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["tmpfs 4096 256", "2777 0 1234", "shared", "1", ""]


def test_a_tmpfs_volume_needs_no_virtiofs_and_a_failed_mount_is_reported(tmp_path: Path) -> None:
    good = MemoryVolume(str(tmp_path / "guest" / "a"), "/host", Tmpfs(1 << 20, 0o777, 0, 0), readonly=True)
    done = run(tmp_path, [], f"rmdir {tmp_path}/device", f"touch {good.guest}/x", memory=(good,))
    assert "Read-only file system" in done.stderr
    (tmp_path / "guest" / "file").touch()
    bad = MemoryVolume(f"{tmp_path}/guest/file", "/host", Tmpfs(1 << 20, 0o777, 0, 0))
    done = run(tmp_path, [], memory=(bad,))
    assert done.returncode == NOT_MOUNTED
    assert done.stderr.startswith(f"{bad.guest}: ")
    assert not_mounted([], [bad], done.returncode, done.stdout.encode()) == [bad]
    assert not_mounted([], [bad, good], done.returncode, b"m1 mounted\n") == [bad]


def test_a_failed_mount_affects_only_volumes_below_it(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "device" / str(number)).mkdir(parents=True)
    guest = tmp_path / "guest"
    guest.mkdir()
    (guest / "file").write_text("in the way")
    volumes = [
        SharedVolume(str(guest / "file" / "a"), "/"),
        SharedVolume(str(guest / "file" / "a" / "b" / "c"), "/", readonly=True),
        SharedVolume(str(guest / "good"), "/"),
        SharedVolume(str(guest / "good" / "inner" / "most"), "/"),
    ]
    done = run(tmp_path, volumes)
    assert done.returncode == NOT_MOUNTED
    assert not_mounted(volumes, [], done.returncode, done.stdout.encode()) == volumes[:2]
    assert f"{guest}/file/a: " in done.stderr
    assert str(guest / "good") not in done.stderr


def test_the_next_run_mounts_volumes_that_failed_before(tmp_path: Path) -> None:
    """Volumes inside it are then mounted on top."""
    for number in (0, 1):
        (tmp_path / "device" / str(number)).mkdir(parents=True)
    (tmp_path / "device" / "1" / "text").write_text("inner")
    guest = tmp_path / "guest"
    volumes = [SharedVolume(str(guest / "dir" / "a"), "/"), SharedVolume(str(guest / "dir" / "a" / "b"), "/")]
    script = shlex.join(command(volumes))
    before = f"touch {guest}/dir; {script}; echo $?; rm {guest}/dir"
    done = run(tmp_path, volumes, before, f"cat {guest}/dir/a/b/text")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{NOT_MOUNTED}\ninner")


def test_a_run_without_a_report_does_not_count_as_success() -> None:
    volumes = [SharedVolume("/a", "/"), SharedVolume("/b", "/")]
    assert not_mounted(volumes, [], 0, b"") == []
    assert not_mounted(volumes, [], 127, b"0 mounted\n") is None
    assert not_mounted(volumes, [], NO_MODULE, b"") == volumes
    assert not_mounted(volumes, [], NOT_MOUNTED, b"1 mounted\n") == volumes[:1]
