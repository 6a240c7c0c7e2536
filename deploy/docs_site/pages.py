"""MkDocs hook: adds README, CONTRIBUTING and CHANGELOG, and the pages made from the code. Links out of docs/ lead to copies
of the files."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = os.path.realpath(f"{os.path.dirname(os.path.realpath(__file__))}/../..")
sys.path[:0] = [ROOT, f"{ROOT}/deploy"]  # the code of this tree, whatever is installed

from docs_site import reference  # noqa: E402

# Path in the tree -> path in the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    wanted: set[str] = set()
    for source, page in PAGES.items():
        with open(f"{ROOT}/{source}", encoding="utf-8") as file:
            files.append(File.generated(config, page, content=file.read()))
    for page, text in reference.pages().items():
        files.append(File.generated(config, page, content=text))
    for one in list(files.documentation_pages()):
        wanted |= _files_outside(one.content_string, _tree_path(one.src_uri))
    for path in sorted(wanted):
        files.append(File.generated(config, _copy(path), content=_content(f"{ROOT}/{path}")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    if here == "annotations.md":
        markdown += reference.annotations_section()

    def moved(match: re.Match[str]) -> str:
        target = _site_path(posixpath.normpath(posixpath.join(posixpath.dirname(_tree_path(here)), match[2])))
        return f"{match[1]}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[3] or ''}{match[4]}"

    return _LINK.sub(moved, _lists_apart(markdown))


def _lists_apart(markdown: str) -> str:
    """Adds an empty line before lists, which Python-Markdown needs."""
    return re.sub(r"^(?![-*] |\d+\. |\s|\|)(.+)\n(?=- )", r"\1\n\n", markdown, flags=re.MULTILINE)


def _tree_path(page: str) -> str:
    of_page = {site: source for source, site in PAGES.items()}
    return of_page.get(page, f"docs/{page}")


def _site_path(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _copy(path)


def _copy(path: str) -> str:
    """The path of a file that is not a page: as text, which browsers show."""
    return f"files/{path}.txt"


def _content(path: str) -> bytes:
    """A file's content, or a directory's names."""
    if os.path.isdir(path):
        return "".join(f"{name}\n" for name in sorted(os.listdir(path))).encode()
    with open(path, "rb") as file:
        return file.read()


def _files_outside(markdown: str, tree_path: str) -> set[str]:
    targets = {
        posixpath.normpath(posixpath.join(posixpath.dirname(tree_path), match[2])) for match in _LINK.finditer(markdown)
    }
    return {
        path
        for path in targets
        if not path.startswith("docs/") and path not in PAGES and os.path.exists(f"{ROOT}/{path}")
    }
