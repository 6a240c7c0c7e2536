"""pip, called as by set-up and the documents, runs no code of a taken-over package index."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.hostile

PLACES = ("deploy/setup.sh", "deploy/deb/build.sh", "docs/install.md")


def at_each_place(sample: str) -> pytest.MarkDecorator:
    """`make test` tries one of them."""
    places = [pytest.param(place, marks=[pytest.mark.full] * (place != sample)) for place in PLACES]
    return pytest.mark.parametrize("place", places)


# The attacker's build tool: whatever runs it has run the attacker's code.
BACKEND = """
import pathlib
pathlib.Path({mark!r}).touch()
raise SystemExit("taken over")
"""


def wheel(directory: Path, name: str, version: str, module: str) -> Path:
    """A wheel `name` with one module of that text."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = {path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
              for path, text in files.items()}  # fmt: skip
    record = "".join(f"{path},sha256={digest[path]},{len(text)}\n" for path, text in files.items())
    made = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return made


def source_package(directory: Path, name: str, version: str, builder: str) -> Path:
    """A source package that matches the lock, but whose build tool does not."""
    made = directory / f"{name}-{version}.tar.gz"
    files = {
        "pyproject.toml": f'[build-system]\nrequires = ["{builder}"]\nbuild-backend = "{builder}"\n',
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    with tarfile.open(made, "w:gz") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return made


def commands(text: str) -> list[list[str]]:
    """The options of each pip command there that uses a lock."""
    found = re.findall(r"pip\b[^|;&`\n]*?\sinstall\s([^|;&`\n]*\s-r [^|;&`\n]*)", text.replace("\\\n", " "))
    return [shlex.split(one) for one in found]


def installing(options: list[str], lock: Path, index: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command with another lock and another index."""
    options = [str(lock) if option.endswith(".lock") else option for option in options]
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--no-index", "--find-links", index, "--target", target],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture
def told(place: str, pytestconfig: pytest.Config) -> list[list[str]]:
    """The pip commands of one place."""
    found = commands((pytestconfig.rootpath / place).read_text())
    assert found, f"{place} installs by no lock"
    return found


@at_each_place(PLACES[0])
def test_a_build_tool_outside_the_locks_never_runs(told: list[list[str]], tmp_path: Path) -> None:
    """libvirt-python is built from source. No hash checks the packages that pip fetches for a build."""
    index, mark = tmp_path / "index", tmp_path / "taken over"
    index.mkdir()
    wheel(index, "evil_builder", "99", BACKEND.format(mark=str(mark)))
    victim = source_package(index, "libvirt-python", "12.8.0", "evil_builder")
    lock = tmp_path / "its.lock"
    lock.write_text(f"libvirt-python==12.8.0 --hash=sha256:{hashlib.sha256(victim.read_bytes()).hexdigest()}\n")
    for options in told:
        done = installing(options, lock, index, tmp_path / "target")
        assert done.returncode != 0
        assert not mark.exists(), done.stdout + done.stderr


@at_each_place(PLACES[1])
def test_a_file_that_does_not_match_the_lock_is_refused(told: list[list[str]], tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    sound = wheel(index, "grpcio", "1.0", "")
    lock = tmp_path / "its.lock"
    lock.write_text(f"grpcio==1.0 --hash=sha256:{hashlib.sha256(sound.read_bytes()).hexdigest()}\n")
    wheel(index, "grpcio", "1.0", "import os")
    for options in told:
        done = installing(options, lock, index, tmp_path / "target")
        assert done.returncode != 0
        assert "HASH" in done.stderr, done.stderr
        assert not (tmp_path / "target" / "grpcio.py").exists()


@at_each_place(PLACES[2])
def test_a_package_outside_the_locks_is_not_installed_as_a_dependency(told: list[list[str]], tmp_path: Path) -> None:
    """The metadata of a locked wheel requires one more package."""
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "evil", "1.0", "")
    sound = wheel(index, "grpcio", "1.0", "")
    with zipfile.ZipFile(sound) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}
    with zipfile.ZipFile(sound, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data + b"Requires-Dist: evil\n" if name.endswith("METADATA") else data)
        archive.writestr("grpcio-1.0.dist-info/RECORD", "")
    lock = tmp_path / "its.lock"
    lock.write_text(f"grpcio==1.0 --hash=sha256:{hashlib.sha256(sound.read_bytes()).hexdigest()}\n")
    for options in told:
        done = installing(options, lock, index, tmp_path / "target")
        assert done.returncode != 0
        assert not (tmp_path / "target" / "evil.py").exists()
