"""The real virtiofsd gets its volumes in isolation, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import runs
from podclient import wait_until
from slow_fuse import dead_directory

from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.errors import TapmanagerError
from tapmanager.shares.daemons import Place, ShareDaemons
from tapmanager.shares.plan import SharedMount

pytestmark = [
    pytest.mark.volumes,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount"),
]
NAME = "0123456789abcdef0123"
UID = 2130706433
# A virtiofsd other than the distribution's.
PROGRAM = os.environ.get("VIRTSHIM_TEST_VIRTIOFSD", "")


def soon() -> float:
    return time.monotonic() + 60


@pytest.fixture
def daemons() -> ShareDaemons:
    return ShareDaemons(VmCgroups(hierarchies()), PROGRAM)


@pytest.fixture
def place(daemons: ShareDaemons, tmp_path: Path) -> Iterator[Place]:
    place = Place(f"{tmp_path}/shares/{NAME}")
    yield place
    daemons.end(place, soon())


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[Path]:
    """A volume with its own file system."""
    directory = tmp_path / "claim"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "virtshim-test", directory], check=True)
    yield directory
    if os.path.ismount(directory):
        subprocess.run(["umount", "-l", directory], check=True)


def serving(place: Place) -> list[int]:
    """The processes that serve it, oldest first. The C version has one until QEMU connects and then two; the Rust
    version always has two."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(place.root.encode() in word for word in command) and any(b"virtiofsd" in word for word in command):
                found.append(int(entry.name))
    return sorted(found)


def started(daemons: ShareDaemons, place: Place, *mounts: SharedMount, group: str = "") -> int:
    """Starts the share; returns the first process. The Rust version starts another one at once."""
    daemons.start(place, UID, mounts, soon(), group)
    wait_until(lambda: bool(serving(place)), 60, "it runs")
    return serving(place)[0]


