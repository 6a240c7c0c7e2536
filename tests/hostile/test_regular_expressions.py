"""The time of every search in strangers' text grows with the text's length and not with its square. A search holds the
lock of all Python threads."""

from __future__ import annotations

import ast
import http.server
import importlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import grpc
import pytest
from fakes import pumped
from fakes.registry import FakeRegistry
from fakes.webserver import WebServer

import virtshim
from virtshim.cli.diag.secrets import Secrets
from virtshim.images import translations
from virtshim.model.errors import InvalidRequest
from virtshim.model.image_name import find_image

pytestmark = pytest.mark.hostile

PROJECT = Path(virtshim.__file__).parents[1]

# The second or third shows most quadratic searches in a second; the last one takes half a minute for them.
LENGTHS = (4 << 10, 16 << 10, 32 << 10, 128 << 10)
# The thread's time for one text: for a search, which needs a few milliseconds for the longest text, and for other
# calls.
OF_A_SEARCH, SECONDS = 0.5, 1.0
# Only times above SEEN are compared. The last length is eight times the second one, so a linear search takes eight
# times as long, and a quadratic one 64 times.
SEEN, GROWTH = 0.05, 30
# The longest wait of another thread. Other load delays it, too; the attacks here blocked all threads for a minute.
STOPPED = 5.0
# Modules whose texts are never longer than this.
BOUNDS = {
    "virtshim.model.image_name": 2048,  # the name of an image
    "virtshim.devices.host_use": 4096,  # a path in sysfs
    "virtshim.images.registries.hosts_toml": 64,  # a duration that was measured before
}
WHOLE = ("fullmatch", "match")
PACKAGES = ("virtshim", "tapmanager", "vmwrapper")
# Functions of the module `re` that take a pattern, and the position of their flags.
TAKING = {
    "compile": 1,
    **dict.fromkeys(("search", "match", "fullmatch", "findall", "finditer"), 2),
    "split": 3,
    "sub": 4,
    "subn": 4,
}
# Patterns that cannot be read off the call that compiles them.
FOUND_BY_VALUE = ("virtshim.cli.diag.secrets", "virtshim.devices.grants")  # in a loop, into a tuple of the module


@dataclass(frozen=True)
class Source:
    name: str
    tree: ast.Module


def sources(top: Path = PROJECT) -> Iterator[Source]:
    for package in PACKAGES:
        for path in sorted((top / package).rglob("*.py")):
            name = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
            yield Source(name, ast.parse(path.read_text()))


def imported(name: str) -> ModuleType | None:
    """Imports the module; None for a program or a migration."""
    return None if name.endswith("__main__") or "migrations" in name else importlib.import_module(name)


