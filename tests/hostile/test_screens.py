"""Other local users can neither see nor type to the screen that an operator views with `virtshim vnc`."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.cli import vnc

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(os.geteuid() != 0, reason="AREA hostile NOT TESTED: needs root, which becomes other users"),
]

STRANGER, OPERATOR = 64123, 64124
SCREEN = b"RFB 003.008\n"
VISIT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
where = sys.argv[2]
try:
    if where.startswith("/"):
        one = socket.socket(socket.AF_UNIX); one.connect(where)
    else:
        host, _, port = where.rpartition(":")
        one = socket.create_connection((host, int(port)))
        if len(sys.argv) > 3:
            one.sendall(b"keys"); one.close(); sys.exit()
    print(one.recv(100))
except OSError as exc:
    print(type(exc).__name__)
"""


@pytest.fixture(params=["127.0.0.1:0", "[::1]:0", ""], ids=["IPv4", "IPv6", "by itself"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """The address of the screen, and the input typed to it."""
    monkeypatch.setenv("SUDO_UID", str(OPERATOR))
    typed: list[bytes] = []

    def serve() -> None:
        try:
            for client in vnc.clients(listener):
                with client:
                    client.sendall(SCREEN)
                    client.settimeout(2)
                    typed.append(client.recv(100))
        except OSError:
            return

    with vnc.listening(vnc.parse_listen_address(request.param, "")) as (listener, where):
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield where, typed
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert not where.startswith("/") or not Path(where).parent.exists()


def visited(user: int, where: str, *more: str) -> str:
    command = [sys.executable, "-c", VISIT, str(user), where, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_stranger_sees_no_screen(screen: tuple[str, list[bytes]]) -> None:
    where, _ = screen
    assert visited(STRANGER, where) in ("b''", "ConnectionResetError", "PermissionError")


def test_a_strangers_input_reaches_no_guest(screen: tuple[str, list[bytes]]) -> None:
    where, typed = screen
    visited(STRANGER, where, "leaves")
    assert visited(0, where) == str(SCREEN)
    assert b"keys" not in typed


@pytest.mark.parametrize("user", [0, OPERATOR])
def test_the_user_who_started_the_command_sees_the_screen(screen: tuple[str, list[bytes]], user: int) -> None:
    assert visited(user, screen[0]) == str(SCREEN)


def test_only_its_user_can_open_the_screen_socket(screen: tuple[str, list[bytes]]) -> None:
    where, _ = screen
    if where.startswith("/"):
        assert stat.S_IMODE(os.stat(where).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(Path(where).parent).st_mode) == 0o700
