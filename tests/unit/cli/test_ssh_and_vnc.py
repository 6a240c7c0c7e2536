"""`ssh` and `port-forward` build the right arguments, and a screen is shown only at allowed addresses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from virtshim.cli import vnc
from virtshim.cli.port_forward import Forward, parse_forwards
from virtshim.cli.sessions import SshOptions, ssh, ssh_arguments
from virtshim.cri.client import VmSummary
from virtshim.model.errors import InvalidRequest, WrongState

pytestmark = pytest.mark.operator

VM = VmSummary("c" * 64, "5" * 64, "vm", 0, "running", "image", 0.0)


def test_a_host_key_is_remembered_by_vm_and_not_by_address() -> None:
    argv = ssh_arguments(VM, "10.88.0.5", SshOptions("debian", identity="/k", command=("ls", "-l", "a b")))
    assert argv[0] == "ssh"
    assert f"HostKeyAlias=virtshim-{'c' * 20}" in argv
    assert argv[argv.index("-i") + 1] == "/k"
    assert argv[-6:] == ["debian", "--", "10.88.0.5", "ls", "-l", "a b"]


@pytest.mark.parametrize("user", ["", "-oProxyCommand=id", "a b", "root@elsewhere", "x" * 40])
def test_an_invalid_user_is_refused_before_any_request(user: str) -> None:
    with pytest.raises(InvalidRequest, match="not a user name"):
        ssh("/nowhere.sock", "web", SshOptions(user))


@pytest.mark.parametrize("content", ["", "# nothing\n", "-----BEGIN OPENSSH PRIVATE KEY-----\n", "\xff"])
def test_only_public_keys_are_injected(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match="--inject"):
        ssh("/nowhere.sock", "web", SshOptions("root", inject=str(tmp_path / "key")))


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("127.0.0.1:5900", "127.0.0.1", 5900), ("[::1]:0", "::1", 0), ("127.0.0.9:1", "127.0.0.9", 1)],
)
def test_a_screen_is_shown_on_loopback(listen: str, host: str, port: int) -> None:
    place = vnc.parse_listen_address(listen, "")
    assert (place.host, place.port, place.path) == (host, port, "")


@pytest.mark.parametrize("listen", ["0.0.0.0:5900", "10.0.0.1:5900", "[::]:5900", "[fd00::1]:1"])
def test_a_screen_is_shown_to_no_other_machine(listen: str) -> None:
    with pytest.raises(InvalidRequest, match="no password"):
        vnc.parse_listen_address(listen, "")


@pytest.mark.parametrize("listen", ["5900", "localhost:5900", "127.0.0.1", "127.0.0.1:99999", "1:2:3"])
def test_a_malformed_listen_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidRequest, match="ADDRESS:PORT"):
        vnc.parse_listen_address(listen, "")


def test_a_socket_path_that_is_too_long_is_an_error_that_says_so(tmp_path: Path) -> None:
    place = vnc.parse_listen_address("", f"{tmp_path}/{'x' * 120}")
    with pytest.raises(WrongState, match=r"AF_UNIX path too long; choose another with --listen or --unix"):
        vnc.listen_at(place)


@pytest.mark.parametrize(
    ("word", "ports"), [("80", (80, 80)), ("8080:80", (8080, 80)), (":80", (0, 80)), ("0:80", (0, 80))]
)
def test_a_forward_names_a_local_port_and_the_guests(word: str, ports: tuple[int, int]) -> None:
    assert parse_forwards([word], "::1") == ("::1", [Forward(*ports)])


@pytest.mark.parametrize("word", ["", "web", "80:", "0", "70000", "70000:80", "8080:0", "1:2:3", "-80", "٨٠"])
def test_words_that_name_no_ports_are_refused(word: str) -> None:
    with pytest.raises(InvalidRequest, match="write PORT, LOCAL:PORT or :PORT"):
        parse_forwards(["80", word], "127.0.0.1")


def test_a_forward_listens_on_addresses_only() -> None:
    with pytest.raises(InvalidRequest, match="--address"):
        parse_forwards(["80"], "localhost")


class FullListener:
    """The process has no descriptor for the first client. The listener is closed after the second one."""

    def __init__(self) -> None:
        full, closed = OSError(errno.EMFILE, "Too many open files"), OSError(errno.EBADF, "Bad file descriptor")
        self.results: list[OSError | tuple[str, str]] = [full, ("client", "its address"), closed]

    def accept(self) -> tuple[str, str]:
        result = self.results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    def fileno(self) -> int:
        return 3 if self.results else -1


def test_a_client_that_cannot_be_accepted_does_not_end_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(vnc.accepted(FullListener(), wait=0.0)) == ["client"]  # type: ignore[arg-type]
    assert "Too many open files" in capsys.readouterr().err
