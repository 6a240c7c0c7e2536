"""`make release` makes a complete release, with the same bytes each time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from release import bom

pytestmark = pytest.mark.operator


@pytest.fixture
def checkout(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """A clean clone of the sources, with what has been built."""
    root, clone = pytestconfig.rootpath, tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(root), str(clone)], check=True)
    for name in (".venv", "build"):
        (clone / name).symlink_to(root / name)
    (clone / ".git/info/exclude").write_text(".venv\nbuild\n")
    return clone


def build(checkout: Path, *words: str, packager: str = "Ada Packager") -> subprocess.CompletedProcess[str]:
    command = [str(checkout / "deploy/release/build.sh"), *words]
    environment = {**os.environ, "DEBFULLNAME": packager, "DEBEMAIL": "ada@packages.test", "FOR": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_bill_of_materials_has_every_package_of_the_lock(pytestconfig: pytest.Config) -> None:
    lock = (pytestconfig.rootpath / "requirements-run.lock").read_text()
    pinned = set(re.findall(r"^(\S+)==(\S+)", lock, re.MULTILINE))
    bills = [json.loads(bom.as_json("0.1.0", lock, 1_700_000_000)) for _ in range(2)]
    assert {(one["name"], one["version"]) for one in bills[0]["components"]} == pinned
    assert bills[0]["metadata"]["component"]["name"] == "virtshim"
    assert bills[0]["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")
    assert bills[0] == bills[1]


@pytest.mark.parametrize(
    ("directory", "url", "words"),
    [
        ("dist", "http://example.com", "must begin with https://"),
        (".", "https://example.com", "exists; name a new directory"),
        ("dist", "https://example.com", "the work tree has changes"),
    ],
)
def test_a_release_that_could_not_be_made_again_is_refused(
    checkout: Path, directory: str, url: str, words: str
) -> None:
    (checkout / "LICENSE").write_text("changed")
    done = build(checkout, str(checkout / directory), url)
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr
    assert not (checkout / "dist").exists()


def test_a_release_without_a_maintainer_of_its_packages_is_refused(checkout: Path) -> None:
    done = build(checkout, str(checkout / "dist"), packager="")
    assert (done.returncode, "Set DEBFULLNAME and DEBEMAIL" in done.stderr) == (1, True), done.stderr
    assert not (checkout / "dist").exists()


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as `make release` does")
def test_a_release_is_complete_and_its_bytes_are_the_same_each_time(checkout: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        done = build(checkout, str(directory), "https://files.example.com/virtshim")
        assert done.returncode == 0, done.stdout + done.stderr
    version = "0.1.0"
    named = subprocess.run(
        [str(checkout / "deploy/deb/build.sh"), "--name"], capture_output=True, text=True, check=True
    )
    assert {path.name for path in first.iterdir()} == {
        "CHANGELOG.md", "SHA256SUMS", "virt.yaml", f"kubectl-virt_{version}.tar.gz", f"virtshim_{version}.cdx.json",
        named.stdout.strip(), f"virtshim-image_{version}.tar", f"virtshim-manifests_{version}.tar.gz",
    }  # fmt: skip
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name
    subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=first, check=True)

    (platform,) = yaml.safe_load((first / "virt.yaml").read_text())["spec"]["platforms"]
    archive = first / platform["uri"].removeprefix("https://files.example.com/virtshim/")
    assert f"{platform['sha256']}  {archive.name}" in (first / "SHA256SUMS").read_text()
    with tarfile.open(archive) as packed:
        assert {one["from"] for one in platform["files"]} == set(packed.getnames())
    with tarfile.open(first / f"virtshim-manifests_{version}.tar.gz") as packed:
        there = {name.removeprefix(f"virtshim-{version}/") for name in packed.getnames()}
    deploy = checkout / "deploy"
    wanted = {
        str(path.relative_to(deploy)) for part in ("kustomize", "monitoring") for path in (deploy / part).rglob("*.*")
    }
    assert wanted | {"events.yaml"} <= there
