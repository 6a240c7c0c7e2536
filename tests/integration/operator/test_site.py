"""The documentation site is built without a network and loads nothing external, and the commands in its pages exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from docs_site import diagram, recording

from virtshim.annotations.parse import KNOWN, parse_vm_options
from virtshim.cli.main import app

pytestmark = pytest.mark.operator

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds in a network namespace without even a loopback address."""
    return subprocess.run(
        [
            "unshare", "--net", sys.executable, "-m", "mkdocs", "build", "--strict",
            "--config-file", str(tree / "deploy/docs_site/mkdocs.yml"), "--site-dir", str(site),
        ],
        cwd=tree, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT, directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Links that people follow may lead anywhere."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
        r"|<link\b(?=[^>]*stylesheet)[^>]*\bhref=[\"']?(?:https?:)?//"
    )
    found = [page.name for page in site.rglob("*.html") if loads.search(page.read_text())]
    styles = [sheet.name for sheet in site.rglob("*.css") if re.search(r"url\([\"']?https?:", sheet.read_text())]
    assert found + styles == []
    assert "fonts.googleapis" not in "".join(page.read_text() for page in site.rglob("*.html"))


def test_search_works_in_the_browser(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    assert any("VirtletVCPUCount" in entry["text"] for entry in index["docs"])
    assert len(index["docs"]) > 200


def test_generated_pages_match_the_code(site: Path) -> None:
    annotations = (site / "annotations.html").read_text()
    assert [name for name in KNOWN if f"<code>{name}</code>" not in annotations] == []
    rpcs = (site / "reference/rpcs.html").read_text()
    assert re.search(r"RestorePod</code></td>\s*<td><strong>UNIMPLEMENTED", rpcs)
    assert re.search(r"RunPodSandbox</code></td>\s*<td>yes", rpcs)
    assert re.search(r"PullImage</code></td>\s*<td>yes", rpcs)
    assert "is not known on this node" in (site / "reference/errors.html").read_text()


@pytest.mark.full
def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    for name in ("docs", "deploy", "criproto", "virtshim", "tapmanager"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path)
    with (tmp_path / "docs/comparison.md").open("a") as page:
        page.write("\n[a](pods.md#no-such-title) [b](no-such-page.md) [c](../deploy/none.yaml)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for target in ("no-such-title", "no-such-page.md", "none.yaml"):
        assert target in done.stdout + done.stderr


def test_the_readme_starts_with_a_picture_of_a_real_run() -> None:
    """It is drawn from a recording; `python deploy/docs_site/recording.py record` makes both again."""
    picture = (ROOT / "docs/demo.svg").read_text()
    assert picture == recording.draw(json.loads((ROOT / "docs/demo.json").read_text()))
    assert len(picture) < 200_000
    assert "All of it works" in picture
    assert "](docs/demo.svg)" in (ROOT / "README.md").read_text().split("\n\n")[2]  # the title, what it is, the picture


def test_the_picture_of_the_programs_shows_all_programs() -> None:
    assert (ROOT / "docs/programs.svg").read_text() == diagram.draw()
    programs = re.findall(
        r"^\| `?([\w -]+?)`? \| (?:root|the VM)", (ROOT / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    shown = " ".join(diagram.BOXES)
    assert programs
    assert [name for name in programs if name.removesuffix(" serve") not in shown] == []


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content), fenced or indented."""
    yield from re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^(?: {4,}|\t).*\n)+", rest, re.MULTILINE):
        yield "", block


def typed(text: str, program: str) -> Iterator[list[str]]:
    """The words of each line of a code block, and of each piece of code in the text, that runs the program."""
    lines = [line for _, block in code_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith(f"{program} ")]
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # no line of a shell
            continue
        while words and (re.fullmatch(r"\w+=\S*|sudo|\$", words[0])):
            words = words[1:]
        if words and words[0].removeprefix(".venv/bin/") == program:
            end = next((at for at, word in enumerate(words) if re.fullmatch(r"[|&;<>]+|2>\S*|>\S+", word)), len(words))
            yield words[1:end]


def options_of(command: Any) -> set[str]:
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}


# get_command builds a new command at each call, so it is called once.
PROGRAM: Any = typer.main.get_command(app)


def unknown(words: list[str]) -> str:
    """The part of a `virtshim ...` line that the program does not know, "" if it knows all."""
    command = PROGRAM
    path = ["virtshim"]
    while words and hasattr(command, "commands"):
        name, *words = words
        if name in ("...", "…", "COMMAND"):
            return ""
        if name.startswith("-"):
            return "" if name in options_of(command) else f"{' '.join(path)} has no {name}"
        for one in name.split("|"):
            if one not in command.commands:
                return f"{' '.join(path)} has no {one}"
        command = command.commands[name.split("|")[0]]
        path.append(name)
    options = options_of(command)
    for word in words:
        if word == "--":
            break
        option = word.strip("[]").partition("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", option) and option not in options:
            return f"{' '.join(path)} has no {option}"
        if re.fullmatch(r"-[a-zA-Z]+", option) and not all(f"-{letter}" in options for letter in option[1:]):
            return f"{' '.join(path)} has no {option}"
    return ""


def test_every_virtshim_command_in_a_page_exists_with_its_options() -> None:
    commands = [(page.name, words) for page in PAGES for words in typed(page.read_text(), "virtshim")]
    assert len(commands) > 40
    assert [(page, trouble) for page, words in commands if (trouble := unknown(words))] == []


@pytest.mark.parametrize(
    "line",
    [
        "virtshim chek",
        "virtshim --vershun",
        "virtshim check --jsn",
        "virtshim exec -q NAME -- sh",
        "virtshim config shew",
    ],
)
def test_an_unknown_command_is_detected(line: str) -> None:
    (words,) = typed(f"text\n\n    {line}\n", "virtshim")
    assert unknown(words)


def test_every_make_target_in_a_page_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(page.name, words[0]) for page in PAGES for words in typed(page.read_text(), "make") if words]
    assert len(named) > 10
    assert [one for one in named if one[1] not in targets and "=" not in one[1]] == []


def test_every_kubectl_virt_command_in_a_page_exists() -> None:
    plugin = (ROOT / "deploy/kubectl-virt/kubectl-virt").read_text()
    known = set(re.findall(r'add_parser\(\s*"(\w+)"', plugin))
    said = [words for page in PAGES for words in typed(page.read_text(), "kubectl")]
    named = {one for words in said if words[:1] == ["virt"] for one in words[1].split("|")}
    assert known >= named >= {"console", "ssh", "vnc", "top"}


def test_every_unit_of_ours_that_a_page_names_exists() -> None:
    ours = {path.name for path in (ROOT / "systemd").iterdir()}
    named = {
        (page.name, word if "." in word else f"{word}.service")
        for page in PAGES
        for words in typed(page.read_text(), "systemctl")
        for word in words[1:]
        if re.match(r"(virtshim|tapmanager)\b", word)
    }
    assert len(named) > 5
    assert {one for one in named if one[1] not in ours} == set()


def test_a_shell_can_read_every_shell_block_of_a_page() -> None:
    """The tutorial's and README's first commands run in test_tutorial.py; most others need a cluster or hardware."""
    blocks = [
        (page.name, text) for page in PAGES for language, text in code_blocks(page.read_text()) if language == "sh"
    ]
    assert len(blocks) > 20
    refused = {}
    for page, text in blocks:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        if done.returncode or done.stderr:
            refused[page] = done.stderr
    assert refused == {}


SHIPPED = "/usr/share/virtshim"


def test_package_files_named_in_a_page_exist_in_the_sources() -> None:
    named = [
        (page.name, path)
        for page in PAGES
        for path in re.findall(rf"{SHIPPED}/([\w./-]*\w)", page.read_text())
        if not path.startswith(("apparmor", "monitoring/alerts.yaml"))  # derived when the package is made
    ]
    assert named
    assert [one for one in named if not (ROOT / "deploy" / one[1]).exists()] == []


def missing_on_a_node(text: str) -> list[str]:
    """Files named in commands that only a checkout has."""
    found = []
    for _, block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue
            found += [word for word in words if re.match(r"(?:\./)?(?:deploy|dist|systemd|docs)/", word)]
    return found


def test_how_to_pages_need_only_the_package() -> None:
    pages = sorted((ROOT / "docs/how-to").glob("*.md"))
    assert {page.name: found for page in pages if (found := missing_on_a_node(page.read_text()))} == {}


def test_a_source_file_in_a_command_is_detected() -> None:
    assert missing_on_a_node("text\n\n    kubectl apply -f deploy/x.yaml\n") == ["deploy/x.yaml"]
    assert missing_on_a_node(f"text\n\n    cd {SHIPPED}   # in the sources: cd deploy/\n") == []


def test_manifests_in_pages_are_yaml_and_their_annotations_are_known() -> None:
    pods = 0
    for page in PAGES:
        for language, block in code_blocks(page.read_text()):
            if language != "yaml":
                continue
            for manifest in yaml.safe_load_all(block):
                annotations = dict(manifest.get("metadata", {}).get("annotations", {}))
                if "AAAA..." in annotations.get("VirtletSSHKeys", ""):  # stands for the reader's key
                    del annotations["VirtletSSHKeys"]
                parse_vm_options(annotations)
                pods += manifest["kind"] == "Pod"
    assert pods >= 5


def strings(tree: Path) -> str:
    """All strings of the code, with concatenated ones joined."""
    found: list[str] = []
    for file in tree.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                )
    return "\n".join(found)


def test_messages_quoted_in_troubleshooting_exist_in_the_code() -> None:
    """Checks each part between dots in the first column."""
    said = strings(ROOT / "virtshim")
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [code for row in rows for code in re.findall(r"`([^`]+)`", row) if " " in code]
    assert len(quoted) >= 8
    parts = [part.strip(" .,;:") for code in quoted if not code.startswith("kubectl") for part in code.split("...")]
    assert [part for part in parts if part not in said] == []
