"""QEMU's user gets its disk files. It also gets the directory of a VNC socket, but only while QEMU makes the socket."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from virtshim.model.errors import InternalError, NotFound
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Disk
from virtshim.vm.file_owner import QemuIds, give_to_qemu, take_back_libvirts, take_back_vms, vnc_directory_writable

QEMU = QemuIds(64055, 64108)
OWN = 2130706433


def _disk(path: Path, *, readonly: bool = False) -> Disk:
    return Disk(str(path), DiskFormat.RAW, "", readonly=readonly)


def test_a_vm_with_its_own_user_has_the_group_of_vms_and_not_libvirts() -> None:
    libvirts = QemuIds(64055, 64055, group_of_vms=108)
    assert (libvirts.for_vm(OWN).uid, libvirts.for_vm(OWN).gid) == (OWN, 108)
    assert (libvirts.for_vm(0).uid, libvirts.for_vm(0).gid) == (64055, 64055)
    assert libvirts.readers == 108
    assert QEMU.for_vm(OWN).gid == QEMU.readers == QEMU.gid


def test_images_opened_for_qemu_are_readable_by_no_group_of_vms() -> None:
    libvirts = QemuIds(64055, 64055, group_of_vms=108, gets_images=True)
    assert libvirts.readers == os.getegid()
    assert libvirts.for_vm(OWN).gid == 108
    assert libvirts.for_vm(OWN).gets_images


def _rights(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


NOBODY = QemuIds(65534, 65534)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root gives files away")


@AS_ROOT
def test_a_writable_disk_becomes_qemus_and_a_readonly_one_readable(tmp_path: Path) -> None:
    writable, readonly = tmp_path / "root", tmp_path / "seed"
    for path in (writable, readonly):
        path.touch(mode=0o600)
    for _ in range(2):
        give_to_qemu([_disk(writable), _disk(readonly, readonly=True)], QEMU)
        assert _rights(writable) == (QEMU.uid, QEMU.gid, 0o600)
        assert _rights(readonly) == (0, QEMU.gid, 0o640)


@AS_ROOT
def test_the_files_of_a_vm_with_its_own_user_are_for_that_user_only(tmp_path: Path) -> None:
    """Also those that an earlier version gave to the group that all VMs have in common."""
    writable, readonly = tmp_path / "root", tmp_path / "seed"
    for path in (writable, readonly):
        path.touch(mode=0o600)
    disks = [_disk(writable), _disk(readonly, readonly=True)]
    give_to_qemu(disks, QEMU)
    for _ in range(2):
        give_to_qemu(disks, QEMU.for_vm(OWN))
        assert _rights(writable)[::2] == (OWN, 0o600)
        assert _rights(readonly)[::2] == (OWN, 0o400)


def test_a_disk_with_the_right_owner_is_left_alone(tmp_path: Path) -> None:
    disk = tmp_path / "shared"
    disk.touch()
    disk.chmod(0o644)
    before = _rights(disk)
    give_to_qemu([_disk(disk, readonly=True)], QEMU)
    assert _rights(disk) == before


def test_a_missing_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"gone\.qcow2"):
        give_to_qemu([_disk(tmp_path / "gone.qcow2")], QEMU)


@AS_ROOT
@pytest.mark.parametrize("fails", [False, True])
def test_the_vnc_directory_is_qemus_during_the_start_and_ours_afterwards(tmp_path: Path, fails: bool) -> None:
    socket = tmp_path / "vnc" / "c" / "vnc.sock"
    before = os.umask(0o077)
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext(), vnc_directory_writable(str(socket), NOBODY):
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


def test_a_socket_of_an_earlier_start_is_removed(tmp_path: Path) -> None:
    socket = tmp_path / "vnc" / "c" / "vnc.sock"
    socket.parent.mkdir(parents=True)
    socket.touch()
    with vnc_directory_writable(str(socket), None):
        assert not socket.exists()


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "vnc").touch()
    with (
        pytest.raises(InternalError, match="VNC socket"),
        vnc_directory_writable(str(tmp_path / "vnc" / "c" / "s"), None),
    ):
        pass


def test_a_vm_without_a_screen_has_no_directory(tmp_path: Path) -> None:
    with vnc_directory_writable("", None):
        assert list(tmp_path.iterdir()) == []


def test_qemu_can_traverse_libvirts_directories_but_not_write_them(tmp_path: Path) -> None:
    state, running = tmp_path / "lib", tmp_path / "run"
    theirs = [state / "save", state / "domain-3-virtshim-abcdefghijk", running / "dbus"]
    for directory in theirs:
        directory.mkdir(parents=True)
        directory.chmod(0o770)
        os.chown(directory, NOBODY.uid, NOBODY.gid)
    take_back_libvirts(str(state), str(running))
    found = [directory.stat() for directory in theirs]
    assert [(one.st_uid, one.st_gid, stat.S_IMODE(one.st_mode)) for one in found] == [(0, NOBODY.gid, 0o750)] * 3


@AS_ROOT
@pytest.mark.parametrize("lure", ["link", "file", "socket"])
def test_a_foreign_monitor_socket_is_reported(tmp_path: Path, lure: str) -> None:
    own = tmp_path / "domain-7-vm"
    own.mkdir()
    monitor = own / "monitor.sock"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "libvirts"))
        os.link(tmp_path / "libvirts", monitor)
        take_back_vms(str(tmp_path), 7, "vm")
        if lure == "socket":
            os.chown(monitor, OWN, -1)
        else:
            monitor.unlink()
            monitor.symlink_to(tmp_path / "libvirts") if lure == "link" else monitor.touch()
        with pytest.raises(InternalError, match="QEMU has replaced it"):
            take_back_vms(str(tmp_path), 7, "vm")


@AS_ROOT
def test_only_a_started_vms_own_directories_change_owner_and_no_link_is_followed(tmp_path: Path) -> None:
    name = "virtshim-abcdefghijklmno"
    (tmp_path / "channel/target").mkdir(parents=True)
    other = tmp_path / "elsewhere"
    other.mkdir()
    os.chown(other, NOBODY.uid, NOBODY.gid)
    own = tmp_path / "domain-7-virtshim-abcdefghijk"
    own.mkdir()
    os.chown(own, NOBODY.uid, NOBODY.gid)
    take_back_vms(str(tmp_path), 7, name)
    assert own.stat().st_uid == 0
    own.rmdir()
    own.symlink_to(other)
    with pytest.raises(InternalError, match="cannot be taken back"):
        take_back_vms(str(tmp_path), 7, name)
    assert other.stat().st_uid == NOBODY.uid
