"""`virtshim check` finds this machine's faults, below a temporary directory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from virtshim.cli.check import check
from virtshim.preflight.checks import ALL

pytestmark = pytest.mark.operator

QEMU = "/usr/bin/qemu-system-x86_64"
PLUGINS = "/usr/lib/cni"


@pytest.fixture
def node() -> Iterator[Path]:
    """A directory that the QEMU user can enter, with the short path that the embedded driver needs."""
    path = Path(tempfile.mkdtemp(prefix="vs-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def config(node: Path) -> Path:
    """A node on which a VM could start, as far as `check` can tell."""
    (node / "vmwrapper").write_text(f'#!/bin/sh\nexec {QEMU} "$@"\n')
    (node / "vmwrapper").chmod(0o755)
    (node / "net.d").mkdir()
    network = {"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}]}
    (node / "net.d" / "10-n.conflist").write_text(json.dumps(network))
    path = node / "config.toml"
    path.write_text(
        f"""
        [paths]
        state_dir = "{node}/state"
        run_dir = "{node}/run"
        [libvirt]
        uri = "qemu:///embed?root={node}/libvirt"
        vmwrapper = "{node}/vmwrapper"
        domain_type = "qemu"
        [cri]
        cgroup_driver = "cgroupfs"
        [tapmanager]
        cni_conf_dir = "{node}/net.d"
        cni_bin_dir = ["{PLUGINS}"]
        """
    )
    return path


needs_a_node = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(QEMU) or not os.path.isdir(PLUGINS) or not os.path.exists("/dev/net/tun"),
    reason="NOT TESTED: wants root, QEMU, CNI plugins and /dev/net/tun",
)


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}


@needs_a_node
def test_a_node_that_can_run_vms_passes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = check(str(config), as_json=True)
    told = findings(capsys)
    assert [finding for finding in told.values() if finding["level"] == "error"] == []
    assert code == 0
    assert told["libvirt"]["text"].startswith("qemu:///embed")
    assert told["emulator"]["level"] == "ok", told["emulator"]
    assert told["tapmanager"]["level"] == "warning"
    assert {finding["check"] for finding in told.values()} <= {check.__name__ for check in ALL}


@needs_a_node
def test_the_nodes_own_libvirt_directory_is_not_opened(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another process may be using it."""
    check(str(config), as_json=True)
    capsys.readouterr()
    assert not (config.parent / "libvirt").exists()


@needs_a_node
def test_every_fault_is_reported_with_its_remedy_and_exit_code_1(
    config: Path, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (node / "state").mkdir(mode=0o700)
    (node / "vmwrapper").chmod(0o700)
    (node / "net.d" / "10-n.conflist").write_text('{"name": "n", "plugins": [{"type": "no-such-plugin"}]}')
    assert check(str(config), as_json=True) == 1
    told = findings(capsys)
    assert told["paths.state_dir"]["remedy"].endswith(f"chmod a+x {node}/state")
    assert told["vmwrapper"]["remedy"] == f"chmod 0755 {node}/vmwrapper"
    assert "no-such-plugin" in told["CNI"]["text"]


def test_an_unreadable_configuration_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("[libvirt]\nurl = 'x'\n")
    assert check(str(tmp_path / "c.toml"), as_json=True) == 1
    told = findings(capsys)
    assert list(told) == ["configuration"]
    assert told["configuration"]["check"] == "configuration"
    assert "libvirt.url" in told["configuration"]["text"]


def test_the_command_prints_one_line_per_finding(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[libvirt]\nurl = 'x'\n")
    argv = [sys.executable, "-c", "import sys; from virtshim.cli.check import check; sys.exit(check(sys.argv[1]))"]
    done = subprocess.run(
        [*argv, str(tmp_path / "c.toml")], capture_output=True, text=True, check=False, env={"COLUMNS": "40"}
    )
    assert done.returncode == 1, done.stderr
    told, remedy = done.stdout.splitlines()
    assert told.startswith("error   configuration    ")
    assert remedy.strip().startswith("-> ")


def test_up_starts_no_daemon_where_no_vm_could_start(node: Path) -> None:
    wrong = node / "wrong.toml"
    wrong.write_text('[libvirt]\nemulator = "/nowhere/qemu"\n')
    up = [sys.executable, "-m", "virtshim", "up", "--dir", str(node / "n"), "--config", str(wrong)]
    done = subprocess.run(up, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 75
    assert "no virtual machine can start on this machine:\n  " in done.stderr
    assert "/nowhere/qemu" in done.stderr
    assert "starting" not in done.stderr
