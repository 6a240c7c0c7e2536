"""Each fake and the real part that it replaces pass one contract suite."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.world import Outside

SAYS_SO = re.compile(r"Implements `virtshim\.(?:\w+\.ports|system\.clock)\b")


def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def imported(path: Path) -> tuple[set[str], set[str]]:
    """The imported names and modules."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in found for alias in node.names}, {node.module or "" for node in found}


@pytest.fixture(scope="module")
def held(project: Any) -> set[str]:
    """Fakes that a contract suite (a test file, or the `worlds.py` of a directory) imports beside real parts of the product."""
    found: set[str] = set()
    for path in project.modules("tests/contract"):
        names, modules = imported(path)
        real = [module for module in modules if re.match(r"virtshim\.(?!model\b|\w+\.ports\b|config\b)", module)]
        if path.name.startswith(("test_", "worlds.")) and "fakes.world" not in modules and real:
            found |= names
    return found


def test_every_fake_of_a_port_is_tested_by_a_contract_suite(project: Any, held: set[str]) -> None:
    fakes = {
        name
        for path in project.modules("tests/fakes")
        for name, node in classes(path).items()
        if SAYS_SO.search(ast.get_docstring(node) or "")
    }
    assert len(fakes) > 10, "the fakes say which ports they implement"
    assert fakes - held == set()


def test_every_fake_says_which_port_it_implements() -> None:
    """A base class may say it. `dressed` replaces fakes by real parts, `written` is only a count."""
    parts = [
        part
        for name, part in vars(Outside()).items()
        if part is not None and name not in ("journal", "dressed", "written")
    ]
    silent = [
        type(part).__name__
        for part in parts
        if not any(SAYS_SO.search(inspect.getdoc(one) or "") for one in type(part).__mro__)
    ]
    assert silent == []
