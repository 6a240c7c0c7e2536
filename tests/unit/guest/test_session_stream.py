"""Data and records are separated, however the bytes are cut and whatever the data holds."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from virtshim.guest.command_output import MAX_RECORD, BadStream, Record, SessionStream

TOKEN = "0123456789abcdef" * 2


def record(words: str, token: str = TOKEN) -> bytes:
    return b"\1" + f"{token} {words};".encode()


def test_leftovers_of_an_earlier_session_are_dropped():
    stream = SessionStream(TOKEN)
    left = b"old output" + record("exit 3", "f" * 32)
    assert stream.feed(left + record("start") + b"new") == [Record("start"), b"new"]


def test_output_continues_between_the_exit_and_the_end():
    stream = SessionStream(TOKEN)
    assert stream.feed(record("start") + b"a" + record("exit 7") + b"b" + record("end") + b"later") == [
        Record("start"),
        b"a",
        Record("exit", "7"),
        b"b",
        Record("end"),
    ]
    assert stream.ended
    assert stream.feed(b"more") == []


def test_the_token_in_a_process_list_is_output():
    """`ps` shows the run script's arguments."""
    line = f"sh -c ... virtshim-exec {TOKEN} virtshim.exec.0\n".encode()
    stream = SessionStream(TOKEN)
    assert stream.feed(record("start") + line) == [Record("start"), line]


def test_output_is_not_held_back_for_long():
    stream = SessionStream(TOKEN)
    stream.feed(record("start"))
    assert stream.feed(b"prompt$ ") == [b"prompt$ "]


@pytest.mark.parametrize("raw", [record("EXIT 1"), record(""), b"\1" + TOKEN.encode() + b" " + b"x" * (MAX_RECORD + 1)])
def test_a_malformed_record_is_an_error(raw):
    stream = SessionStream(TOKEN)
    with pytest.raises(BadStream):
        stream.feed(record("start") + raw)


def test_endless_bytes_before_the_start_are_an_error():
    stream = SessionStream(TOKEN)
    with pytest.raises(BadStream, match="unexpected data"):
        all(stream.feed(b"x" * 65536) == [] for _ in range(100))


_PIECES = st.lists(
    st.binary(min_size=1, max_size=50)
    | st.sampled_from([b"\1", b"\1" + TOKEN.encode()[:9], TOKEN.encode(), b";", b"\1" + TOKEN.encode()])
    | st.sampled_from([Record("exit", "0"), Record("tty", "/dev/pts/3")]),
    max_size=12,
)


@given(_PIECES, st.data())
def test_splitting_the_bytes_anywhere_changes_nothing(pieces, data):
    raw = record("start")
    wanted: list[object] = [Record("start")]
    for piece in [*pieces, Record("end")]:
        if isinstance(piece, Record):
            raw += record(f"{piece.word} {piece.value}".strip())
            wanted.append(piece)
        else:
            raw += piece
            wanted.append(piece)
    assume(raw.count(b"\1" + TOKEN.encode() + b" ") == sum(isinstance(item, Record) for item in wanted))
    stream, seen = SessionStream(TOKEN), []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        seen += stream.feed(raw[:size])
        raw = raw[size:]
    assert glued(seen) == glued(wanted)


def glued(items) -> list[object]:
    out: list[object] = []
    for item in items:
        if isinstance(item, bytes) and out and isinstance(out[-1], bytes):
            out[-1] += item
        else:
            out.append(item)
    return out


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_any_bytes_give_data_or_one_kind_of_error(pieces):
    stream = SessionStream(TOKEN)
    try:
        stream.feed(record("start"))
        for piece in pieces:
            stream.feed(piece)
            stream.feed(b"\1" + TOKEN.encode() + b" ")
    except BadStream:
        pass
