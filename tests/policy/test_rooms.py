"""Packages have no import circle, no upward import, and not too many modules.

import-linter decides which package may import which (pyproject.toml); these tests show that it would report violations."""

import ast
import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FILES_IN_A_PACKAGE = 40

Graph = Mapping[str, frozenset[str]]


def import_graph(root: Path, files: Iterable[Path]) -> Graph:
    """Module -> the `files` that it imports anywhere, including for type checkers and inside functions."""
    modules = {module_name(root, path): path for path in files}
    return {
        name: frozenset(one for one in imported(ast.parse(path.read_text()), modules) if one in modules) - {name}
        for name, path in modules.items()
    }


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: Mapping[str, Path]) -> Iterator[str]:
    """The imported modules; ruff refuses relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in modules else node.module


def circles(graph: Graph) -> list[list[str]]:
    """Each set of modules that all import each other."""
    reached = {name: reachable(graph, name) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(circle) for circle in found if circle)


def reachable(graph: Graph, start: str) -> frozenset[str]:
    """The modules reachable by one import or more; `start` only if it is in a circle."""
    seen: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += graph[name]
    return frozenset(seen)


def crowded(files: Iterable[Path]) -> dict[Path, int]:
    """Directories with too many modules of their own; packages below them do not count."""
    counts = Counter(path.parent for path in files if path.name != "__init__.py")
    return {directory: count for directory, count in counts.items() if count > FILES_IN_A_PACKAGE}


def test_no_modules_import_each_other_in_a_circle(project: Any) -> None:
    graph = import_graph(project.root, project.modules())
    assert any(graph.values())
    assert circles(graph) == []


def test_no_package_has_more_than_40_modules(project: Any) -> None:
    assert {project.name(directory): count for directory, count in crowded(project.modules()).items()} == {}


def written(root: Path, **texts: str) -> list[Path]:
    """Writes a package `room` with these modules."""
    (root / "room").mkdir()
    for name, text in {"__init__": "", **texts}.items():
        (root / "room" / f"{name}.py").write_text(text)
    return sorted(root.glob("room/*.py"))


@pytest.mark.parametrize(
    "back",
    [
        "import room.one\n",
        "from room import one\n",
        "from room.one import value\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.one import value\n",
        "def later():\n    from room.one import value\n",
    ],
)
def test_an_import_circle_inside_a_package_is_detected(tmp_path: Path, back: str) -> None:
    files = written(
        tmp_path, one="from room import two\n", two="from room.three import x\n", three=back, four="import room.one"
    )
    assert circles(import_graph(tmp_path, files)) == [["room.one", "room.three", "room.two"]]


def test_one_way_imports_are_not_a_circle(tmp_path: Path) -> None:
    files = written(tmp_path, one="from room import two, three\n", two="import room.three\n", three="import os, room\n")
    assert circles(import_graph(tmp_path, files)) == []


def test_a_package_of_60_files_is_detected(tmp_path: Path) -> None:
    files = written(tmp_path, **{f"module{number}": "" for number in range(60)})
    assert crowded(files) == {tmp_path / "room": 60}
    assert crowded(files[: FILES_IN_A_PACKAGE + 1]) == {}  # __init__.py is no module to be found


@pytest.fixture
def copy(project: Any, tmp_path: Path) -> Any:
    """A copy of the programs and their import rules, for changes."""
    for top in ("criproto", "virtshim", "vmwrapper", "tapmanager"):
        shutil.copytree(project.root / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project.root / "pyproject.toml", tmp_path)
    return dataclasses.replace(project, root=tmp_path)


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("virtshim/model/spoilt.py", "import virtshim.cli.main", "virtshim.model is not allowed to import virtshim.cli"),
        ("virtshim/annotations/spoilt.py", "import libvirt", "virtshim.annotations.spoilt -> libvirt"),
        ("virtshim/store/spoilt.py", "import virtshim.cri.server", "virtshim.store is not allowed to import virtshim.cri"),
        ("virtshim/containers/spoilt.py", "import virtshim.system.process", "virtshim.containers is not allowed to import"),
        ("virtshim/images/spoilt.py", "import virtshim.config.settings", "virtshim.images.spoilt -> virtshim.config.settings"),
        ("virtshim/cri/spoilt.py", "import libvirt", "virtshim.cri.spoilt -> libvirt"),
        ("virtshim/disks/spoilt.py", "import sqlalchemy", "virtshim.disks.spoilt -> sqlalchemy"),
        ("virtshim/store/spoilt.py", "import logging", "virtshim.store.spoilt -> logging"),
        ("tapmanager/spoilt.py", "import virtshim.system.daemon", "tapmanager is not allowed to import virtshim"),
        ("virtshim/new_room/__init__.py", "", "new_room"),
        ("virtshim/new_module.py", "", "new_module"),
    ],
)  # fmt: skip
def test_an_import_across_a_border_is_detected(copy: Any, file: str, line: str, told: str) -> None:
    """A package, or a module beside the packages, that is in no layer is an error, too: otherwise its imports would be
    unchecked."""
    spoilt = copy.root / file
    spoilt.parent.mkdir(exist_ok=True)
    spoilt.write_text(f"{line}\n")
    with pytest.raises(pytest.fail.Exception, match=re.escape(told)):
        copy.check(["lint-imports", "--no-logo", "--no-cache"])


def test_the_unchanged_code_crosses_no_border(copy: Any) -> None:
    copy.check(["lint-imports", "--no-logo", "--no-cache"])