def patterns_in(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from patterns_in(item)
    elif isinstance(value, dict):
        yield from patterns_in(list(value.values()))


def uses(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Name -> the methods called on it, in all modules, because a pattern may be defined elsewhere."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.setdefault(node.value.id, set()).add(node.attr)
    return found


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls of the module `re`. Raises AssertionError for ways that would hide them."""
    called = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=way)) if way in TAKING:
                called.add(node.func)
                yield way, node
            case ast.ImportFrom(module="re" | "sre_compile" | "fnmatch") | ast.alias(name="re", asname=str()):
                raise AssertionError(f"line {node.lineno}: import re, and call what takes patterns as re.NAME")
            case ast.alias(name="regex"):
                raise AssertionError("use re, whose patterns this test can take apart")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re":
            assert node.attr not in TAKING or node in called, f"line {node.lineno}: call re.{node.attr}"


def told(way: str, call: ast.Call, names: Mapping[str, object]) -> re.Pattern[Any] | None:
    """The pattern of a call with its flags, as far as names of its module determine it."""
    flags = [*call.args[TAKING[way] :], *(word.value for word in call.keywords if word.arg == "flags")]
    try:
        pattern, *flag = (
            eval(compile(ast.Expression(one), "pattern", "eval"), dict(names)) for one in (call.args[0], *flags)
        )
    except NameError:
        return None
    return re.compile(pattern, *flag)


def searches(top: Path = PROJECT) -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """The place, the pattern and the method: `search` unless it is only ever matched from a text's beginning. Raises
    AssertionError for a pattern that cannot be determined."""
    found = list(sources(top))
    used = uses(source.tree for source in found)
    for source in found:
        module = imported(source.name) if top == PROJECT else None
        names = vars(module) if module else {"re": re}
        known = set()
        for name, value in names.items():
            ways = used.get(name, set())
            only = ways and ways <= {*WHOLE, "pattern"}
            for pattern in patterns_in(value):
                known.add(pattern)
                yield source.name, pattern, next((way for way in WHOLE if way in ways), "search") if only else "search"
        for way, call in calls(source.tree):
            one = told(way, call, names)
            if one is None:
                assert source.name in FOUND_BY_VALUE, (
                    f"{source.name}, line {call.lineno}: the pattern is made of what only running code knows; make it a "
                    "constant of the module"
                )
            elif one not in known:
                yield source.name, one, way if way in WHOLE else "search"


def seconds(pattern: re.Pattern[Any], way: str, text: str) -> float:
    given = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "replace")
    began = time.thread_time()
    if way == "search":  # all of it: what is replaced or listed is searched for to the end
        deque(pattern.finditer(given), maxlen=0)
    else:
        getattr(pattern, way)(given)
    return time.thread_time() - began


def too_slow(pattern: re.Pattern[Any], way: str, longest: int) -> float:
    """The time of one of the texts, if it is too long or grows faster than the text; else 0."""
    lengths = [length for length in LENGTHS if length < longest] + [min(LENGTHS[-1], longest)]
    for texts in zip(*(pumped.texts(pattern, length) for length in lengths), strict=True):
        for text in texts:
            if (took := seconds(pattern, way, text)) > OF_A_SEARCH:
                return took
        if took > SEEN and len(texts) == len(LENGTHS):
            shorter, took = (min(seconds(pattern, way, text) for _ in range(3)) for text in (texts[-3], texts[-1]))
            if took > GROWTH * shorter:
                return took
    return 0.0


def slow(found: Iterable[tuple[str, re.Pattern[Any], str]]) -> dict[str, float]:
    """Pattern -> seconds."""
    return {
        f"{where}: {pattern.pattern!r} ({way})": took
        for where, pattern, way in found
        if (took := too_slow(pattern, way, BOUNDS.get(where, LENGTHS[-1])))
    }


def test_every_pattern_searches_in_linear_time_without_blocking_threads() -> None:
    with Ticks() as ticks:
        assert slow(searches()) == {}
    assert ticks.longest < STOPPED


NEW = {
    "in a function": r"""
import re
def f(text):
    return re.findall(r'(\w+)="([^"]*)"', text)
""",
    "in a class": r"""
import re
class A:
    SHAPE = re.compile(r'(\w+)="([^"]*)"')
""",
    "in a constant's parts": r"""
import re
ALL = {"a": (re.compile(r'(\w+)="([^"]*)"', re.ASCII),)}
""",
    "compiled in a function": r"""
import re
def f(text):
    return re.compile(r'(\w+)="([^"]*)"', flags=re.MULTILINE).sub("", text)
""",
    "of a text with values": r"""
import re
def f(text):
    return re.sub(rf'(\w+){"="}"([^"]*)"', "", text)
""",
    "with long beginnings": r"""
import re
BSD = re.compile(rb"Linux version |Copyright \(c\) \d{4}-\d{4} The .*BSD", re.MULTILINE)
""",
}


@pytest.mark.parametrize("case", NEW)
def test_the_test_finds_a_new_pattern_anywhere_in_the_code(tmp_path: Path, case: str) -> None:
    (tmp_path / "virtshim").mkdir()
    (tmp_path / "virtshim/new.py").write_text(NEW[case])
    assert slow(searches(tmp_path)) != {}


UNTOLD = {
    "of what a function gets": "import re\ndef f(word, text):\n    return re.search(word + '.*x', text)\n",
    "by another name": "from re import search\n",
    "by a short name": "import re as r\n",
    "handed on": "import re\nFIND = map(re.search, (), ())\n",
}


@pytest.mark.parametrize("case", UNTOLD)
def test_the_test_fails_for_a_pattern_that_it_cannot_determine(tmp_path: Path, case: str) -> None:
    (tmp_path / "virtshim").mkdir()
    (tmp_path / "virtshim/new.py").write_text(UNTOLD[case])
    with pytest.raises(AssertionError, match=r"line \d+: |constant of the module"):
        list(searches(tmp_path))


@pytest.mark.parametrize("unit", ["a/", "a", "a:1/", "a.", "[", "library/", "docker.io/", ":", "@", "sha256:", "%"])
@pytest.mark.parametrize("scheme", ["", "https://", "file:///"])
def test_a_long_image_name_is_parsed_quickly(scheme: str, unit: str) -> None:
    """The tested length is the greatest that the patterns of names can get."""
    name = scheme + unit * ((8 << 20) // len(unit))
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        find_image([], name)
    assert time.thread_time() - began < SECONDS


# Each pattern takes exponential, or more than quadratic, time by backtracking.
COSTLY = {
    "a repetition of a repetition": ("(a+)+$", "a"),
    "many repetitions": ("(.*)-(.*)-(.*)x", "-"),
    "alternatives that are the same": ("^(a|a)*$", "a"),
    "many optional characters": ("^" + "a?" * 100 + "a" * 100 + "$", "a"),
}


@pytest.mark.parametrize("length", [255, 2000, LENGTHS[-1]])
@pytest.mark.parametrize("case", COSTLY)
def test_an_operators_pattern_matches_in_linear_time_without_blocking_threads(case: str, length: int) -> None:
    pattern, unit = COSTLY[case]
    rules = translations.parse_translations(f"translations: [{{regex: '{pattern}', url: a.example/b}}]", "a.yaml")
    with Ticks() as ticks:
        began = time.thread_time()
        assert translations.translate(unit * length + "!", [rules]) is None
        assert time.thread_time() - began < SECONDS
    assert ticks.longest < STOPPED


class Ticks:
    """Another thread: the longest time that it was blocked."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


CHALLENGES = {
    "one long header": ["Bearer " + "a" * 65_000],
    "many headers": ["Bearer " + "a" * 60_000] * 20,
    "a quote that does not end": ['Bearer realm="' + "a" * 65_000],
    "as long as it may be": ["Bearer " + "a" * 4000],
}


@pytest.mark.parametrize("case", CHALLENGES)
def test_parsing_a_registrys_challenge_blocks_no_thread(
    web: WebServer, refused: Callable[..., None], case: str
) -> None:
    def route(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(401)
        for value in CHALLENGES[case]:
            request.send_header("WWW-Authenticate", value)
        request.send_header("Content-Length", "0")
        request.end_headers()

    web.routes["/v2/a/manifests/latest"] = route
    words = "not https" if case == "as long as it may be" else "login challenge of"
    with Ticks() as ticks:
        refused(FakeRegistry(web).name("a"), words, grpc.StatusCode.PERMISSION_DENIED)
    assert ticks.longest < STOPPED


LOGS = {
    "key types": "sk-" * 100_000,
    "lines of a key": ("a" * 21 + "\n") * 20_000,
    "names of secrets": "password" * 40_000,
    "options": " --password" * 30_000,
    "addresses": "a@" * 150_000,
    "schemes": "://" * 100_000,
}


@pytest.mark.parametrize("case", LOGS)
def test_secrets_in_an_archive_are_found_in_linear_time(case: str) -> None:
    began = time.thread_time()
    Secrets().cleaned(LOGS[case])
    assert time.thread_time() - began < 2


def test_a_private_key_without_its_beginning_does_not_stay_in_an_archive() -> None:
    key = f"{'k' * 64}\n" * 20 + "-----END RSA PRIVATE KEY-----"
    assert "kkkk" not in Secrets().cleaned(f"before\n{key}\nbehind")
    assert Secrets().cleaned("A" * 64 + "\nnothing secret\n") == "A" * 64 + "\nnothing secret\n"
