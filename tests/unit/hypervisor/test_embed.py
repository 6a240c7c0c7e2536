"""What is made ready before libvirt opens a directory of its own."""

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.hypervisor.embed import QemuUser, prepare

STATUS = "<domstatus state='paused' reason='starting up' pid='{pid}'><job type='none' async='start'/></domstatus>"


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: libvirt's socket paths below it are long."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory, "lv")


def test_a_vm_whose_start_was_cut_off_before_qemu_ran_is_off(root: Path) -> None:
    run = root / "run/qemu"
    run.mkdir(parents=True)
    (run / "unborn.xml").write_text(STATUS.format(pid=0))
    (run / "starting.xml").write_text(STATUS.format(pid=4711))
    (run / "torn.xml").write_text("<domst")
    me = QemuUser(getpass.getuser(), "", os.getuid(), os.getgid())
    assert prepare(str(root), me) == f"qemu:///embed?root={root}"
    assert {path.name for path in run.iterdir()} == {"starting.xml", "torn.xml"}
