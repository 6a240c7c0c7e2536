"""Strangers write much of what is searched, and a search holds the lock of all Python threads. So its time must grow with the
length of a text, not with the square of it."""

from __future__ import annotations

import ast
import http.server
import importlib
import pkgutil
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import grpc
import pytest
from fakes import pumped
from fakes.registry import FakeRegistry
from fakes.webserver import WebServer

from virtshim.cli.diag.secrets import Secrets

pytestmark = pytest.mark.hostile

LENGTHS = (4 << 10, 16 << 10, 128 << 10)
# Of its thread, for one text. A linear search of the longest takes a few milliseconds.
SECONDS = 1.0
# Modules that get no longer texts.
BOUNDS = {
    "virtshim.domain.image_name": 2048,  # the name of an image
    "virtshim.devices.host_use": 4096,  # a path in sysfs
    "virtshim.images.registries.hosts_file": 64,  # a duration that was measured before
}
WHOLE = ("fullmatch", "match")


def modules() -> Iterator[ModuleType]:
    for package in ("virtshim", "tapmanager", "vmwrapper"):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith("__main__") and "migrations" not in found.name:
                yield importlib.import_module(found.name)


def patterns_in(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from patterns_in(item)
    elif isinstance(value, dict):
        yield from patterns_in(list(value.values()))


def ways(tree: ast.Module, name: str) -> set[str]:
    """The methods of what has that name."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


def searches() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """Where, what, and how: by `search` unless it is only ever matched from a text's beginning."""
    for module in modules():
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for name, value in vars(module).items():
            used = ways(tree, name)
            for pattern in patterns_in(value):
                way = (
                    next((way for way in WHOLE if way in used), "search")
                    if used <= {*WHOLE, "pattern"} and used
                    else "search"
                )
                yield module.__name__, pattern, way
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="re"), attr=way),
                    args=[ast.Constant(value=str() | bytes() as source), *_],
                ) if way != "compile":
                    yield module.__name__, re.compile(source), way if way in WHOLE else "search"


def slowest(pattern: re.Pattern[Any], way: str, length: int) -> float:
    worst = 0.0
    for text in pumped.texts(pattern, length):
        search = getattr(pattern, way)
        given = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "replace")
        began = time.thread_time()
        search(given)
        worst = max(worst, time.thread_time() - began)
        if worst > SECONDS:
            break
    return worst


def test_every_pattern_is_searched_for_in_linear_time() -> None:
    slow = {}
    for where, pattern, way in searches():
        for length in LENGTHS:
            seconds = slowest(pattern, way, min(length, BOUNDS.get(where, length)))
            if seconds > SECONDS:
                slow[f"{where}: {pattern.pattern!r} ({way})"] = (length, round(seconds, 3))
                break
    assert slow == {}


class Ticks:
    """What another thread does meanwhile: the longest time that it was kept from it."""

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


# Other load keeps a thread waiting, too; what is attacked here kept all of them waiting for a minute.
STOPPED = 5.0

CHALLENGES = {
    "one long header": ["Bearer " + "a" * 65_000],
    "many headers": ["Bearer " + "a" * 60_000] * 20,
    "a quote that does not end": ['Bearer realm="' + "a" * 65_000],
    "as long as it may be": ["Bearer " + "a" * 4000],
}


@pytest.mark.parametrize("case", CHALLENGES)
def test_a_registrys_challenge_stops_no_thread(web: WebServer, refused: Callable[..., None], case: str) -> None:
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
def test_an_archives_secrets_are_looked_for_in_linear_time(case: str) -> None:
    began = time.thread_time()
    Secrets().cleaned(LOGS[case])
    assert time.thread_time() - began < 2


def test_a_private_key_whose_beginning_is_cut_off_does_not_stay_in_an_archive() -> None:
    key = f"{'k' * 64}\n" * 20 + "-----END RSA PRIVATE KEY-----"
    assert "kkkk" not in Secrets().cleaned(f"before\n{key}\nbehind")
    assert Secrets().cleaned("A" * 64 + "\nnothing secret\n") == "A" * 64 + "\nnothing secret\n"
