"""Dotted names in docstrings and comments exist."""

import re
from pathlib import Path
from typing import Any

import pytest

# The annotations are below virtshim.io.
REFERENCE = re.compile(r"`((?:virtshim|tapmanager|vmwrapper|confine)(?!\.io\b)(?:\.\w+)+)")


def is_there(root: Path, dotted: str) -> bool:
    """Whether it is a package, a module, or a name in a module's text."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:end])
        module = path.with_suffix(".py")
        if end == len(parts) and path.is_dir():
            return True
        if module.is_file():
            text = module.read_text()
            return all(re.search(rf"\b{re.escape(name)}\b", text) for name in parts[end:])
    return False


def test_dotted_names_in_docstrings_exist(project: Any) -> None:
    wrong = [
        f"{project.name(path)}: {dotted}"
        for path in project.modules()
        for dotted in REFERENCE.findall(path.read_text())
        if not is_there(project.root, dotted)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("dotted", "there"),
    [
        ("virtshim.model", True),
        ("virtshim.model.errors", True),
        ("virtshim.model.errors.ShimError", True),
        ("virtshim.model.errors.NoSuchError", False),
        ("virtshim.no_such_room.module", False),
        ("virtshim.model.ShimError", False),
    ],
)
def test_the_check_resolves_references(project: Any, dotted: str, there: bool) -> None:
    assert is_there(project.root, dotted) is there
