"""Every command ends with the exit code of its error's kind, and with one line that says what is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
import typer

from virtshim.cli import main
from virtshim.cri.channel import as_shim_errors
from virtshim.model import errors
from virtshim.model.errors import Kind, ShimError

pytestmark = pytest.mark.operator


def walked(command: Any, words: tuple[str, ...] = ()) -> Any:
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from walked(inner, (*words, name))
    else:
        yield words, command


COMMANDS = dict(walked(typer.main.get_command(main.app)))


# `check` and `diag` tell it with what else they find; `up` and `setup` make things before they read. `agent` refuses faults of
# the two settings that it has; virtshim on the same node refuses the others.
OF_THEIR_OWN = {("check",), ("diag",), ("up",), ("setup",), ("agent",)}
# Valid arguments for commands that need words of a certain form, or one of several words.
WORDS = {("save",): ["word"], ("port-forward",): ["word", "80"], ("cp",): ["word:/there", "/here"]}


def options(words: tuple[str, ...]) -> set[str]:
    return {option for parameter in COMMANDS[words].params for option in parameter.opts}


def required(words: tuple[str, ...]) -> list[str]:
    """A word for each argument and option that must be there."""
    if words in WORDS:
        return WORDS[words]
    given = []
    for parameter in COMMANDS[words].params:
        if parameter.required:
            given += [parameter.opts[0], "/nowhere"] if isinstance(parameter, click.Option) else ["word"]
    return given


def ended(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, command: Callable[[Sequence[str]], object] = main.app
) -> int | None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    monkeypatch.delenv("CONTAINER_RUNTIME_ENDPOINT", raising=False)
    with pytest.raises(SystemExit) as end:
        main.main(arguments, command)
    code = end.value.code
    assert code is None or isinstance(code, int)
    return code


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Than root, as far as this process is root's."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(1000, 1000, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A directory into which every user may look."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_of_error_has_a_code_and_each_code_a_meaning(kind: Kind) -> None:
    assert main.EXIT_CODES[kind] in main.EXIT_MEANINGS


@pytest.mark.parametrize(
    "error", [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, ShimError)]
)
def test_an_error_ends_the_command_with_the_code_of_its_kind(
    error: type[ShimError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_words: Sequence[str]) -> None:
        raise error("what, why, what to do")

    assert ended(monkeypatch, command=fails) == main.EXIT_CODES[error.kind]
    assert capsys.readouterr().err == "virtshim: what, why, what to do\n"


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if "--config" in options(words) and words not in OF_THEIR_OWN], ids=" ".join
)
def test_every_command_that_reads_settings_refuses_bad_ones_with_78(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[vm]\nmax_vcpu = 3\n")
    assert ended(monkeypatch, *words, "--config", str(file), *required(words)) == 78
    assert f"{file}:2: vm.max_vcpu: there is no such setting" in capsys.readouterr().err


# The dashboard serves also while the node is away, and says so in its page. The agent tells the API server so.
ASKING = [words for words in COMMANDS if "--socket" in options(words) and words not in (("dashboard",), ("agent",))]


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_every_command_that_asks_the_node_ends_with_69_without_a_node(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, *words, "--socket", f"{tmp_path}/none.sock", *required(words)) == 69
    assert capsys.readouterr().err == (
        f"virtshim: no answer on the socket {tmp_path}/none.sock (No such file or directory): is virtshim running? "
        "--socket or CONTAINER_RUNTIME_ENDPOINT names another socket\n"
    )


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_every_command_that_asks_the_node_ends_with_77_if_the_socket_is_roots(
    words: tuple[str, ...], for_all: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = for_all / "one.sock"
    path.touch(0o400)
    with as_another_user():
        assert ended(monkeypatch, *words, "--socket", str(path), *required(words)) == 77
    assert f"virtshim: this user has no access to {path}; run the command as root" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("up", "--dir"), ("down", "--dir"), ("diag",), ("setup", "--root")], ids=" ".join)
def test_a_command_for_root_only_ends_with_77_for_other_users(
    words: tuple[str, ...], for_all: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with as_another_user():
        assert ended(monkeypatch, *words, str(for_all)) == 77
    assert re.match(r"virtshim: .*(root|sudo)", capsys.readouterr().err)
    assert not os.listdir(for_all)


@pytest.mark.parametrize("words", [("ps", "--socket"), ("pull",), ("exec", "web", "--"), ("diag",)], ids=" ".join)
def test_an_argument_that_is_not_utf_8_ends_with_78(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, *words, os.fsdecode(b"\xff")) == 78
    assert capsys.readouterr().err == "virtshim: the argument '\\udcff' is not UTF-8; write it in UTF-8\n"


@pytest.mark.parametrize(
    ("streams", "code", "says"),
    [
        (">/dev/full", 71, "virtshim: the output could not be written: No space left on device; free some space\n"),
        ("| exec true", 0, ""),
        (">&-", 0, ""),
        ("<&- >&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written_gives_at_most_one_error_line(streams: str, code: int, says: str) -> None:
    """`config schema` prints more than a pipe's reader has taken; `version` less than a buffer holds."""
    for words in (["config", "schema"], ["version"]):
        line = ["sh", "-c", f'"$@" {streams}', "sh", sys.executable, "-m", "virtshim", *words]
        found = subprocess.run(line, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stderr) == (code, says)


def test_output_into_a_closed_pipe_ends_silently_with_1() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(
        [sys.executable, "-m", "virtshim", "version"], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (found.returncode, found.stderr) == (main.EXIT_UNREAD, b"")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_refuses_an_unknown_option_with_2(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(monkeypatch, *words, "--no-such-option") == 2


class Answered(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNKNOWN

    def details(self) -> str:
        return "RegistryUnavailable: registry.example.com cannot be reached"


def test_an_unreachable_registry_is_69(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kubelet is told of it: without a code."""

    def fails(_words: Sequence[str]) -> None:
        with as_shim_errors():
            raise Answered

    assert ended(monkeypatch, command=fails) == 69


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    os.mkfifo(file)
    command = [sys.executable, "-m", "virtshim", "config", "check", "--config", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running, file.open("wb"):  # it has begun to read the file
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == main.EXIT_INTERRUPTED
    assert b"Traceback" not in said


def test_the_document_and_the_help_have_the_same_table(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs/commands.md").read_text().split("\n## Exit codes\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.*) \|$", text, re.MULTILINE)
    assert {int(code): meaning for code, meaning, _ in rows} == dict(main.EXIT_MEANINGS)
    assert {Kind[name]: int(code) for code, _, names in rows for name in names.split(", ") if name} == dict(
        main.EXIT_CODES
    )
    for code in main.EXIT_MEANINGS:
        assert re.search(rf"\b{code} ", main.EXIT_EPILOG)
