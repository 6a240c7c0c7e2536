"""The linters run as tests, so that a plain pytest is the whole gate."""

import tomllib
from typing import Any


def test_ruff_finds_nothing(project: Any) -> None:
    project.check(["-m", "ruff", "check", "--no-fix", "."])


def test_every_file_is_formatted(project: Any) -> None:
    project.check(["-m", "ruff", "format", "--check", "."])


def test_mypy_finds_nothing(project: Any) -> None:
    configured = tomllib.loads((project.root / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    # mypy fails at a directory without Python before it checks the others.
    with_python = [top for top in configured if any(project.modules(top))]
    project.check(["-m", "mypy", *with_python])


def test_imports_point_one_way(project: Any) -> None:
    project.check(["lint-imports", "--no-logo"])
