"""Files, functions and classes stay small enough to be read in one go."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

MODULE_LINES = 600
FUNCTION_LINES = 60
PUBLIC_METHODS = 10

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


def public_methods(node: ast.ClassDef) -> list[str]:
    """What a caller can call; a property reads as an attribute."""
    return [
        item.name
        for item in node.body
        if isinstance(item, Function)
        and not item.name.startswith("_")
        and not any(ast.unparse(decorator).endswith("property") for decorator in item.decorator_list)
    ]


def answers_a_generated_service(node: ast.ClassDef) -> bool:
    """The contract decides how many methods a servicer has."""
    return any(ast.unparse(base).endswith(("Servicer", "ServicerPart")) for base in node.bases)


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


def test_no_class_has_more_than_10_public_methods(trees: dict[str, ast.Module]) -> None:
    methods = {
        f"{name}:{node.lineno} {node.name}": len(public_methods(node))
        for name, tree in trees.items()
        for node in named(tree, ast.ClassDef)
        if not answers_a_generated_service(node)
    }
    assert {name: count for name, count in methods.items() if count > PUBLIC_METHODS} == {}


def test_a_docstring_does_not_count_as_length() -> None:
    tree = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')
    assert [own_lines(function) for function in named(tree, Function)] == [2]
