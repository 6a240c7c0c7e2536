"""The command line has the right output, exit codes and error messages."""

import importlib.metadata
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from virtshim.cli import main as command
from virtshim.cli import pulling, tables, vms
from virtshim.cli.help import GROUPS
from virtshim.cli.tables import row_format
from virtshim.model import errors
from virtshim.model.errors import ShimError

pytestmark = pytest.mark.operator


def ran(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command.app, list(arguments))
    return result.exit_code, result.output


def test_version_is_that_of_the_installation() -> None:
    for word in ("version", "--version"):
        assert ran(word) == (0, importlib.metadata.version("virtshim") + "\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("-h",),
        ("logs", "-h"),
        ("config", "show", "-h"),
        ("serve", "--help"),
        ("up", "--help"),
        ("down", "--help"),
        ("setup", "--help"),
        ("config", "--help"),
        ("ps", "--help"),
        ("exec", "--help"),
        ("console", "--help"),
        ("ssh", "--help"),
        ("vnc", "--help"),
    ],
)
def test_every_command_has_help(arguments: tuple[str, ...]) -> None:
    code, text = ran(*arguments)
    assert code == 0
    assert "Usage" in text


def test_help_lists_every_command_in_one_group() -> None:
    program = typer.main.get_command(command.app)
    commands = program.list_commands(typer.Context(program))
    assert commands == [name for names in GROUPS.values() for name in names]
    text = ran("--help")[1]
    assert re.findall(r"─ ([A-Z][A-Za-z ]+) ─", text) == ["Options", *GROUPS]


def test_help_shows_the_type_of_a_value_but_none_of_a_flag() -> None:
    program = typer.main.get_command(command.app)
    for words in [
        (),
        ("vms",),
        ("image",),
        ("config",),
        *((name,) for name in program.list_commands(typer.Context(program))),
    ]:
        assert "bool" not in ran(*words, "--help")[1], words
    assert re.search(r"--filter +<str> ", ran("ps", "--help")[1])


def test_a_usage_line_names_its_arguments_in_capitals() -> None:
    assert re.search(r"run \[OPTIONS\] \{IMAGE\} \[COMMAND\]\.\.\.", ran("run", "--help")[1])
    assert "port-forward [OPTIONS] {NAME} {PORT}..." in ran("port-forward")[1]
    assert "Missing argument 'FILE'" in ran("load")[1]


@pytest.mark.parametrize(("name", "head"), [("ps", tables.HEAD), ("images", pulling.HEAD), ("vms", vms.HEAD)])
def test_the_example_of_a_format_names_columns_of_that_table(name: str, head: Sequence[str]) -> None:
    (example,) = re.findall(r"such as '(\{.+?\})'", re.sub(r"[\s│]+", " ", ran(name, "--help")[1]))
    (line,) = row_format(example, head, [[name.lower() for name in head]])
    assert "\t" in line


def test_help_fills_the_lines_of_every_paragraph() -> None:
    lines = [line.rstrip() for line in ran("save", "--help")[1].splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith(" The pod needs"))
    assert all(len(line) > 60 for line in lines[at : at + 3])


@pytest.mark.parametrize(
    "arguments",
    [("fly",), ("up",), ("serve", "--nonsense"), ("down",), ("exec", "vm"), ("console",), ("ssh",), ("vnc",)],
)
def test_a_mistake_in_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert ran(*arguments)[0] == 2


@pytest.mark.parametrize(
    ("words", "run"),
    [
        ("-i vm ls -la", ["ls", "-la"]),
        ("-i vm -- ls -la", ["ls", "-la"]),
        ("vm -i -- ls -la", ["ls", "-la"]),
        ("--stdin vm ls --all", ["ls", "--all"]),
    ],
)
def test_options_of_a_command_in_a_guest_are_its_own(
    words: str, run: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Sequence[str], bool]] = []
    monkeypatch.setattr(
        "virtshim.cli.sessions.exec_command",
        lambda _socket, _name, command, *, stdin, tty: seen.append((command, stdin)) or 0,
    )
    assert ran("exec", "--socket", "/nowhere", *words.split())[0] == 0
    assert seen == [(run, True)]


def test_an_option_after_the_name_is_no_program() -> None:
    result = CliRunner().invoke(command.app, ["exec", "vm", "-it", "sh"])
    assert isinstance(result.exception, errors.InvalidRequest)
    assert "write options before NAME" in str(result.exception)


def test_config_schema_lists_every_section() -> None:
    code, text = ran("config", "schema")
    assert code == 0
    assert set(json.loads(text)["properties"]) >= {"paths", "cri", "libvirt", "tapmanager", "images", "vm", "log"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("bad"), 78),
        (errors.Unavailable("gone"), 69),
        (errors.WrongState("taken"), 75),
        (errors.InternalError("broken"), 70),
    ],
)
def test_an_error_is_one_line_and_its_kind_gives_the_exit_code(
    error: ShimError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_words: Sequence[str]) -> None:
        raise error

    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    with pytest.raises(SystemExit) as ended:
        command.main((), fails)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"virtshim: {error}\n"


def test_a_bad_configuration_is_reported_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[vm]\nmax_vcpu = 3\n")
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    with pytest.raises(SystemExit) as ended:
        command.main(["config", "show", "--config", str(file)])
    assert ended.value.code == 78
    said = capsys.readouterr().err
    assert said.startswith("virtshim: configuration: 1 fault to correct")
    assert f"{file}:2: vm.max_vcpu: there is no such setting; did you mean vm.max_vcpus?" in said
    assert said.count("\n") == 2


@pytest.mark.parametrize("address", ["unix:///nowhere/at-all.sock", "/nowhere/at-all.sock"])
def test_operator_commands_use_the_socket_that_crictl_is_configured_with(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINER_RUNTIME_ENDPOINT", address)
    result = CliRunner().invoke(command.app, ["ps"])
    assert isinstance(result.exception, ShimError)
    assert "the socket /nowhere/at-all.sock (" in str(result.exception)


@pytest.mark.parametrize("words", [["save"], ["save", "--all", "web"]])
def test_save_names_one_vm_or_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(words)
    assert "name one VM, or give --all" in capsys.readouterr().err
