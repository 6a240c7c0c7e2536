"""Exit codes and failures as the guest tells them."""

from __future__ import annotations

import pytest

from virtshim.domain.errors import InternalError, InvalidRequest, WrongState
from virtshim.domain.streaming import Output, OutStream
from virtshim.guestagent.command_output import CommandOutput

TOKEN = "f" * 32


def said(*words: str) -> bytes:
    return b"".join(b"\1" + f"{TOKEN} {word};".encode() for word in words)


def test_a_command_is_complete_when_it_has_exited_and_both_streams_have_ended():
    output = CommandOutput(TOKEN, stderr=True)
    assert output.feed(OutStream.STDOUT, said("start", "exit 137", "end")) == []
    assert output.exited
    assert not output.complete
    output.feed(OutStream.STDERR, said("start") + b"killed" + said("end"))
    assert output.complete
    assert output.code == 137


def test_a_terminal_has_one_stream():
    output = CommandOutput(TOKEN, stderr=False)
    assert output.feed(OutStream.STDOUT, said("start", "tty /dev/pts/0") + b"$ ") == [Output(OutStream.STDOUT, b"$ ")]
    assert output.tty == "/dev/pts/0"
    output.feed(OutStream.STDOUT, said("exit 0", "end"))
    assert output.complete


@pytest.mark.parametrize("code", ["", "-1", "256", "1e1", "99999999999", "\u0663"])
def test_an_exit_code_that_is_none_is_an_error(code):
    with pytest.raises(InternalError, match="exit code"):
        CommandOutput(TOKEN, stderr=True).feed(OutStream.STDOUT, said("start", f"exit {code}"))


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ("directory /no/such", InvalidRequest, "/no/such"),
        ("user bob", InvalidRequest, "bob"),
        ("tool script", WrongState, "util-linux"),
        ("tool setpriv", WrongState, "another user"),
        ("gibberish", InternalError, "does not say why"),
    ],
)
def test_why_a_command_cannot_start_is_told_with_the_remedy(words, kind, says):
    with pytest.raises(kind, match=says):
        CommandOutput(TOKEN, stderr=True).feed(OutStream.STDOUT, said("start", f"fail {words}"))


def test_a_terminal_outside_dev_is_not_believed():
    output = CommandOutput(TOKEN, stderr=False)
    output.feed(OutStream.STDOUT, said("start", "tty /etc/passwd"))
    assert output.tty == ""
