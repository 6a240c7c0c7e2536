"""Tests are about behaviour: they use a module's public names, and none that begins with an underscore."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAMS = ("criproto", "virtshim", "vmwrapper", "tapmanager")
# File and name -> why a test has to know it.
EXCEPTIONS: dict[tuple[str, str], str] = {}
SETTERS = ("setattr", "delattr", "getattr", "hasattr", "patch", "object")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.Module, *, own_attributes_only: bool = False) -> set[str]:
    """The private names that a module defines: functions, classes, variables, attributes (of `self` only, if so asked)
    and slots."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) if not own_attributes_only:
                found.add(name)
    return {name for name in found if is_private(name)}


def texts(node: ast.expr) -> Iterator[str]:
    """The constant parts of a string."""
    for part in node.values if isinstance(node, ast.JoinedStr) else (node,):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def faults(tree: ast.Module, of_product: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private product name that a test's module uses."""
    own = private_names(tree, own_attributes_only=True)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name, lineno=line) if is_private(name) and name in of_product - own:
                yield line, name
            case ast.ImportFrom(module=str(module), names=names, lineno=line) if module.split(".")[0] in PROGRAMS:
                yield from ((line, one.name) for one in names if is_private(one.name))
                yield from ((line, part) for part in module.split(".") if is_private(part))
            case ast.Import(names=names, lineno=line):
                yield from (
                    (line, one.name)
                    for one in names
                    if one.name.split(".")[0] in PROGRAMS and any(map(is_private, one.name.split(".")))
                )
            case ast.Call(func=ast.Attribute(attr=call) | ast.Name(id=call), args=args, lineno=line) if call in SETTERS:
                for text in (text for one in args[:2] for text in texts(one)):
                    if any(map(is_private, text.split("."))):
                        yield line, text
                    elif text.endswith(".") and text.split(".")[0] in PROGRAMS:
                        yield line, f"{text}{{...}}"  # a name that is put together is one that hides
    yield from names_in_variables(tree)


def names_in_variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names may hide in variables that a test patches by."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="monkeypatch"), attr="setattr"), args=[_, name, _]):
                if not isinstance(name, ast.Constant):
                    yield node.lineno, ast.unparse(name)


@pytest.fixture(scope="module")
def of_product(project: Any) -> set[str]:
    return {name for path in project.modules() for name in private_names(ast.parse(path.read_text()))}


def test_no_test_uses_a_private_name_of_the_product(project: Any, of_product: set[str]) -> None:
    wrong, used = [], set()
    for path in project.modules("tests"):
        file = project.name(path)
        for line, name in faults(ast.parse(path.read_text()), of_product):
            if (file, name) in EXCEPTIONS:
                used.add((file, name))
            else:
                wrong.append(f"{file}:{line}: {name}")
    assert sorted(wrong) == [], "test it by what it does; give the class its collaborator, its clock or its limit"
    assert set(EXCEPTIONS) - used == set(), "an exception that nobody needs any more"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from virtshim.store.writer import _RESERVE", "_RESERVE"),
        ("import virtshim._hidden", "virtshim._hidden"),
        ("records._engine.dispose()", "_engine"),
        ("monkeypatch.setattr(writer, '_RESERVE', 1)", "_RESERVE"),
        ("monkeypatch.setattr('virtshim.store.writer._RESERVE', 1)", "virtshim.store.writer._RESERVE"),
        ("setattr(thing, '_engine', None)", "_engine"),
        ("monkeypatch.setattr(f'virtshim.store.writer.{name}', 1)", "virtshim.store.writer.{...}"),
        ("monkeypatch.setattr(writer, name, 1)", "name"),
    ],
)
def test_a_private_name_is_found_however_it_is_reached(source: str, name: str) -> None:
    assert [found for _, found in faults(ast.parse(source), {"_engine"})] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "self._engine = 1",
        "class Fake:\n    def _engine(self): ...\nfake._engine()",
        "os._exit(0)",
        "record.__class__.__name__",
        "monkeypatch.setattr(asking, 'LIMIT', 0.5)",
        "one, _ = pair",
    ],
)
def test_private_names_of_tests_and_other_libraries_are_allowed(source: str) -> None:
    assert list(faults(ast.parse(source), {"_engine"})) == []
