"""The script that dials in a guest works with each program that it can use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from virtshim.streaming.portforward import dial_command

NAMES = {
    "busybox": {"nc": "busybox"},
    "busybox alone": {"busybox": "busybox"},
    "python3": {"python3": sys.executable},
    "bash": {"bash": "bash", "cat": "cat"},
}
# The program among these that cannot close one direction of a connection.
NO_HALF_CLOSE = {"bash"}


@pytest.fixture(params=NAMES)
def tool(request, tmp_path: Path) -> str:
    for name, program in NAMES[request.param].items():
        found = shutil.which(program)
        assert found, f"needs {program}"
        (tmp_path / name).symlink_to(os.path.realpath(found) if program == "busybox" else found)
    return str(request.param)


def run(tmp_path: Path, port: int) -> subprocess.Popen[bytes]:
    argv = dial_command(port).argv
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env={"PATH": str(tmp_path)}, stdin=pipe, stdout=pipe, stderr=pipe)


def test_any_bytes_go_both_ways(tool: str, tmp_path: Path) -> None:
    """The service sends back what it gets, and hangs up when it has it all."""
    sent = os.urandom(1_000_000)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            got = 0
            while got < len(sent):
                data = connection.recv(65536)
                got += len(data)
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        with run(tmp_path, listener.getsockname()[1]) as done:
            writing = threading.Thread(target=done.stdin.write, args=(sent,))
            writing.start()
            assert done.stdout.read() == sent
            assert done.wait(20) == 0
            writing.join()
            assert done.stderr.read() == b""


def test_the_end_of_the_input_reaches_the_service(tool: str, tmp_path: Path) -> None:
    if tool in NO_HALF_CLOSE:
        pytest.skip("NOT TO BE HAD HERE: a half-close in bash")

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            said = b""
            while data := connection.recv(65536):
                said += data
            connection.sendall(said.upper())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        done = run(tmp_path, listener.getsockname()[1])
        assert done.communicate(b"all of it", timeout=20) == (b"ALL OF IT", b"")
        assert done.returncode == 0


def test_a_closed_port_is_a_failure_with_a_message(tool: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = run(tmp_path, port)
    out, words = done.communicate(timeout=20)
    assert done.returncode != 0
    assert out == b""
    assert b"refused" in words.lower()


def test_the_error_of_a_guest_without_any_of_the_programs_says_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, 80)
    _, words = done.communicate(timeout=20)
    assert done.returncode == 127
    assert b"install one" in words
