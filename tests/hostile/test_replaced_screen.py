"""virtshim does not connect to a socket that a taken-over QEMU put in the place of its VNC socket.

Without a check, forwarding port 5900 of such a pod would give a stream to the replacement, with root's credentials."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.spdy import SpdyClient, close_all, spdy
from fakes.streamnode import CONTAINER, StreamNode

from virtshim.attach.screen import ScreenSockets
from virtshim.model.errors import Unavailable
from virtshim.model.layout import Layout, vnc_socket
from virtshim.streaming.connection import StreamTimeouts

pytestmark = [pytest.mark.hostile, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

QEMU = 65534
BANNER = b"RFB 003.008\n"
LISTENS = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
while True:
    connection = listener.accept()[0]
    connection.sendall(b"RFB 003.008\\n")
    while data := connection.recv(100):
        print(data, flush=True)
"""


@contextlib.contextmanager
def a_qemu(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of QEMU's user that listens on `path` as its VNC server."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chown(path.parent, QEMU, QEMU)
    as_qemu = ("setpriv", f"--reuid={QEMU}", f"--regid={QEMU}", "--clear-groups")
    argv = (*as_qemu, sys.executable, "-IS", "-c", LISTENS, str(path))
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.chown(path.parent, 0, 0)
        yield process
        process.kill()


class Roots:
    """A service that trusts root, such as libvirt or D-Bus."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection:
                    connection.sendall(b"trusted\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Machine:
    def __init__(self, place: Path, qemu: int, roots: Roots) -> None:
        self.place = place
        self.layout = Layout(str(place / "state"), str(place / "run"))
        self.screen = Path(vnc_socket(self.layout, CONTAINER))
        self.others_screen = place / "other" / "vnc.sock"
        self.roots = roots
        self.screens = ScreenSockets(self.layout, lambda _: qemu)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="v-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        screen = Path(vnc_socket(Layout("", directory + "/run"), CONTAINER))
        with a_qemu(screen) as qemu, contextlib.closing(Roots(place / "trusting.sock")) as roots:
            yield Machine(place, qemu.pid, roots)


def a_link_to_a_service_of_roots(machine: Machine) -> None:
    machine.screen.symlink_to(machine.roots.path)


def another_name_of_a_service_of_roots(machine: Machine) -> None:
    os.link(machine.roots.path, machine.screen)


def a_link_to_itself(machine: Machine) -> None:
    machine.screen.symlink_to(machine.screen)


def a_fifo(machine: Machine) -> None:
    os.mkfifo(machine.screen)


def a_plain_file(machine: Machine) -> None:
    machine.screen.write_text("")


def a_directory(machine: Machine) -> None:
    machine.screen.mkdir()


def a_terminal(machine: Machine) -> None:
    os.mknod(machine.screen, 0o666 | stat.S_IFCHR, os.makedev(5, 0))


def a_socket_of_roots_that_qemu_owns(machine: Machine) -> None:
    os.chown(machine.roots.path, QEMU, QEMU)
    os.link(machine.roots.path, machine.screen)


REPLACED = (
    a_link_to_a_service_of_roots,
    another_name_of_a_service_of_roots,
    a_link_to_itself,
    a_fifo,
    a_plain_file,
    a_directory,
    a_terminal,
    a_socket_of_roots_that_qemu_owns,
)


def test_the_screen_of_the_vm_itself_is_reached(machine: Machine) -> None:
    with machine.screens.connect(CONTAINER) as connected:
        assert connected.recv(100) == BANNER


@pytest.mark.parametrize("replaced_by", REPLACED, ids=lambda replaced: replaced.__name__)
def test_a_socket_in_place_of_the_screen_gets_no_byte(machine: Machine, replaced_by: Callable[[Machine], None]) -> None:
    machine.screen.unlink()
    replaced_by(machine)
    with pytest.raises(Unavailable):
        machine.screens.connect(CONTAINER)
    assert machine.roots.connections <= (replaced_by is a_socket_of_roots_that_qemu_owns), "judged before it is reached"


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_the_screen_of_another_vm_is_not_reached(machine: Machine, make: Callable[[Path, Path], None]) -> None:
    """The other VM has the same user; the process identifies it."""
    with a_qemu(machine.others_screen):
        machine.screen.unlink()
        make(machine.others_screen, machine.screen)
        with pytest.raises(Unavailable, match=r"replaced|not a socket"):
            machine.screens.connect(CONTAINER)


def test_an_ended_vm_has_no_screen_even_if_another_process_listens(machine: Machine) -> None:
    with pytest.raises(Unavailable, match="ended"):
        ScreenSockets(machine.layout, lambda _: None).connect(CONTAINER)


def streams(client: SpdyClient, request: str) -> tuple[int, int]:
    error = client.open(streamtype="error", fin=True, port="5900", requestid=request)
    return error, client.open(streamtype="data", port="5900", requestid=request)


@pytest.mark.parametrize("replaced_by", REPLACED[:2], ids=lambda replaced: replaced.__name__)
def test_forwarding_port_5900_fails_with_an_error_and_no_stream(
    machine: Machine, replaced_by: Callable[[Machine], None]
) -> None:
    node = StreamNode(StreamTimeouts())
    node.screens = machine.screens
    node.start()
    try:
        client = spdy(node.forward_with_vnc(""), "portforward.k8s.io")
        _, data = streams(client, "0")
        client.until(lambda: bytes(client.received[data]) == BANNER)
        machine.screen.unlink()
        replaced_by(machine)
        error, data = streams(client, "1")
        assert b"port 5900 cannot be reached" in client.read_all(error)
        assert client.read_all(data) == b""
        assert machine.roots.connections == 0
    finally:
        close_all()
        node.server.stop()
