"""A remedy names only files that every node has."""

import ast
import re
from collections.abc import Iterator
from typing import Any

# The text of a page, which says where the package has them.
OF_A_PAGE = "virtshim/config/"


def test_no_remedy_names_a_file_that_only_the_sources_have(project: Any) -> None:
    """A node that was installed from the package has the files of deploy/ below /usr/share/virtshim."""
    found = [
        f"{name}: {path}"
        for name, text in texts(project)
        for path in re.findall(r"\bdeploy/([\w./-]*\w)", text)
        if f"/usr/share/virtshim/{path}" not in text
    ]
    assert found == []


def test_files_below_deploy_that_a_remedy_names_exist(project: Any) -> None:
    named = {path for _, text in texts(project) for path in re.findall(r"/usr/share/virtshim/([\w./-]*\w)", text)}
    assert "flexvolume_driver" in named
    assert {path for path in named if not (project.root / "deploy" / path).is_file()} == set()


def texts(project: Any) -> Iterator[tuple[str, str]]:
    """Every string of the programs except docstrings."""
    for path in project.modules():
        name = project.name(path)
        if name.startswith(OF_A_PAGE):
            continue
        tree = project.tree(path)
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield name, node.value