def mounts_of(pid: int, place: Place) -> dict[str, list[str]]:
    """Mount point below the share's root -> the words of mountinfo, as that process sees them."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return {line.split()[4].removeprefix(place.root): line.split() for line in lines}


def test_volumes_are_bound_privately_and_only_the_vms_user_may_connect(
    daemons: ShareDaemons, place: Place, claim: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    os.symlink(claim, tmp_path / "link")
    mounts = (SharedMount(str(tmp_path / "link")), SharedMount(str(tmp_path / "file"), readonly=True))
    before = Path("/proc/self/mountinfo").read_text()
    parent = started(daemons, place, *mounts)
    seen = mounts_of(parent, place)
    assert Path("/proc/self/mountinfo").read_text() == before
    assert "rw" in seen["/0"][5].split(",")
    assert "ro" in seen["/1"][5].split(",")
    assert os.listdir(place.root) == []
    status = os.stat(place.socket)
    assert (status.st_uid, status.st_mode & 0o777) == (UID, 0o600)
    assert daemons.all(os.path.dirname(place.directory)) == {NAME: True}


def test_a_read_only_volume_is_read_only_including_its_submounts(
    daemons: ShareDaemons, place: Place, claim: Path
) -> None:
    (claim / "below").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nosuid,size=64k", "virtshim-test", claim / "below"], check=True)
    try:
        parent = started(daemons, place, SharedMount(str(claim), readonly=True), SharedMount(str(claim)))
        seen = mounts_of(parent, place)
        words = [seen[f"/{mount}"][5].split(",") for mount in ("0", "0/below", "1", "1/below")]
        assert [found[0] for found in words] == ["ro", "ro", "rw", "rw"]
        assert "nosuid" in words[1]
        (claim / "below" / "on the node").touch()
        daemons.end(place, soon())
    finally:
        subprocess.run(["umount", claim / "below"], check=True)


def test_an_ended_share_leaves_nothing_and_releases_its_volumes(
    daemons: ShareDaemons, place: Place, claim: Path
) -> None:
    started(daemons, place, SharedMount(str(claim)))
    daemons.end(place, soon())
    assert serving(place) == []
    subprocess.run(["umount", claim], check=True)
    assert not os.path.lexists(place.directory)
    assert daemons.all(os.path.dirname(place.directory)) == {}
    daemons.end(place, soon())


def test_the_next_process_ends_shares_of_a_killed_one(place: Place, claim: Path) -> None:
    second = ShareDaemons(VmCgroups(hierarchies()), PROGRAM)
    script = (
        "import sys, time; from tapmanager.shares.daemons import *; from tapmanager.shares.plan import SharedMount\n"
        "ShareDaemons(VmCgroups([])).start(Place(sys.argv[1]), 1, [SharedMount(sys.argv[2])], time.monotonic() + 60)\n"
    )
    subprocess.run([sys.executable, "-c", script, place.directory, str(claim)], check=True)
    assert serving(place)
    assert second.all(os.path.dirname(place.directory)) == {NAME: True}
    started(second, place, SharedMount(str(claim)))
    second.end(place, soon())
    assert serving(place) == []


@pytest.mark.hostile
def test_a_process_of_another_user_with_the_same_name_is_not_ended(daemons: ShareDaemons, place: Place) -> None:
    words = ["/bin/sh", "-c", "read _", "virtiofsd", "-o", f"source={place.root}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, user=65534) as stranger:
        daemons.end(place, time.monotonic() + 1)
        assert stranger.poll() is None


@pytest.mark.parametrize("made", [(), ("root",), ("root", "group"), ("root", "group", "fs.sock")])
def test_a_half_started_share_can_be_ended(
    daemons: ShareDaemons, place: Place, claim: Path, made: tuple[str, ...]
) -> None:
    Path(place.directory).mkdir(parents=True)
    for name in made:
        path = Path(place.directory, name)
        path.mkdir() if name == "root" else path.touch()
    assert daemons.all(os.path.dirname(place.directory)) == {NAME: False}
    started(daemons, place, SharedMount(str(claim)))
    daemons.end(place, soon())
    assert not os.path.lexists(place.directory)


def test_a_killed_daemon_is_reported_and_its_volumes_are_released(
    daemons: ShareDaemons, place: Place, claim: Path
) -> None:
    os.kill(started(daemons, place, SharedMount(str(claim))), signal.SIGKILL)
    wait_until(lambda: serving(place) == [], 60, "it has ended")
    assert daemons.all(os.path.dirname(place.directory)) == {NAME: False}
    subprocess.run(["umount", claim], check=True)


def test_a_share_has_its_own_cgroup_until_it_ends(daemons: ShareDaemons, place: Place, claim: Path) -> None:
    group = f"/virtshim-test-{os.getpid()}/virtshim-{NAME}-volumes"
    groups = VmCgroups(hierarchies())
    try:
        pid = started(daemons, place, SharedMount(str(claim)), group=group)
        assert group in Path(f"/proc/{pid}/cgroup").read_text()
        assert groups.directories(group)
        ShareDaemons(groups, PROGRAM).end(place, soon())
        assert not groups.directories(group)
    finally:
        groups.remove(os.path.dirname(group))


def test_later_submounts_of_a_volume_are_visible_if_propagation_is_enabled(
    daemons: ShareDaemons, place: Place, claim: Path
) -> None:
    subprocess.run(["mount", "--make-shared", claim], check=True)
    (claim / "later").mkdir()
    parent = started(daemons, place, SharedMount(str(claim), follows=True), SharedMount(str(claim)))
    subprocess.run(["mount", "-t", "tmpfs", "virtshim-test", claim / "later"], check=True)
    try:
        assert "/0/later" in mounts_of(parent, place)
        assert "/1/later" not in mounts_of(parent, place)
    finally:
        subprocess.run(["umount", claim / "later"], check=True)


def test_a_special_file_is_refused_by_name(daemons: ShareDaemons, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/sock")
        for name, says in (
            ("fifo", "a FIFO"),
            ("sock", "a socket"),
            ("gone", "does not exist"),
            ("fifo/x", "does not exist"),
        ):
            with pytest.raises(TapmanagerError, match=f"{tmp_path}/{name} .*{says}"):
                daemons.check([SharedMount(f"{tmp_path}/{name}")], soon())
    with pytest.raises(TapmanagerError, match="/dev/null is a device node"):
        daemons.check([SharedMount("/dev/null")], soon())
    daemons.check([SharedMount(str(tmp_path))], soon())


def test_a_share_that_cannot_be_started_leaves_nothing(daemons: ShareDaemons, place: Place, tmp_path: Path) -> None:
    with pytest.raises(TapmanagerError, match="does not exist"):
        daemons.start(place, UID, [SharedMount(str(tmp_path)), SharedMount(f"{tmp_path}/gone")], soon())
    assert not os.path.lexists(place.directory)


def test_two_hundred_oddly_named_volumes_are_each_bound_correctly(
    daemons: ShareDaemons, place: Place, tmp_path: Path
) -> None:
    mounts = []
    for number in range(200):
        directory = tmp_path / f"a,b={number}\n"
        directory.mkdir()
        mounts.append(SharedMount(str(directory), readonly=number % 2 == 1))
    parent = started(daemons, place, *mounts)
    assert {f"/{number}" for number in range(200)} <= mounts_of(parent, place).keys()


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    yield from dead_directory(tmp_path / "dead")


def test_a_volume_with_a_dead_server_does_not_block_others(
    daemons: ShareDaemons, place: Place, dead: Path, tmp_path: Path
) -> None:
    with pytest.raises(TapmanagerError, match=f"{dead}/volume does not answer in time"):
        daemons.check([SharedMount(str(tmp_path)), SharedMount(f"{dead}/volume")], time.monotonic() + 1.5)
    with pytest.raises(TapmanagerError, match="does not answer in time"):
        daemons.start(place, UID, [SharedMount(f"{dead}/volume")], time.monotonic() + 1.5)
    daemons.check([SharedMount(str(tmp_path))], soon())
    assert not os.path.lexists(place.directory)


def test_a_hung_check_ends_with_its_caller(dead: Path) -> None:
    script = (
        "import sys, time; from tapmanager.shares.daemons import *; from tapmanager.shares.plan import SharedMount\n"
        "ShareDaemons(VmCgroups([])).check([SharedMount(sys.argv[1])], time.monotonic() + 600)\n"
    )
    words = [sys.executable, "-c", script, f"{dead}/volume"]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}) as asks:
        try:
            wait_until(lambda: any(hangs(pid) for pid in children_of(asks.pid)), 60, "its look hangs")
            (looks,) = children_of(asks.pid)
        finally:
            asks.kill()
    wait_until(lambda: not runs(looks), 60, "it has ended, too")


def children_of(pid: int) -> list[int]:
    """The children of its main thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def hangs(pid: int) -> bool:
    """Whether it hangs in a file system whose server does not answer."""
    try:
        where = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:  # another one, which has ended
        return False
    return "fuse" in where or where == "request_wait_answer"
