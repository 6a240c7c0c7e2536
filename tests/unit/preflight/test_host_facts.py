"""`virtshim check` reads facts about the host: directories, programs, users, tapmanager."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapmanager import protocol
from virtshim.preflight import host_facts


def test_existing_directories_are_listed_from_the_root_down(tmp_path: Path) -> None:
    found = [node.path for node in host_facts.directories(str(tmp_path / "missing" / "deep"))]
    assert found[0] == "/"
    assert found[-1] == str(tmp_path.resolve())


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    last = host_facts.directories(str(tmp_path / "link"))[-1]
    assert last.path == str((tmp_path / "real").resolve())
    assert stat.S_IMODE(last.mode) == 0o700


def test_a_program_that_fails_or_is_missing_is_reported() -> None:
    assert host_facts.program_output(["echo", "hi"]).text == "hi"
    assert host_facts.program_output(["false"]).trouble
    assert "nonesuch-program" in host_facts.program_output(["nonesuch-program"]).trouble


def test_programs_are_found_in_any_given_directory_and_must_be_executable(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bridge").touch(mode=0o755)
    (tmp_path / "a" / "plain").touch(mode=0o644)
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert host_facts.not_executable(["bridge", "plain", "none"], places) == ["plain", "none"]


def test_users_have_their_groups_and_the_requested_one() -> None:
    who = host_facts.user("root", "daemon")
    assert who is not None
    assert (who.uid, 1 in who.gids) == (0, True)
    assert host_facts.user("nonesuch-user", "daemon") is None
    assert host_facts.user("root", "nonesuch-group") is None


def test_the_free_space_of_a_missing_state_directory_is_that_of_its_parent(tmp_path: Path) -> None:
    found = host_facts.room(str(tmp_path / "later"))
    assert found.path == str(tmp_path / "later")
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert abs(found.bytes - free) < 1 << 30


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        yield server


def test_an_absent_tapmanager_is_distinguished_from_an_ended_one(tmp_path: Path) -> None:
    assert host_facts.tapmanager(str(tmp_path / "s"), 1) == ("No such file or directory", "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "s"))
    assert host_facts.tapmanager(str(tmp_path / "s"), 1) == ("Connection refused", "")


def test_a_silent_tapmanager_is_given_up(listener: socket.socket) -> None:
    silence, trouble = host_facts.tapmanager(listener.getsockname(), 0.2)
    assert (bool(silence), trouble) == (True, "")


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (protocol.answer(1, {"ready": True, "reason": ""}), ""),
        (protocol.answer(1, {"ready": False, "reason": "no CNI config"}), "no CNI config"),
        (protocol.answer(1, {}), "it is not ready"),
        (protocol.error(1, "permission", "uid 7 may not"), "uid 7 may not"),
    ],
)
def test_tapmanagers_answer_is_reported(listener: socket.socket, answer: dict[str, object], trouble: str) -> None:
    def reply() -> None:
        with listener.accept()[0] as sock:
            protocol.recv_frame(sock)
            protocol.send_frame(sock, answer)

    thread = threading.Thread(target=reply)
    thread.start()
    assert host_facts.tapmanager(listener.getsockname(), 5) == ("", trouble)
    thread.join()


def test_a_socket_whose_server_has_ended_counts_as_unserved(tmp_path: Path) -> None:
    """systemd leaves the file when it stops a socket unit."""
    path = str(tmp_path / "s")
    assert not host_facts.is_served(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        assert host_facts.is_served(path)
    assert not host_facts.is_served(path)
