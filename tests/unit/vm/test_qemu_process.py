"""virtshim finds QEMU's process and reads it in /proc. The process that is read is the test's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from virtshim.vm import qemu_process

DOMAIN = uuid.UUID(int=77)


@pytest.mark.parametrize(
    ("uri", "directory"),
    [
        ("qemu:///system", "/run/libvirt/qemu"),
        ("qemu+unix:///system?socket=/run/x", "/run/libvirt/qemu"),
        ("qemu:///embed?root=/var/lib/v", "/var/lib/v/run/qemu"),
        ("qemu:///session", ""),
        ("test:///default", ""),
    ],
)
def test_where_libvirt_keeps_process_ids(uri: str, directory: str) -> None:
    assert qemu_process.pid_directory(uri) == directory


@pytest.mark.parametrize(
    ("uri", "directory"),
    [
        ("qemu:///system", "/var/log/libvirt/qemu"),
        ("qemu:///embed?root=/var/lib/v", "/var/lib/v/log/qemu"),
        ("test:///default", ""),
    ],
)
def test_where_libvirt_keeps_qemus_messages(uri: str, directory: str) -> None:
    assert qemu_process.log_directory(uri) == directory


def test_only_this_vms_logs_are_removed(tmp_path: Path) -> None:
    for name in ("vm.log", "vm.log.0", "vm.log.12", "vm.login", "vm2.log", "vm.log.old", "[v]m.log"):
        (tmp_path / name).touch()
    qemu_process.remove_logs(str(tmp_path), "vm")
    qemu_process.remove_logs(str(tmp_path), "vm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["[v]m.log", "vm.log.old", "vm.login", "vm2.log"]


def test_a_vms_process_is_found_by_its_pid_file_and_the_uuid_on_its_command_line(tmp_path: Path) -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-IS", "-c", code, "-uuid", str(DOMAIN)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (tmp_path / "vm.pid").write_text(f"{child.pid}\n")
        assert qemu_process.find(str(tmp_path), "vm", DOMAIN) == child.pid
        assert qemu_process.find(str(tmp_path), "vm", uuid.UUID(int=78)) is None
        assert qemu_process.find(str(tmp_path), "other", DOMAIN) is None
        child.communicate()
    assert qemu_process.find(str(tmp_path), "vm", DOMAIN) is None


@pytest.mark.parametrize("content", ["", "x", "-1"])
def test_a_damaged_file_names_no_process(tmp_path: Path, content: str) -> None:
    (tmp_path / "vm.pid").write_text(content)
    assert qemu_process.find(str(tmp_path), "vm", DOMAIN) is None


def test_memory_descriptors_and_limits_are_read_from_the_process() -> None:
    before = qemu_process.usage_of(os.getpid())
    assert before is not None
    held = bytearray(os.urandom(1 << 20) * 32)
    with socket.socket(), socket.socket():
        after = qemu_process.usage_of(os.getpid())
    assert after is not None
    assert len(held) == 32 << 20
    assert 24 << 20 < after.anon - before.anon < 64 << 20
    assert after.minor_faults > before.minor_faults
    assert (after.descriptors - before.descriptors, after.sockets - before.sockets) == (2, 2)
    assert after.threads >= 1
    assert after.peak_resident >= after.resident - (1 << 20)
    assert after.max_descriptors == int(subprocess.check_output(["sh", "-c", "ulimit -Sn"], text=True))


def test_a_process_that_is_gone_uses_nothing() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert qemu_process.usage_of(child.pid) is None
