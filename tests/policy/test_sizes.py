"""Files and functions stay small enough to be read in one go."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

MODULE_LINES = 600
FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="session")
def trees(project: Any) -> dict[str, ast.Module]:
    return {project.name(path): project.tree(path) for path in project.modules()}


def named(tree: ast.Module, kinds: Any) -> Iterator[Any]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def own_lines(function: Function) -> int:
    """Lines from def to the end; the docstring costs nothing."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def test_no_module_is_longer_than_its_limit(project: Any) -> None:
    lengths = {project.name(path): len(path.read_text().splitlines()) for path in project.modules()}
    assert {name: length for name, length in lengths.items() if length > MODULE_LINES} == {}


def test_no_function_is_longer_than_60_lines(trees: dict[str, ast.Module]) -> None:
    lengths = {
        f"{name}:{function.lineno} {function.name}": own_lines(function)
        for name, tree in trees.items()
        for function in named(tree, Function)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_a_docstring_does_not_count_as_length() -> None:
    tree = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')
    assert [own_lines(function) for function in named(tree, Function)] == [2]
