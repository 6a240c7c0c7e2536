"""virtshim prepares a directory before an embedded libvirt opens it."""

import getpass
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.model.errors import InvalidRequest
from virtshim.vm import embed
from virtshim.vm.embed import QemuUser, prepare

STATUS = "<domstatus state='paused' reason='starting up' pid='{pid}'><job type='none' async='start'/></domstatus>"
NOBODY = QemuUser("somebody", "somegroup", 64055, 64108)


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: libvirt's socket paths below it are long."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory, "lv")


def test_a_vm_whose_start_was_interrupted_before_qemu_ran_is_off(root: Path) -> None:
    run = root / "run/qemu"
    run.mkdir(parents=True)
    (run / "unborn.xml").write_text(STATUS.format(pid=0))
    (run / "starting.xml").write_text(STATUS.format(pid=4711))
    (run / "torn.xml").write_text("<domst")
    me = QemuUser(getpass.getuser(), "", os.getuid(), os.getgid())
    assert prepare(str(root), me) == f"qemu:///embed?root={root}"
    assert {path.name for path in run.iterdir()} == {"starting.xml", "torn.xml"}


def test_the_embedded_directory_is_made_and_may_be_made_again(root: Path) -> None:
    for _ in range(2):
        assert embed.prepare(str(root), NOBODY) == f"qemu:///embed?root={root}"
        assert list((root / "output").iterdir()) == []
        os.mkfifo(root / "output/of-a-start-that-was-cut-off")
    assert stat.S_IMODE(root.stat().st_mode) == 0o711
    text = (root / "etc" / "qemu.conf").read_text()
    assert 'user = "somebody"\ngroup = "somegroup"\n' in text
    assert "cgroup_controllers = [ ]" in text
    assert [path.name for path in (root / "etc").iterdir()] == ["qemu.conf"]


def test_a_directory_that_qemu_cannot_reach_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    tmp_path.chmod(0o755)
    closed.chmod(0o700)
    with pytest.raises(InvalidRequest, match="is not accessible to somebody"):
        embed.require_reachable(str(closed), NOBODY)


@pytest.mark.parametrize("root", ["/" + "d" * 60, "/tmp/a?b", "/tmp/a b"])
def test_a_directory_that_libvirt_could_not_use_is_refused(root: str) -> None:
    with pytest.raises(InvalidRequest):
        embed.prepare(root, NOBODY)
    assert not os.path.exists(root)


def test_an_unknown_qemu_user_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no-such-user"):
        embed.qemu_user("no-such-user", "no-such-group")
