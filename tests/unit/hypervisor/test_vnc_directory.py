"""The directory of a VNC socket is QEMU's while it makes the socket, and ours again afterwards."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from virtshim.domain.errors import InternalError
from virtshim.hypervisor.file_owner import QemuIds
from virtshim.hypervisor.vnc_directory import writable_by_qemu

NOBODY = QemuIds(65534, 65534)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root gives files away")


@AS_ROOT
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_qemus_inside_and_nobody_elses_afterwards(tmp_path: Path, fails: bool) -> None:
    socket = tmp_path / "vnc" / "c" / "vnc.sock"
    before = os.umask(0o077)
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext(), writable_by_qemu(str(socket), NOBODY):
            inside = socket.parent.stat()
            socket.touch()
            if fails:
                raise RuntimeError
    finally:
        os.umask(before)
    assert (inside.st_uid, stat.S_IMODE(inside.st_mode)) == (NOBODY.uid, 0o700)
    after = socket.parent.stat()
    assert (after.st_uid, stat.S_IMODE(after.st_mode)) == (os.geteuid(), 0o700)
    assert stat.S_IMODE(socket.parent.parent.stat().st_mode) == 0o711, (
        "QEMU's user must get through, whatever the umask"
    )


def test_a_socket_of_an_earlier_start_is_gone(tmp_path: Path) -> None:
    socket = tmp_path / "vnc" / "c" / "vnc.sock"
    socket.parent.mkdir(parents=True)
    socket.touch()
    with writable_by_qemu(str(socket), None):
        assert not socket.exists()


def test_a_place_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "vnc").touch()
    with pytest.raises(InternalError, match="VNC socket"), writable_by_qemu(str(tmp_path / "vnc" / "c" / "s"), None):
        pass


def test_a_vm_without_a_screen_has_no_directory(tmp_path: Path) -> None:
    with writable_by_qemu("", None):
        assert list(tmp_path.iterdir()) == []
