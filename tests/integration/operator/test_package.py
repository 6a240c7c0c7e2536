"""`pip install` of the wheel gives a node its commands, and a vmwrapper that needs neither wheel nor commands."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.operator


def run(*argv: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory), cwd=pytestconfig.rootpath)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip unpacks it, without the checkout."""
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def test_the_wheel_holds_the_four_packages_the_licence_and_nothing_of_the_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "criproto",
        "virtshim",
        "vmwrapper",
        "tapmanager",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "criproto/api.proto" in names
    page = {"index.html", "main.js", "main.css", "icon.svg", "LICENSES.txt"}
    assert {f"virtshim/dashboard/dist/{name}" for name in page} <= set(names)
    assert not [name for name in names if name.startswith("virtshim/dashboard/web/")], "what it is built from"
    assert not [name for name in names if "__pycache__" in name]


def test_both_commands_run_from_the_installed_wheel(installed: Path) -> None:
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "virtshim = virtshim.cli.main:main" in entry_points.read_text()
    assert "tapmanager = tapmanager.__main__:main" in entry_points.read_text()
    for module, says in (("virtshim", "Serve CRI on a Unix socket"), ("tapmanager", "--config")):
        assert says in run(sys.executable, "-m", module, "--help", cwd=installed, PYTHONPATH=str(installed))


def test_an_installed_node_makes_its_database_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    make = f"from virtshim.store.records import SqliteRecords as R; r = R({str(tmp_path / 'db')!r})"
    code = f"{make}; print(r.node_id()); r.close()"
    assert run(sys.executable, "-c", code, cwd=installed, PYTHONPATH=str(installed)).strip()


def test_vmwrapper_is_one_file_that_the_systems_python_runs(installed: Path, tmp_path: Path) -> None:
    target = tmp_path / "vmwrapper"
    code = f"from vmwrapper import bundle; bundle.write({str(target)!r})"
    run(sys.executable, "-c", code, cwd=installed, PYTHONPATH=str(installed))
    assert target.read_bytes().startswith(b"#!/usr/bin/python3")
    said = run(str(target), "-version", cwd=Path("/"), VIRTSHIM_EMULATOR="/bin/echo", PATH="/usr/bin:/bin")
    assert said.strip() == "-version"
