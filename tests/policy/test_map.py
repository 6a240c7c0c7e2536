"""The tree in docs/ARCHITECTURE.md has exactly the packages of the code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("virtshim", "tapmanager", "vmwrapper")
# A line of the tree that begins with a directory. Lines of modules and of text do not match.
LINE = re.compile(r"    ( *)([\w-]+)/(?: |$)")


def drawn(page: str) -> Iterator[str]:
    """The paths of the tree's directories, which are indented by two spaces per level."""
    above: list[str] = []
    tree = page.partition("\n## Tree\n")[2].partition("\n## ")[0]
    for line in tree.splitlines():
        if found := LINE.match(line):
            above[len(found[1]) // 2 :] = [found[2]]
            yield "/".join(above)


def packages(project: Any) -> set[str]:
    return {project.name(path.parent) for path in project.modules(*PROGRAMS)}


def test_the_tree_names_exactly_the_packages_of_the_programs(project: Any) -> None:
    page = Path(project.root, "docs/ARCHITECTURE.md").read_text()
    assert {path for path in drawn(page) if path.partition("/")[0] in PROGRAMS} == packages(project)


def test_indentation_decides_the_parent_of_a_directory() -> None:
    lines = ["a/     one", "  b/   two", "    c/ three", "         more of it", "  d.py, e/f.py", "  g/   four"]
    page = "\n## Tree\n\n" + "".join(f"    {line}\n" for line in lines) + "\n## Next\n\n    z/ no\n"
    assert list(drawn(page)) == ["a", "a/b", "a/b/c", "a/g"]
