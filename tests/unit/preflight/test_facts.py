import os
import socket
import stat
import threading
from pathlib import Path

from tapmanager import protocol
from virtshim.preflight import facts


def test_directories_are_what_exists_from_the_root_down(tmp_path: Path) -> None:
    found = [node.path for node in facts.directories(str(tmp_path / "missing" / "deep"))]
    assert found[0] == "/"
    assert found[-1] == str(tmp_path.resolve())


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    last = facts.directories(str(tmp_path / "link"))[-1]
    assert last.path == str((tmp_path / "real").resolve())
    assert stat.S_IMODE(last.mode) == 0o700


def test_a_program_that_fails_or_is_missing_is_trouble() -> None:
    assert facts.said(["echo", "hi"]).text == "hi"
    assert facts.said(["false"]).trouble
    assert "nonesuch-program" in facts.said(["nonesuch-program"]).trouble


def test_programs_are_found_in_any_of_the_places_and_must_be_executable(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bridge").touch(mode=0o755)
    (tmp_path / "a" / "plain").touch(mode=0o644)
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert facts.not_executable(["bridge", "plain", "none"], places) == ["plain", "none"]


def test_users_have_their_groups_and_the_one_asked_for() -> None:
    who = facts.user("root", "daemon")
    assert who is not None
    assert (who.uid, {0, 1} <= who.gids) == (0, True)
    assert facts.user("nonesuch-user", "daemon") is None


def test_a_missing_state_directory_is_measured_by_what_is_above_it(tmp_path: Path) -> None:
    found = facts.room(str(tmp_path / "later"))
    assert found.path == str(tmp_path / "later")
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert abs(found.bytes - free) < 1 << 30


def test_a_tapmanager_that_is_not_there_or_refuses_is_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert facts.tapmanager_trouble(path, 1) == "No such file or directory"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        assert facts.tapmanager_trouble(path, 1) == "Connection refused"


def test_a_tapmanager_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()
        assert facts.tapmanager_trouble(path, 0.2)


def test_any_answer_of_tapmanager_is_an_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()

        def answer() -> None:
            with server.accept()[0] as sock:
                protocol.recv_frame(sock)
                protocol.send_frame(sock, protocol.error(1, "unimplemented", "no such verb"))

        thread = threading.Thread(target=answer)
        thread.start()
        assert facts.tapmanager_trouble(path, 5) == ""
        thread.join()
