"""vmwrapper connects to the programs that serve a VM's devices before QEMU exists. It reads command lines as libvirt
writes them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmwrapper import bundle
from vmwrapper.calls import call_servers

# Tells its command line, and greets whoever is at the other end of each descriptor on it.
QEMU = """#!/usr/bin/python3 -IS
import os, sys
print(*sys.argv[1:], sep="\\n")
for word in sys.argv[1:]:
    for field in word.split(","):
        if field.startswith("fd="):
            os.write(int(field[3:]), b"hello")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "fs,a.sock"))
        server.listen()
        server.settimeout(10)
        yield server


def named(server: socket.socket) -> str:
    """A comma in a path is doubled."""
    return str(server.getsockname()).replace(",", ",,")


@pytest.mark.parametrize(
    "chardev",
    [
        "socket,id=charmonitor,fd=22,server=on,wait=off",
        "socket,id=a,path=/run/nobody.sock,server=on",
        "socket,id=a,path=/run/nobody.sock,server",
        "socket,id=chr-vu-fs0,fd=22",
        "pty,id=a",
        "file,id=a,path=/run/nobody.log",
    ],
)
def test_arguments_without_a_server_are_unchanged(chardev: str) -> None:
    argv = ["-name", "x", "-chardev", chardev, "-device", "socket,path=/run/nobody.sock"]
    assert call_servers(argv) == argv


def test_vmwrapper_connects_to_a_devices_server_and_qemu_gets_the_open_connection(server: socket.socket) -> None:
    argv = ["-chardev", f"socket,id=chr-vu-fs0,path={named(server)}", "-name", "a,,b"]
    _, chardev, *rest = call_servers(argv)
    before, _, fd = chardev.rpartition("=")
    assert (before, rest) == ("socket,id=chr-vu-fs0,fd", ["-name", "a,,b"])
    assert os.get_inheritable(int(fd))
    served, _ = server.accept()
    os.write(int(fd), b"hello")
    os.close(int(fd))
    assert served.recv(16) == b"hello"
    served.close()


def test_reconnect_options_are_removed_because_qemu_may_not_connect(server: socket.socket) -> None:
    argv = ["-chardev", f"socket,id=a,path={named(server)},reconnect=1"]
    _, chardev = call_servers(argv)
    assert "reconnect" not in chardev
    os.close(int(chardev.rpartition("=")[2]))


def started(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Of the written vmwrapper that becomes a stand-in for QEMU."""
    bundle.write(str(tmp_path / "vmwrapper"))
    emulator = tmp_path / "bin" / "qemu"
    emulator.parent.mkdir()
    emulator.write_text(QEMU)
    emulator.chmod(0o755)
    environment = {
        "PATH": os.defpath,
        "VIRTSHIM_EMULATOR": str(emulator),
        "VIRTSHIM_PARTS": "/usr/bin:/usr/lib:/proc/self",
        "VIRTSHIM_CONFINE": "landlock,seccomp",
    }
    command = [str(tmp_path / "vmwrapper"), *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_bundled_vmwrapper_hands_the_connection_to_a_confined_qemu(server: socket.socket, tmp_path: Path) -> None:
    done = started(tmp_path, "-chardev", f"socket,id=chr-vu-fs0,path={named(server)}", "-nodefaults")
    assert done.returncode == 0, done.stderr
    assert str(server.getsockname()) not in done.stdout
    assert done.stdout.splitlines()[2] == "-nodefaults"
    served, _ = server.accept()
    assert served.recv(16) == b"hello"
    served.close()


def test_a_vm_whose_server_has_ended_is_not_started_and_the_error_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "gone.sock")
    done = started(tmp_path, "-chardev", f"socket,id=chr-vu-fs0,path={path}")
    assert done.returncode == 1
    assert path in done.stderr
    assert "start the VM again" in done.stderr
