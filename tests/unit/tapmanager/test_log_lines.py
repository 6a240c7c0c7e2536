"""Foreign text in tapmanager's log takes one short line, whoever sends it and however often."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tapmanager import log_lines, protocol, server, verbs
from tapmanager.fields import Json
from tapmanager.peer import Peer
from tapmanager.server import Answer

pytestmark = pytest.mark.hostile

FORGED = "x\n2026-01-01 00:00:00,000 INFO pod.attached sandbox=forged\r\x1b[2J\u2028y"


class Logged:
    """What is logged from now on."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def begin(self) -> None:
        log_lines.set_up("info")

    def text(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Logged]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Logged(capsys)
    root.handlers[:] = handlers
    root.setLevel(level)


def perform(request: Json, peer: Peer, until: float) -> Answer:
    """The verbs' own judgement of a request that none of them gets to."""
    nothing: verbs.HostResources = None  # type: ignore[assignment]
    return verbs.perform(nothing, request, peer, until)


@contextlib.contextmanager
def serving(folder: Path, uid: int, monotonic: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Takes every peer for `uid`."""
    path = str(folder / "s")
    running = server.Server(server.listen(path, -1), perform, uid, peer=lambda _conn: Peer(uid, 1), monotonic=monotonic)
    running.start()
    yield path
    running.stop(5.0)


def ask(path: str, body: dict[str, object], times: int = 1) -> str:
    """On one connection: the last answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as conn:
        conn.settimeout(5)
        conn.connect(path)
        for _ in range(times):
            protocol.send_frame(conn, body)
            received = protocol.recv_frame(conn)
            assert received is not None
    return json.dumps(received[0])


def fetch(**args: object) -> dict[str, object]:
    return protocol.request(1, "fetch", args, 1.0)


def test_a_long_unknown_field_from_a_qemu_is_one_short_line(tmp_path: Path, lines: Logged) -> None:
    lines.begin()
    with serving(tmp_path, 64055) as path:
        answer = ask(path, fetch(**{FORGED * 1500: 1}))
    assert "unknown field" in answer
    logged = lines.text()
    assert len(logged) < 400
    (line,) = logged.splitlines()
    assert "request.failed verb=fetch kind=invalid uid=64055" in line


def test_a_malformed_verb_is_not_repeated_in_the_log(tmp_path: Path, lines: Logged) -> None:
    lines.begin()
    with serving(tmp_path, 64055) as path:
        ask(path, {**fetch(), "verb": f"fetch kind=ok uid=0 {FORGED}"})
    (line,) = lines.text().splitlines()
    assert "verb=? kind=invalid uid=64055" in line


def test_endless_requests_of_a_qemu_do_not_fill_the_log(tmp_path: Path, lines: Logged) -> None:
    now = [100.0]
    lines.begin()
    with serving(tmp_path, 64055, lambda: now[0]) as path:
        ask(path, fetch(x=1), 300)
        assert len(lines.text().splitlines()) == 20
        now[0] += 10
        ask(path, fetch(x=1))
        (line,) = lines.text().splitlines()
    assert "unlogged=280 request.failed" in line


def test_everything_that_root_causes_is_logged(tmp_path: Path, lines: Logged) -> None:
    lines.begin()
    with serving(tmp_path, 0) as path:
        ask(path, fetch(x=1), 50)
    assert len(lines.text().splitlines()) == 50


def test_a_plugins_words_are_one_line(lines: Logged) -> None:
    lines.begin()
    logging.getLogger("tapmanager").warning("pod.del_failed sandbox=%s error=%s", "a", FORGED)
    (line,) = lines.text().splitlines()
    assert r"error=x\n2026-01-01" in line
    assert r"\r\x1b[2J\u2028y" in line


def test_a_long_line_is_cut_and_says_how_long_it_was(lines: Logged) -> None:
    lines.begin()
    logging.getLogger("tapmanager").warning("%s", "a" * 5000)
    (line,) = lines.text().splitlines()
    assert len(line) < 1100
    assert line.endswith("characters)")


def test_a_traceback_is_complete_and_none_of_its_lines_looks_like_an_event(lines: Logged) -> None:
    lines.begin()
    try:
        ipaddress.ip_address(FORGED)
    except ValueError:
        logging.getLogger("tapmanager").exception("request.crashed")
    first, *rest = lines.text().splitlines()
    assert first.endswith("ERROR request.crashed")
    assert any("test_log_lines.py" in line for line in rest)
    assert all(line.startswith("    ") for line in rest)
