"""`make test` collects every test file, and skips nothing that the machine could run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module", params=["test", "test-all"])
def commands(request: pytest.FixtureRequest, project: Any) -> list[str]:
    """The commands of a target of the Makefile, as `.ci/run` calls it."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TESTS"))
    }
    planned = subprocess.run(
        ["make", "--dry-run", request.param, "PYTEST_ARGS=--strict-areas"],
        cwd=project.root, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [line for line in planned.splitlines() if line and not line.startswith("make")]


@pytest.fixture(scope="module")
def words(commands: list[str]) -> list[str]:
    """The arguments of pytest."""
    (command,) = [line.partition(" -m pytest ")[2] for line in commands if " -m pytest " in line]
    return shlex.split(command)


def test_no_setup_step_runs_twice(commands: list[str]) -> None:
    assert "deploy/setup.sh" in commands
    assert len(commands) == len(set(commands))


def test_every_test_file_is_collected(project: Any, words: list[str], pytestconfig: pytest.Config) -> None:
    plugin = words.index("-p")
    chosen = words[:plugin] + words[plugin + 2 :]
    assert [word for word in chosen if word.startswith(("tests", "--ignore", "--deselect", "-k", "-m"))] == ["tests"]
    files = [path for path in project.modules("tests") if path.name.startswith("test_")]
    assert files
    not_entered = pytestconfig.getini("norecursedirs")
    assert [project.name(file) for file in files if set(not_entered) & set(file.parts)] == []


def test_an_area_that_the_machine_can_run_may_not_be_skipped(words: list[str]) -> None:
    assert "--strict-areas" in words


def test_a_marked_test_is_left_to_make_test_all(project: Any, tmp_path: Path) -> None:
    body = "import pytest\ndef test_short(): pass\n@pytest.mark.full\ndef test_long(): pass\n"
    (tmp_path / "test_module.py").write_text(body)
    assert "1 passed, 1 deselected" in run(project, tmp_path).stdout
    assert "2 passed" in run(project, tmp_path, "--all").stdout


def test_the_leak_check_ignores_only_other_pid_namespaces(project: Any) -> None:
    """tests/leaks.py does not see processes of another PID namespace."""
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
@pytest.mark.parametrize("workers", [(), ("-p", "tests.gate", "--apart")])
def test_a_skip_fails_the_gate_unless_the_requirement_cannot_be_installed(
    project: Any, tmp_path: Path, body: str, code: pytest.ExitCode, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_module.py").write_text(f"import pytest\n{body}\n")
    (tmp_path / "test_other.py").write_text("def test_that_runs(): pass\n")
    done = run(project, tmp_path, "--strict-areas", *workers)
    assert done.returncode == code, done.stdout + done.stderr


def test_the_workers_run_every_test_and_record_how_long_each_file_took(project: Any, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    done = run(project, tmp_path, "-p", "tests.gate", "--apart", "--began=0")
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    assert "test_minutes: " in done.stdout
    assert (tmp_path / "build/durations.json").read_text().count(".py") == 3


def run(project: Any, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests in that directory with this tree's conftest."""
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options,
            f"--rootdir={directory}", "-c", "/dev/null", str(directory),
        ],
        cwd=project.root, env={**os.environ, "PYTHONPATH": f"{project.root}/tests:{project.root}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
