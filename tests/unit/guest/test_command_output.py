"""Exit codes and failures of commands are reported as the guest reports them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.guest.command_output import CommandOutput
from virtshim.model.errors import InternalError, InvalidRequest, ShimError, WrongState
from virtshim.streaming.ports import Output, OutStream

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


@pytest.mark.parametrize("code", [0, 1, 137, 254, 255])
def test_every_possible_exit_code_is_reported(code):
    output = CommandOutput(TOKEN, stderr=True)
    output.feed(OutStream.STDOUT, said("start", f"exit {code}"))
    assert output.code == code


@pytest.mark.parametrize("code", ["", "-1", "256", "1e1", "99999999999", "\u0663"])
def test_an_impossible_exit_code_is_an_error(code):
    with pytest.raises(InternalError, match="exit code"):
        CommandOutput(TOKEN, stderr=True).feed(OutStream.STDOUT, said("start", f"exit {code}"))


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ("directory /no/such", InvalidRequest, "/no/such"),
        ("user bob", InvalidRequest, "bob"),
        ("tool script", WrongState, "util-linux"),
        ("tool setpriv", WrongState, r"util-linux \(Alpine: setpriv\), coreutils or python3"),
        ("gibberish", InternalError, "gave no reason"),
    ],
)
def test_a_command_that_cannot_start_is_reported_with_the_remedy(words, kind, says):
    with pytest.raises(kind, match=says):
        CommandOutput(TOKEN, stderr=True).feed(OutStream.STDOUT, said("start", f"fail {words}"))


def test_a_terminal_outside_dev_is_not_believed():
    output = CommandOutput(TOKEN, stderr=False)
    output.feed(OutStream.STDOUT, said("start", "tty /etc/passwd"))
    assert output.tty == ""


_WORDS = st.sampled_from(
    ["start", "end", "exit", "exit 0", "exit 256", "tty /dev/pts/1", "fail tool x", "fail", "", "x\0"]
)
_PIECES = st.lists(st.tuples(st.sampled_from(OutStream), st.binary(max_size=30) | _WORDS.map(said)), max_size=12)


@given(_PIECES)
def test_any_bytes_of_a_guest_give_output_or_a_known_error(pieces):
    output = CommandOutput(TOKEN, stderr=True)
    with contextlib.suppress(ShimError):
        for stream, data in pieces:
            assert all(item.data and len(item.data) <= len(data) + 40 for item in output.feed(stream, data))
    assert output.code is None or 0 <= output.code <= 255
