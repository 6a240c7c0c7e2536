"""A lock names every installed package with its hash, and the locks agree with pyproject.toml."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EVERYTHING, RUN, BUILD = "requirements.lock", "requirements-run.lock", "requirements-build.lock"

# Words of a command line: `pip install ...` in a document, a shell script or the Makefile.
COMMAND = re.compile(r"pip3?\b[^|;&`\n]*?\s(?:install|wheel|download)\s[^|;&`\n]*")
# Commands that fetch code without any lock.
UNLOCKED = re.compile(
    r"--upgrade-deps|\beasy_install\b|\bpipx\b|\buvx?\s+(?:pip|tool|run|sync)\b|\bnpm\s+i|\bgo\s+install\b|\bcargo\s+install\b"
    r"|\b(?:curl|wget)\b[^\n]*\|\s*(?:sudo\s+)?(?:ba|da)?sh\b|\bgit\s+clone\b|\bgit\+https"
)


@dataclass(frozen=True, slots=True)
class Pin:
    """One entry of a lock."""

    version: str
    hashes: frozenset[str]
    wanted_by: frozenset[str]


def read_lock(path: Path) -> dict[str, Pin]:
    """The pins by name. A line that is neither a pin, a hash nor a comment is an error."""
    pins: dict[str, Pin] = {}
    for entry in re.split(r"\n(?=\S)", path.read_text().strip()):
        if entry.startswith("#"):
            continue
        found = re.fullmatch(
            r"([A-Za-z0-9._-]+)==(\S+)(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)((?:\n +#.*)*)\n*",
            entry,
        )
        assert found, f"{path.name}: not a pin with hashes: {entry[:80]!r}"
        name, version, hashes, via = found.groups()
        wanted = {
            word for line in via.splitlines() for word in line.replace("# via", "").split("#")[-1:] if word.strip()
        }
        pins[canonicalize_name(name)] = Pin(
            version,
            frozenset(re.findall(r"sha256:(\w+)", hashes)),
            frozenset(word.strip().removesuffix("[dev]") for word in wanted),
        )
    return pins


@pytest.fixture(scope="module")
def locks(project: Any) -> dict[str, dict[str, Pin]]:
    return {name: read_lock(project.root / name) for name in (EVERYTHING, RUN, BUILD)}


@pytest.fixture(scope="module")
def asked_for(project: Any) -> dict[str, list[Requirement]]:
    """Lock -> the requirements that it must hold."""
    facts = tomllib.loads((project.root / "pyproject.toml").read_text())
    run, dev = facts["project"]["dependencies"], facts["project"]["optional-dependencies"]["dev"]
    named = (
        line.partition("#")[0].strip() for line in (project.root / "requirements-build.in").read_text().splitlines()
    )
    build = [*facts["build-system"]["requires"], *filter(None, named)]
    wanted = {EVERYTHING: [*run, *dev, *build], RUN: run, BUILD: build}
    return {lock: [Requirement(text) for text in texts] for lock, texts in wanted.items()}


@pytest.mark.parametrize("lock", [EVERYTHING, RUN, BUILD])
def test_a_lock_has_every_requirement_in_an_allowed_version(
    locks: dict[str, dict[str, Pin]], asked_for: dict[str, list[Requirement]], lock: str
) -> None:
    wrong = {}
    for wanted in asked_for[lock]:
        pin = locks[lock].get(canonicalize_name(wanted.name))
        if pin is None or not wanted.specifier.contains(pin.version, prereleases=True):
            wrong[str(wanted)] = pin.version if pin else "not in the lock"
    assert wrong == {}, "make lock"


@pytest.mark.parametrize("lock", [RUN, BUILD])
def test_a_lock_has_only_required_packages(
    locks: dict[str, dict[str, Pin]], asked_for: dict[str, list[Requirement]], lock: str
) -> None:
    """So no test tool reaches a node. Each entry names its requirers; they lead to a requirement."""
    direct = {canonicalize_name(wanted.name) for wanted in asked_for[lock]}
    pins, led = locks[lock], set(direct)
    for _ in pins:
        led |= {name for name, pin in pins.items() if {canonicalize_name(one) for one in pin.wanted_by} & led}
    assert set(pins) - led == set()


@pytest.mark.parametrize("lock", [RUN, BUILD])
def test_a_node_gets_the_versions_that_the_tests_ran_with(locks: dict[str, dict[str, Pin]], lock: str) -> None:
    """In addition, requirements.lock changes whenever another lock does, so that set-up watches one file."""
    different = {
        name: pin.version
        for name, pin in locks[lock].items()
        if name not in locks[EVERYTHING]
        or (pin.version, pin.hashes) != (locks[EVERYTHING][name].version, locks[EVERYTHING][name].hashes)
    }
    assert different == {}


def faults(command: str) -> Iterator[str]:
    """The faults of an installing command."""
    words = shlex.split(command, comments=True)
    named = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("-r", "--requirement")]
    if not named:
        wanted = ("--no-index", "--no-deps", "--no-build-isolation")
        yield from (f"{option} is missing: only the project itself is installed without a lock"
                    for option in wanted if option not in words)  # fmt: skip
        return
    yield from (f"{name} is no lock" for name in named if Path(name).name not in (EVERYTHING, RUN, BUILD))
    if "--require-hashes" not in words:
        yield "--require-hashes is missing"
    options = " ".join(words)
    if "--only-binary :all:" not in options:
        yield "--only-binary :all: is missing: what is built is named"
    if "--no-binary" in words and "--no-build-isolation" not in words:
        yield "--no-build-isolation is missing: pip would fetch what builds, of which no lock knows"


def installing(project: Any) -> Iterator[tuple[str, str]]:
    """The installing commands of all documents, scripts and make targets, as (file, command)."""
    for path in project.files():
        if path.suffix in (".md", ".sh") or path.name in ("Makefile", "run") or path.suffix == ".service":
            text = path.read_text().replace("\\\n", " ")
            yield from ((project.name(path), found) for found in COMMAND.findall(text))


def test_every_install_command_uses_a_lock_with_hashes(project: Any) -> None:
    commands = list(installing(project))
    assert {name for name, _ in commands} >= {"deploy/setup.sh", "deploy/deb/build.sh", "docs/install.md"}
    assert [f"{name}: {command}: {fault}" for name, command in commands for fault in faults(command)] == []


def test_nothing_is_installed_without_a_lock(project: Any) -> None:
    found = [
        f"{project.name(path)}: {match.group()}"
        for path in project.files()
        if path.suffix in (".md", ".sh", ".toml", ".service") or path.name in ("Makefile", "run")
        for match in UNLOCKED.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("pip install virtshim.whl", "--no-deps is missing"),
        ("pip install --no-index --no-deps .", "--no-build-isolation is missing"),
        ("pip install -r requirements.txt", "is no lock"),
        ("pip install -r requirements.lock", "--require-hashes is missing"),
        ("pip install --require-hashes -r requirements.lock", "--only-binary :all: is missing"),
        ("pip install --require-hashes --only-binary :all: --no-binary a -r requirements.lock", "--no-build-isolation"),
    ],
)
def test_an_install_command_without_a_lock_is_detected(command: str, fault: str) -> None:
    assert COMMAND.fullmatch(command)
    assert any(fault in one for one in faults(command))


def test_a_pin_without_a_hash_is_detected(tmp_path: Path) -> None:
    (tmp_path / "one.lock").write_text("a==1 \\\n    --hash=sha256:" + "0" * 64 + "\nb==2\n")
    with pytest.raises(AssertionError, match="not a pin with hashes: 'b==2'"):
        read_lock(tmp_path / "one.lock")
