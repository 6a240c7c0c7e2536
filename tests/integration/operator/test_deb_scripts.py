"""The Debian package's scripts for installation, removal and purge call the right commands. They run on a tree with
commands that only record their calls."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from virtshim.setup.node_setup import NodeSetup
from virtshim.setup.tree import NodeTree
from virtshim.setup.units import Systemctl

pytestmark = pytest.mark.operator

# Commands that only record their calls, with their exit codes.
COMMANDS = {
    "deb-systemd-invoke": 0, "deb-systemd-helper": 0, "systemctl": 0, "systemd-sysusers": 0, "systemd-tmpfiles": 0,
    "dpkg-statoverride": 0, "aa-enabled": 1, "apparmor_parser": 0, "getent": 1, "userdel": 0,
}  # fmt: skip
SETUP = "var/lib/virtshim/setup"


@dataclass(frozen=True)
class Node:
    root: Path
    scripts: Path

    def run(self, name: str, *argv: str, code: int = 0) -> str:
        """Runs the script; returns its output. `code`: the expected exit code."""
        text = re.sub(r"(?<![\w.}/])/(etc|var|run|usr/share)/", rf"{self.root}/\1/", (self.scripts / name).read_text())
        script = self.root.parent / name
        script.write_text(text)
        done = subprocess.run(
            ["/bin/sh", script, *argv], capture_output=True, text=True, check=False, timeout=60,
            env={"PATH": f"{self.root.parent}/bin:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr

    def asked(self) -> list[str]:
        place = self.root.parent / "asked"
        return place.read_text().splitlines() if place.exists() else []

    def write(self, path: str, text: str = "") -> Path:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self.root / path


@pytest.fixture
def node(tmp_path: Path, pytestconfig: pytest.Config) -> Node:
    for name, code in COMMANDS.items():
        place = tmp_path / "bin" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\nexit {code}\n')
        place.chmod(0o755)
    node = Node(tmp_path / "node", pytestconfig.rootpath / "deploy/deb")
    for path in ("run/systemd/system/any", "run/virtshim/any", "etc/virtshim/config.toml", "var/lib/virtshim/images/a"):
        node.write(path)
    return node


def test_removal_stops_every_unit_socket_first_and_purge_forgets_them(node: Node, pytestconfig: pytest.Config) -> None:
    units = {path.name for path in (pytestconfig.rootpath / "systemd").glob("*.*") if path.suffix != ".conf"}
    assert node.run("prerm", "remove") == ""
    (stopped,) = [line.split()[-len(units) :] for line in node.asked()]
    assert set(stopped) == units
    assert stopped[0] == "tapmanager.socket"
    node.run("postrm", "purge")
    assert units == {line.split()[-1] for line in node.asked() if line.startswith("deb-systemd-helper purge")}


@pytest.mark.parametrize(
    ("built_for", "python", "release", "code"),
    [
        ("deb12", "9.99", 'ID=debian\nVERSION_ID="12"\n', 0),  # apt may unpack this package before its Python
        ("deb12", "9.99", 'ID=debian\nVERSION_ID="13"\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n', 1),
        ("deb12", "9.99", "ID=ubuntu\nVERSION_ID=24.04\n", 1),
        ("deb12", "9.99", "ID=debian\nVERSION_CODENAME=forky\n", 1),
        ("deb12", "9.88", "ID=mint\nVERSION_ID=6\n", 0),
        ("deb12", "9.88", 'ID=debian\nVERSION_ID="13"\n', 0),  # of an upgraded node, which has kept Debian 12's Python
        ("ubuntu24.04", "9.99", 'ID=ubuntu\nVERSION_ID="24.04"\n', 0),
        ("ubuntu24.04", "9.99", 'ID=debian\nVERSION_ID="13"\n', 1),
        ("ubuntu24.04", "9.99", "ID=ubuntu\nVERSION_ID=26.04\n", 1),
    ],
)
@pytest.mark.parametrize("call", ["install", "upgrade"])
def test_a_system_whose_python_does_not_fit_is_refused_before_anything_is_unpacked(
    node: Node, tmp_path: Path, built_for: str, python: str, release: str, code: int, call: str
) -> None:
    node.write("etc/os-release", release)
    text = (node.scripts / "preinst").read_text().replace("@PYTHON@", python).replace("@BUILT_FOR@", built_for)
    (tmp_path / "preinst").write_text(text)
    (tmp_path / "bin/python9.88").touch(mode=0o755)
    said = Node(node.root, tmp_path).run("preinst", call, "1", code=code)
    assert bool(said) == bool(code)
    if code:
        assert f"this package is for {built_for}, with Python 9.99, which " in said
        assert re.search(r"install the package whose name has ~(deb13|ubuntu2[46]\.04|debforky), or build it", said)


def test_an_upgrade_restarts_services_and_keeps_the_socket(node: Node, pytestconfig: pytest.Config) -> None:
    node.run("prerm", "upgrade", "2")
    assert node.asked() == []
    node.run("postinst", "configure", "1")
    (told,) = [line for line in node.asked() if "try-restart" in line]
    assert set(told.split()[2:]) == {path.name for path in (pytestconfig.rootpath / "systemd").glob("*.service")}
    assert "deb-systemd-helper update-state tapmanager.socket" in node.asked()


def test_an_installation_enables_and_starts_nothing(node: Node) -> None:
    """`virtshim setup` does, and operators start what is optional: the proxy, the device plugin, the agent."""
    node.run("postinst", "configure", "")
    asked = {tuple(line.split()[:2]) for line in node.asked() if line.startswith(("deb-systemd", "systemctl"))}
    helper = {("deb-systemd-helper", "unmask"), ("deb-systemd-helper", "update-state")}
    assert asked == {*helper, ("systemctl", "--system")}


def test_a_service_that_does_not_stop_does_not_block_removal(node: Node) -> None:
    (node.root.parent / "bin/deb-systemd-invoke").write_text("#!/bin/sh\nexit 1\n")
    assert "a service did not stop" in node.run("prerm", "remove")


def test_removal_from_a_configured_node_says_what_stays_and_how_to_undo_it(node: Node) -> None:
    node.write(f"{SETUP}/manifest.json")
    said = node.run("prerm", "remove")
    assert "what `virtshim setup` changed on this node stays" in said
    assert "virtshim setup --undo" in said


def test_a_purge_deletes_everything(node: Node) -> None:
    node.write(f"{SETUP}/lock")
    assert node.run("postrm", "purge") == ""
    for path in ("var/lib/virtshim", "run/virtshim", "etc/virtshim"):
        assert not (node.root / path).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: wants root")
def test_a_new_installation_after_a_purge_can_undo_setup(node: Node) -> None:
    node.write("etc/crictl.yaml", "theirs\n")
    setup = NodeSetup(NodeTree(str(node.root)), Systemctl(str(node.root)))
    setup.set_up()
    said = node.run("postrm", "purge")
    assert "kept: " in said
    assert "virtshim setup --undo" in said
    assert os.listdir(node.root / "var/lib/virtshim") == ["setup"]
    assert not (node.root / "etc/virtshim").exists()
    # systemd-tmpfiles makes it at the next installation.
    node.write("etc/virtshim/config.toml")
    setup.undo()
    assert (node.root / "etc/crictl.yaml").read_text() == "theirs\n"
    assert not (node.root / SETUP).exists()
    assert (node.root / "etc/virtshim/config.toml").read_text() == ""


@pytest.mark.parametrize("theirs", ["", "/mine r,\n", "/mine r,"])
def test_apparmor_rules_are_added_once_and_removed(node: Node, theirs: str) -> None:
    """The last line of the existing file may lack its newline."""
    node.write("etc/apparmor.d/usr.sbin.libvirtd", "profile")
    node.write("usr/share/virtshim/apparmor/usr.sbin.libvirtd", "/vmwrapper PUx,\n")
    local = node.write("etc/apparmor.d/local/usr.sbin.libvirtd", theirs)
    for _ in range(2):
        node.run("postinst", "configure", "")
        kept = "/mine r,\n" if theirs else ""
        assert local.read_text() == f"{kept}# virtshim: begin\n/vmwrapper PUx,\n# virtshim: end\n"
    node.run("postrm", "remove")
    assert local.read_text() == kept
