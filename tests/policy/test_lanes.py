"""`make test` runs every test file, in one lane each, and no lane may skip what the machine could have run."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Lane:
    """One pytest of `make test`."""

    words: tuple[str, ...]
    """Its command line."""
    not_entered: frozenset[str]
    """Names of directories that pytest enters only if told to."""

    def has(self, file: PurePosixPath) -> bool:
        ignored = [word.removeprefix("--ignore=") for word in self.words if word.startswith("--ignore=")]
        if any(file.is_relative_to(directory) for directory in ignored):
            return False
        named = [word for word in self.words if word.startswith("tests/")]
        return any(map(file.is_relative_to, named)) if named else not self.not_entered & set(file.parts)


@pytest.fixture(scope="module")
def lanes(project: Any) -> list[Lane]:
    facts = tomllib.loads((project.root / "pyproject.toml").read_text())
    not_entered = frozenset(facts["tool"]["pytest"]["ini_options"]["norecursedirs"])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    planned = subprocess.run(
        ["make", "--dry-run", "test", "PYTEST_ARGS=--strict-areas"],
        cwd=project.root, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    commands = [line.partition(" -m pytest ")[2] for line in planned.splitlines() if " -m pytest " in line]
    return [Lane(tuple(shlex.split(command)), not_entered) for command in commands]


def test_every_test_file_is_in_one_lane_of_make_test(project: Any, lanes: list[Lane]) -> None:
    files = [PurePosixPath(project.name(path)) for path in project.modules("tests") if path.name.startswith("test_")]
    assert files
    assert {str(file): count for file in files if (count := sum(lane.has(file) for lane in lanes)) != 1} == {}


def test_in_no_lane_an_area_is_skipped_that_the_machine_could_have_run(lanes: list[Lane]) -> None:
    assert [lane.words for lane in lanes if "--strict-areas" not in lane.words] == []


def test_only_what_runs_apart_is_out_of_the_leak_checks_sight(project: Any) -> None:
    """A process of another PID namespace is not seen by tests/leaks.py."""
    makes_one = re.compile(r"\b(CLONE_NEWPID|unshare\b.*\W(--pid|-[a-zA-Z]*p))\b")
    programs = [path for path in project.files("virtshim", "tapmanager", "vmwrapper", "deploy", "tests")
                if path.suffix in {".py", ".sh", ""} and path != Path(__file__)]  # fmt: skip
    found = {project.name(path) for path in programs if makes_one.search(path.read_text(errors="ignore"))}
    assert found == {"tests/apart.sh"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def test_it(): pytest.skip('needs make')", pytest.ExitCode.TESTS_FAILED),
        ("pytest.skip('needs make', allow_module_level=True)", pytest.ExitCode.TESTS_FAILED),
        ("def test_it(): pytest.skip('NOT TO BE HAD HERE: another kernel')", pytest.ExitCode.OK),
    ],
)
def test_a_skip_fails_the_gate_unless_nobody_could_bring_what_is_missing(
    project: Any, tmp_path: Path, body: str, code: pytest.ExitCode
) -> None:
    module = tmp_path / "test_module.py"
    module.write_text(f"import pytest\n{body}\n")
    (tmp_path / "test_other.py").write_text("def test_that_runs(): pass\n")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--strict-areas",
            f"--rootdir={tmp_path}", "-c", "/dev/null", str(tmp_path),
        ],
        cwd=project.root, env={**os.environ, "PYTHONPATH": f"{project.root}/tests"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
