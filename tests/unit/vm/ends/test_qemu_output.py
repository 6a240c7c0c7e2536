"""QEMU's output reaches its log with an embedded libvirt. A fake process stands for QEMU."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leaks import OpenedSince

from virtshim.model.errors import InternalError
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.qemu_output import QemuOutput

NAME = "virtshim-x"
DOMAIN = uuid.UUID("11111111-2222-5333-8444-555555555555")
# Redirects its output as vmwrapper does, writes what it is told to, and waits.
QEMU = """
import os, sys
path, byte, count, stays = sys.argv[1:5]
pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
os.dup2(pipe, 2)
os.close(pipe)
os.write(1, b"ready\\n")
said = 0
try:
    while said < int(count):
        said += os.write(2, byte.encode() * min(4096, int(count) - said))
except BlockingIOError:
    pass
print(said, flush=True)
if stays == "stays":
    sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("output", "log/qemu", "run/qemu"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def output(root: Path) -> Iterator[QemuOutput]:
    with contextlib.closing(QemuOutput(str(root / "output"))) as output:
        yield output


def log_of(root: Path) -> Path:
    return root / f"log/qemu/{NAME}.log"


def in_log_of(root: Path) -> bytes:
    return log_of(root).read_bytes() if log_of(root).exists() else b""


def qemu(root: Path, byte: str, count: int, *, stays: bool = False) -> subprocess.Popen[bytes]:
    words = [str(root / "output" / NAME), byte, str(count), "stays" if stays else "ends", str(DOMAIN)]
    return subprocess.Popen([sys.executable, "-c", QEMU, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def said_by(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return int(process.stdout.readline())


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_qemus_output_is_in_the_error_of_a_failed_start_and_in_its_log(root: Path, output: QemuOutput) -> None:
    log_of(root).write_bytes(b"libvirt's own\n")
    told = ""
    with contextlib.suppress(RuntimeError), output.of_start(NAME, None) as said:
        with qemu(root, "w", 10) as process:
            said_by(process)
        told = said()
        raise RuntimeError
    assert told == "w" * 10
    assert log_of(root).read_bytes() == b"libvirt's own\n" + b"w" * 10
    assert list((root / "output").iterdir()) == []


def test_qemus_output_is_in_its_log_when_it_has_ended(root: Path, output: QemuOutput) -> None:
    with output.of_start(NAME, None):
        process = qemu(root, "w", 10, stays=True)
        said_by(process)
    assert not log_of(root).exists()
    process.communicate()
    wait_for(lambda: in_log_of(root) == b"w" * 10)


@pytest.mark.hostile
def test_endless_output_is_read_only_up_to_a_pipes_size(root: Path, output: QemuOutput) -> None:
    with output.of_start(NAME, None):
        process = qemu(root, "w", 1 << 30, stays=True)
        taken = said_by(process)
    assert taken <= 64 << 10
    process.communicate()
    wait_for(lambda: in_log_of(root))
    assert len(in_log_of(root)) <= 64 << 10


def test_unread_output_is_limited_and_kept_for_the_next_reader(root: Path) -> None:
    with contextlib.closing(QemuOutput(str(root / "output"))) as output, output.of_start(NAME, None):
        process = qemu(root, "w", 1 << 30, stays=True)
        said_by(process)
    (root / f"run/qemu/{NAME}.pid").write_text(str(process.pid))
    with contextlib.closing(QemuOutput(str(root / "output"))) as later:
        later.follow(NAME, DOMAIN)
        later.follow(NAME, DOMAIN)
        process.communicate()
        wait_for(log_of(root).exists)
    assert log_of(root).read_bytes() == b"w" * (64 << 10)


@pytest.mark.hostile
def test_only_a_pipe_at_the_outputs_path_is_read(root: Path, output: QemuOutput) -> None:
    """A QEMU that was taken over has put something else there."""
    secret = root / "secret"
    secret.write_text("secret")
    with secret.open() as file, subprocess.Popen(["sleep", "60"], stderr=file) as process:
        (root / f"run/qemu/{NAME}.pid").write_text(str(process.pid))
        opened = OpenedSince()
        output.follow(NAME, DOMAIN)
        assert opened.count() == 0
        process.kill()
    assert not log_of(root).exists()


@pytest.mark.hostile
def test_the_pipe_is_for_that_vms_user_only_and_replaces_what_is_at_its_path(root: Path, output: QemuOutput) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path = root / "output" / NAME
    path.symlink_to(root / "elsewhere")
    with output.of_start(NAME, QemuIds(64999, 64108, is_its_own=True)):
        found = path.lstat()
    assert stat.S_ISFIFO(found.st_mode)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (64999, 0o600)
    assert not (root / "elsewhere").exists()


def test_a_pipe_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone/output"
    with (
        contextlib.closing(QemuOutput(str(gone))) as output,
        pytest.raises(InternalError, match=f"the pipe {gone}/{NAME} .*No such file"),
        output.of_start(NAME, None),
    ):
        pass


def test_no_pipe_is_made_if_libvirt_has_virtlogd(tmp_path: Path) -> None:
    with contextlib.closing(QemuOutput("")) as output, output.of_start(NAME, None) as said:
        assert said() == ""
        output.follow(NAME, DOMAIN)


def test_an_unreadable_pipe_blocks_no_other_pipe(
    root: Path, output: QemuOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failed = os.read, []

    def fails_once(reader: int, size: int) -> bytes:
        if not failed and size > 1:
            failed.append(reader)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(reader, size)

    with output.of_start(NAME, None):
        first = qemu(root, "v", 10, stays=True)
        said_by(first)
    with monkeypatch.context() as patch:
        patch.setattr("os.read", fails_once)
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.close()
        wait_for(lambda: bool(failed))
    first.stdout.close()
    first.wait(60)
    with output.of_start(NAME, None):
        second = qemu(root, "w", 10, stays=True)
        said_by(second)
    second.communicate()
    wait_for(lambda: in_log_of(root).endswith(b"w" * 10))
