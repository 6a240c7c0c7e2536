"""docs/dev/dependencies.md explains every dependency, and nothing else."""

import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from criproto.runtime_v1 import api_pb2, api_pb2_grpc

# The first cell of a table row, in backquotes.
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
DEBIAN_HEADING = "## Debian packages"
NPM_HEADING = "## JavaScript"


def normalised(requirement: str) -> str:
    """The package name of a requirement, spelled as indexes compare it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def requirements_in(path: Path) -> list[str]:
    """The requirements of a file, one per line."""
    return [words[0] for line in path.read_text().splitlines() if (words := line.partition("#")[0].split())]


@pytest.fixture(scope="module")
def python_packages(project: Any) -> set[str]:
    facts = tomllib.loads((project.root / "pyproject.toml").read_text())
    wanted = [*facts["build-system"]["requires"], *facts["project"]["dependencies"]]
    for extra in facts["project"]["optional-dependencies"].values():
        wanted += extra
    wanted += requirements_in(project.root / "requirements-build.in")
    return {normalised(requirement) for requirement in wanted}


@pytest.fixture(scope="module")
def debian_packages(project: Any) -> set[str]:
    block = re.search(
        r"^PACKAGES=\(\n(.*?)^\)", (project.root / "deploy/setup.sh").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block, "deploy/setup.sh has no PACKAGES=( ... ) block"
    return {word for line in block.group(1).splitlines() for word in line.split("#")[0].split()}


@pytest.fixture(scope="module")
def explained(project: Any) -> tuple[set[str], set[str]]:
    """The names in the Python tables and in the Debian table."""
    others, debian = (project.root / "docs/dev/dependencies.md").read_text().split(DEBIAN_HEADING)
    python = others.split(NPM_HEADING)[0]
    return {normalised(name) for name in ROW.findall(python)}, set(ROW.findall(debian))


def test_every_npm_package_is_pinned_by_its_digest_and_has_its_licence_and_reason(project: Any) -> None:
    web = project.root / "virtshim/dashboard/web"
    wanted = json.loads((web / "package.json").read_text())
    packages = {**wanted["dependencies"], **wanted["devDependencies"]}
    lock = json.loads((web / "package-lock.json").read_text())["packages"]
    listed = (project.root / "docs/dev/dependencies.md").read_text().split(NPM_HEADING)[1].split(DEBIAN_HEADING)[0]
    assert set(ROW.findall(listed)) == set(packages)
    for name, version in packages.items():
        pinned = lock[f"node_modules/{name}"]
        assert pinned["version"] == version
        assert f"| `{name}` | {pinned['license']} " in listed
    assert [name for name, one in lock.items() if name and not one.get("integrity", "").startswith("sha512-")] == []


def test_every_python_dependency_has_its_reason_and_no_reason_is_left_over(
    python_packages: set[str], explained: tuple[set[str], set[str]]
) -> None:
    assert explained[0] == python_packages


def test_every_debian_package_has_its_reason_and_no_reason_is_left_over(
    debian_packages: set[str], explained: tuple[set[str], set[str]]
) -> None:
    assert explained[1] == debian_packages


def test_every_python_dependency_is_pinned_in_the_lock_file(project: Any, python_packages: set[str]) -> None:
    lock = (project.root / "requirements.lock").read_text()
    pinned = {normalised(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE)}
    assert python_packages - pinned == set()


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_lowest_allowed_grpcio_and_protobuf_can_load_the_generated_code(project: Any) -> None:
    compiled_with = re.search(r"^# Protobuf Python Version: ([0-9.]+)$", source_of(api_pb2), re.MULTILINE)
    assert compiled_with
    needed = {"grpcio": api_pb2_grpc.GRPC_GENERATED_VERSION, "protobuf": compiled_with.group(1)}
    declared = tomllib.loads((project.root / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(re.findall(r"^(grpcio|protobuf)>=([0-9.]+)", "\n".join(declared), re.MULTILINE))
    too_low = {
        name: f"pyproject.toml allows {floors[name]}, the generated code needs {version}"
        for name, version in needed.items()
        if numbers(floors[name]) < numbers(version)
    }
    assert too_low == {}


def source_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()
