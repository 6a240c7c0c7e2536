"""Disk files handed to QEMU's user, the embedded driver's directory, and the owner mark."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from virtshim.domain.errors import InvalidRequest, NotFound
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.image import DiskFormat
from virtshim.domain.vm import Disk
from virtshim.hypervisor import embed, owner_mark
from virtshim.hypervisor.embed import QemuUser
from virtshim.hypervisor.file_owner import QemuIds, give_to_qemu

QEMU = QemuIds(64055, 64108)
NOBODY = QemuUser("somebody", "somegroup", 64055, 64108)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: chown needs root")


def _disk(path: Path, *, readonly: bool = False) -> Disk:
    return Disk(str(path), DiskFormat.RAW, "", readonly=readonly)


def _rights(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


@needs_root
def test_a_writable_disk_becomes_qemus_and_a_readonly_one_readable(tmp_path: Path) -> None:
    writable, readonly = tmp_path / "root", tmp_path / "seed"
    for path in (writable, readonly):
        path.touch(mode=0o600)
    for _ in range(2):
        give_to_qemu([_disk(writable), _disk(readonly, readonly=True)], QEMU)
        assert _rights(writable) == (QEMU.uid, QEMU.gid, 0o600)
        assert _rights(readonly) == (0, QEMU.gid, 0o640)


def test_a_disk_that_fits_is_left_alone(tmp_path: Path) -> None:
    disk = tmp_path / "shared"
    disk.touch()
    disk.chmod(0o644)
    before = _rights(disk)
    give_to_qemu([_disk(disk, readonly=True)], QEMU)
    assert _rights(disk) == before


def test_a_missing_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"gone\.qcow2"):
        give_to_qemu([_disk(tmp_path / "gone.qcow2")], QEMU)


def test_the_embedded_directory_is_made_and_may_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "require_reachable", lambda *_: None)
    monkeypatch.setattr(embed, "_LONGEST_ROOT", 4096)
    root = tmp_path / "libvirt"
    for _ in range(2):
        assert embed.prepare(str(root), NOBODY) == f"qemu:///embed?root={root}"
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


def test_the_mark_comes_back_as_it_went() -> None:
    wanted = owner_mark.OwnerMark("node-1", ContainerId("a" * 64), SandboxId("b" * 64))
    # libvirt drops the namespace declaration.
    text = f'<owner node="node-1" container="{"a" * 64}" sandbox="{"b" * 64}"/>'
    assert owner_mark.from_text(text) == wanted
    assert owner_mark.node_of(text) == "node-1"


@pytest.mark.parametrize("text", ["", "<owner", '<owner node="n"/>', '<owner node="n" container="x" sandbox="y"/>'])
def test_a_damaged_mark_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        owner_mark.from_text(text)
