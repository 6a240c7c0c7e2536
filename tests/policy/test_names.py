"""Names say what a thing is, packages stay where they belong, and no file knows the machine it was written on."""

import ast
import re
from typing import Any

FORBIDDEN_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager", "managers"}
FORBIDDEN_CLASS_ENDINGS = ("Manager", "Helper", "Utils")

# What runs inside a guest may know the guest's directories.
GUEST = "deploy/guest/"
PRODUCT = ("criproto", "virtshim", "vmwrapper", "tapmanager", "systemd", "deploy")
# Written in pieces, so that this file does not match itself.
MACHINE_PATHS = re.compile("|".join(rf"(?<![\w.]){'/'}{top}/" for top in ("work", "Users")))
HOME_PATHS = re.compile("|".join(rf"(?<![\w.]){'/'}{top}/" for top in ("home", "root")))
PACKAGE_SOURCES = re.compile("--(?:extra-)?index-url|--trusted-host|--find-links")


def lines_matching(project: Any, pattern: re.Pattern[str], *tops: str) -> list[str]:
    found: list[str] = []
    for path in project.files(*tops):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{project.name(path)}:{number} {line.strip()[:160]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if pattern.search(line)
        ]
    return found


def test_no_module_or_package_has_a_name_that_says_nothing(project: Any) -> None:
    nameless = {
        project.name(path)
        for path in project.modules()
        if FORBIDDEN_MODULES & {path.stem, *path.relative_to(project.root).parts[:-1]}
    }
    assert nameless == set()


def test_no_class_has_a_name_that_says_nothing(project: Any) -> None:
    nameless = [
        f"{project.name(path)}:{node.lineno} {node.name}"
        for path in project.modules()
        for node in ast.walk(project.tree(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith(FORBIDDEN_CLASS_ENDINGS)
    ]
    assert nameless == []


def test_every_init_file_is_empty(project: Any) -> None:
    filled = [project.name(path) for path in project.files() if path.name == "__init__.py" and path.stat().st_size]
    assert filled == []


def test_systemd_is_not_a_package_because_another_project_owns_that_import_name(project: Any) -> None:
    assert [project.name(path) for path in project.files("systemd") if path.suffix == ".py"] == []


def test_no_file_mentions_a_path_of_the_machine_it_was_written_on(project: Any) -> None:
    assert lines_matching(project, MACHINE_PATHS) == []


def test_no_product_file_mentions_a_home_directory(project: Any) -> None:
    on_the_host = [line for line in lines_matching(project, HOME_PATHS, *PRODUCT) if not line.startswith(GUEST)]
    assert on_the_host == []


def test_lock_and_project_file_name_no_package_index(project: Any) -> None:
    sources = [
        line for line in lines_matching(project, PACKAGE_SOURCES) if line.startswith(("requirements", "pyproject"))
    ]
    assert sources == []


def test_the_path_patterns_find_what_they_look_for() -> None:
    slash = "/"
    assert MACHINE_PATHS.search(f"cd {slash}work{slash}x")
    assert not MACHINE_PATHS.search(f"net{slash}work{slash}x")
    assert HOME_PATHS.search(f"{slash}root{slash}.kube")
    assert not HOME_PATHS.search(f"images{slash}root{slash}x")
