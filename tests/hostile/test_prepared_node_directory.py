"""`virtshim up --dir` and `down --dir` refuse a directory that another user of the machine could have prepared."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from virtshim.cli import up as up_module
from virtshim.cli.down import down_command
from virtshim.cli.node_dir import NodeDir, NodeOptions
from virtshim.cli.up import take_lock, up_command
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.system.files import lock_file, lock_holder, replace_text
from vmwrapper import bundle

pytestmark = [pytest.mark.hostile, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

STRANGER = 65534


class WouldServe(Exception):
    """`up` got as far as its daemons."""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path below a directory in which everybody can create files, as in /tmp. No daemon is started."""

    def serve(*_: object) -> None:
        raise WouldServe

    monkeypatch.setattr(up_module, "tapmanager_daemon", serve)
    with tempfile.TemporaryDirectory(prefix="h-") as directory:
        os.chmod(directory, 0o1777)
        yield Path(directory)


def strangers(path: Path, text: str | None = None) -> Path:
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    os.chown(path, STRANGER, STRANGER)
    return path


def own(path: Path, mode: int = 0o711) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def everything_below(path: Path) -> dict[str, str]:
    return {str(p): p.read_text() if p.is_file() else "" for p in sorted(path.rglob("*"))}


def up(directory: Path | str) -> None:
    # Of networks for benchmarks: no other node on this machine has it.
    up_command(NodeOptions(str(directory), domain_type="qemu", pod_cidr="198.18.77.0/24"))


def down(directory: Path | str) -> None:
    down_command(str(directory), everything=True)


def strangers_directory(place: Path) -> Path:
    node = strangers(place / "n")
    (node / "config.toml").write_text("nonsense = 1\n")
    return node


def below_a_strangers_directory(place: Path) -> Path:
    return strangers(place / "n") / "node"


def by_a_strangers_link(place: Path) -> Path:
    os.symlink(own(place / "roots"), place / "n")
    os.chown(place / "n", STRANGER, STRANGER, follow_symlinks=False)
    return place / "n"


def by_a_link_into_a_strangers_directory(place: Path) -> Path:
    strangers(place / "strangers")
    (place / "n").symlink_to("strangers")
    return place / "n"


def writable_by_all(place: Path) -> Path:
    return own(place / "n", 0o777)


def writable_by_a_group(place: Path) -> Path:
    node = own(place / "n", 0o775)
    os.chown(node, 0, STRANGER)
    return node


def sticky_itself(place: Path) -> Path:
    return own(place / "n", 0o1777)


def below_one_that_all_may_write(place: Path) -> Path:
    return own(own(place / "n", 0o777) / "node")


def with_a_strangers_state(place: Path) -> Path:
    node = own(place / "n")
    strangers(node / "state")
    return node


def with_a_link_for_its_state(place: Path) -> Path:
    node = own(place / "n")
    strangers(place / "elsewhere")
    (node / "state").symlink_to(place / "elsewhere")
    return node


def with_drop_ins(place: Path) -> Path:
    node = own(place / "n")
    strangers(node / "config.toml.d")
    (node / "config.toml.d" / "1.toml").write_text('[libvirt]\nvmwrapper = "/tmp/mine"\n')
    return node


PREPARED = (
    strangers_directory,
    below_a_strangers_directory,
    by_a_strangers_link,
    by_a_link_into_a_strangers_directory,
    writable_by_all,
    writable_by_a_group,
    sticky_itself,
    below_one_that_all_may_write,
    with_a_strangers_state,
    with_a_link_for_its_state,
    with_drop_ins,
)


@pytest.mark.parametrize("prepared", PREPARED, ids=lambda prepared: prepared.__name__)
def test_up_refuses_a_directory_that_a_stranger_could_have_prepared(
    place: Path, prepared: Callable[[Path], Path]
) -> None:
    node = prepared(place)
    with pytest.raises(InvalidRequest, match="--dir: "):
        up(node)
    assert not (Path(os.path.realpath(node)) / "bin").exists(), "nothing is put there to be run"


@pytest.mark.parametrize("prepared", PREPARED[:8] + PREPARED[-1:], ids=lambda prepared: prepared.__name__)
def test_down_refuses_a_directory_that_a_stranger_could_have_prepared(
    place: Path, prepared: Callable[[Path], Path]
) -> None:
    node = prepared(place)
    before = everything_below(place)
    with pytest.raises(InvalidRequest, match="--dir: "):
        down(node)
    assert everything_below(place) == before


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o700])
def test_a_directory_of_root_below_a_sticky_directory_is_accepted(place: Path, mode: int) -> None:
    with pytest.raises(WouldServe):
        up(own(place / "n", mode))


def test_up_creates_a_directory_for_root_only_whatever_the_umask(place: Path) -> None:
    before = os.umask(0)
    try:
        with pytest.raises(WouldServe):
            up(place / "above" / "n")
    finally:
        os.umask(before)
    loose = [p for p in (place / "above").rglob("*") if p.stat().st_mode & 0o022]
    assert loose == []


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_symlink_in_place_of_a_new_file_is_not_followed(place: Path, link: Callable[[Path, Path], None]) -> None:
    (victim := place / "victim").write_text("precious")
    node = own(place / "n")
    link(victim, node / "config.toml.new")
    replace_text(str(node / "config.toml"), "settings")
    assert victim.read_text() == "precious"
    assert (node / "config.toml").read_text() == "settings"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_symlink_in_place_of_the_lock_is_not_written_to(place: Path, link: Callable[[Path, Path], None]) -> None:
    (victim := place / "victim").write_text("precious")
    own(node := place / "n")
    own(node / "run")
    link(victim, node / "run" / "up.lock")
    with pytest.raises(InvalidRequest, match="cannot be used as a lock"):
        take_lock(NodeDir.at(str(node)))
    assert victim.read_text() == "precious"


def test_a_fifo_or_a_strangers_file_is_not_used_as_lock(place: Path) -> None:
    os.mkfifo(place / "fifo")
    strangers(place / "file", "1\n")
    for name in ("fifo", "file"):
        with pytest.raises(PermissionError, match="not a lock file"):
            lock_file(str(place / name))


def test_down_does_not_signal_a_process_that_does_not_hold_the_lock(place: Path) -> None:
    """One process holds the lock, which names another process."""
    node = NodeDir.at(str(own(place / "n")))
    own(Path(node.run))
    Path(node.config_file).write_text("")
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with open(node.lock, "w", encoding="ascii") as held:
            os.chmod(node.lock, 0o600)
            held.write(f"{victim.pid}\n")
            held.flush()
            fcntl.flock(held, fcntl.LOCK_EX)
            assert lock_holder(node.lock) == 0
            with pytest.raises(ShimError, match="already running"):
                down_command(node.path, everything=True, stop_limit=0.2)
        victim.communicate(b"\n", timeout=30)
        assert victim.returncode == 0, "it was not told to end"
    finally:
        victim.kill()
        victim.wait()


def test_a_vmwrapper_owned_by_a_stranger_is_replaced_even_if_identical(place: Path) -> None:
    """Its owner could change it after the check."""
    bundle.write(str(place / "vmwrapper"))
    os.chown(place / "vmwrapper", STRANGER, STRANGER)
    bundle.write(str(place / "vmwrapper"))
    assert (place / "vmwrapper").stat().st_uid == 0
