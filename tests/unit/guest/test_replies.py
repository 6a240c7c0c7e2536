"""The agent's replies are split, limited and never trusted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.guest.agent_replies import (
    MAX_LINE,
    MAX_SKIPPED,
    BadReply,
    ErrorReply,
    ReplyReader,
    Returned,
    command_line,
    sync_line,
)


def in_step() -> ReplyReader:
    reader = ReplyReader()
    assert reader.feed(b'\xff{"return": 1}\n') == [Returned(1)]
    return reader


def flood(reader: ReplyReader, size: int) -> None:
    for _ in range(size // 65536 + 2):
        reader.feed(b"x" * 65536)


def test_a_request_is_one_line_of_json():
    line = command_line("guest-exec", {"path": "/bin/sh", "arg": ["a\nb", "ü"]})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"execute": "guest-exec", "arguments": {"path": "/bin/sh", "arg": ["a\nb", "ü"]}}


def test_a_sync_request_ends_a_half_line_that_the_agent_may_hold():
    assert sync_line(7)[:1] == b"\xff"


def test_everything_before_the_first_mark_is_skipped():
    reader = ReplyReader()
    assert reader.feed(b'{"return": "old"}\n{"retu') == []
    assert reader.feed(b'rn": 1}\n\xff{"return": 2}\n') == [Returned(2)]


def test_a_mark_in_the_middle_of_a_line_restarts_the_line():
    assert in_step().feed(b'{"return": "half\xff{"return": 3}\n') == [Returned(3)]


def test_empty_lines_are_no_replies():
    assert in_step().feed(b'\n\r\n{"return": {}}\r\n') == [Returned({})]


def test_an_error_carries_its_class_and_words_in_one_printable_line():
    reply = in_step().feed(b'{"error": {"class": "GenericError", "desc": "no\\nway\\u001b"}}\n')
    assert reply == [ErrorReply("GenericError", "no?way?")]


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[1]",
        b"{}",
        b'{"error": 5}',
        b'{"return"',
        b"[" * 100_000,
        b"\x80",
        b'{"return": ' + b"9" * 5000 + b"}",
    ],
)
def test_anything_but_a_reply_is_an_error(line):
    with pytest.raises(BadReply):
        in_step().feed(line + b"\n")


def test_an_endless_line_is_an_error():
    reader = in_step()
    with pytest.raises(BadReply, match=str(MAX_LINE)):
        flood(reader, MAX_LINE)


def test_endless_bytes_before_the_first_mark_are_an_error():
    reader = ReplyReader()
    with pytest.raises(BadReply, match="keeps sending"):
        flood(reader, MAX_SKIPPED)


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_any_bytes_give_replies_or_one_kind_of_error(pieces):
    reader = ReplyReader()
    try:
        for piece in pieces:
            for reply in reader.feed(piece):
                assert isinstance(reply, Returned | ErrorReply)
    except BadReply:
        pass


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.lists(_JSON, min_size=1, max_size=5), st.data())
def test_replies_are_the_same_however_the_bytes_are_cut(values, data):
    raw = b"rest of old talk\xff" + b"".join(json.dumps({"return": value}).encode() + b"\n" for value in values)
    reader, replies = ReplyReader(), []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        replies += reader.feed(raw[:size])
        raw = raw[size:]
    assert replies == [Returned(value) for value in values]
