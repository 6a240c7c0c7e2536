"""A console's bytes become CRI log lines."""

import itertools
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.logs.lines import MAX_CONTENT, LineCutter, timestamp

STAMP = b"2024-05-06T07:08:09.000000010Z"
LIMIT = MAX_CONTENT


def cut(*chunks: bytes) -> list[tuple[bytes, bytes]]:
    cutter = LineCutter()
    return parsed(b"".join([*(cutter.feed(chunk, STAMP) for chunk in chunks), cutter.end(STAMP)]))


def parsed(log: bytes) -> list[tuple[bytes, bytes]]:
    assert not log or log.endswith(b"\n")
    found = []
    for line in log.split(b"\n")[:-1]:
        match = re.fullmatch(rb"%b stdout ([FP]) (.*)" % STAMP, line, re.DOTALL)
        assert match, line[:100]
        assert len(match[2]) <= LIMIT
        found.append((match[1], match[2]))
    return found


def glued(lines: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(content + (b"\n" if tag == b"F" else b"") for tag, content in lines)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, b"1970-01-01T00:00:00.000000000Z"),
        (1_714_979_289_000_000_010, b"2024-05-06T07:08:09.000000010Z"),
        (1_714_979_289_999_999_999, b"2024-05-06T07:08:09.999999999Z"),
    ],
)
def test_timestamps_have_nine_digits_and_a_zone(nanoseconds: int, text: bytes) -> None:
    assert timestamp(nanoseconds) == text


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"a\n", [(b"F", b"a")]),
        (b"a\nb", [(b"F", b"a"), (b"P", b"b")]),
        (b"\n\n", [(b"F", b""), (b"F", b"")]),
        (b"a\r\nb\rc\r\n", [(b"F", b"a"), (b"F", b"b\rc")]),
        (b"a\r\r\n", [(b"F", b"a\r")]),
        (b"\r\n", [(b"F", b"")]),
        (b"a\r", [(b"P", b"a\r")]),
        (b"\x00\xff\x1b[2J\x85\n", [(b"F", b"\x00\xff\x1b[2J\x85")]),
        (b"a" * LIMIT + b"\n", [(b"F", b"a" * LIMIT)]),
        (b"a" * LIMIT + b"\r\n", [(b"F", b"a" * LIMIT)]),
        (b"a" * LIMIT + b"\rb\n", [(b"P", b"a" * LIMIT), (b"F", b"\rb")]),
        (b"a" * (LIMIT + 1) + b"\n", [(b"P", b"a" * LIMIT), (b"F", b"a")]),
        (
            b"x\n" + b"a" * (2 * LIMIT) + b"\ny\n",
            [(b"F", b"x"), (b"P", b"a" * LIMIT), (b"F", b"a" * LIMIT), (b"F", b"y")],
        ),
        (b"a" * (2 * LIMIT + 5), [(b"P", b"a" * LIMIT), (b"P", b"a" * LIMIT), (b"P", b"a" * 5)]),
        (b"a" * LIMIT + b"\r", [(b"P", b"a" * LIMIT), (b"P", b"\r")]),
    ],
)
def test_output_is_cut_into_lines_however_it_arrives(text: bytes, lines: list[tuple[bytes, bytes]]) -> None:
    assert cut(text) == lines
    assert cut(*(text[at : at + 1] for at in range(len(text)))) == lines


def test_a_flushed_line_is_continued() -> None:
    cutter = LineCutter()
    assert parsed(cutter.feed(b"login: ", STAMP)) == []
    assert cutter.can_flush
    assert parsed(cutter.flush(STAMP)) == [(b"P", b"login: ")]
    assert not cutter.can_flush
    assert parsed(cutter.flush(STAMP)) == []
    assert parsed(cutter.feed(b"root\r\n", STAMP)) == [(b"F", b"root")]


def test_a_carriage_return_waits_for_its_newline_over_a_flush() -> None:
    cutter = LineCutter()
    cutter.feed(b"a\r", STAMP)
    assert parsed(cutter.flush(STAMP)) == [(b"P", b"a")]
    assert cutter.held == 1
    assert parsed(cutter.feed(b"\n", STAMP)) == [(b"F", b"")]


# Lines around the limit, carriage returns and newlines in every neighbourhood.
parts = st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"\x00", b"b" * (LIMIT - 1), b"c" * LIMIT, b"d" * (LIMIT + 1)])
texts = st.lists(parts | st.binary(max_size=5), max_size=12).map(b"".join)


@given(texts)
def test_joining_the_pieces_gives_the_text(text: bytes) -> None:
    assert glued(cut(text)) == text.replace(b"\r\n", b"\n")


@given(texts, st.lists(st.integers(0, 100_000), max_size=6))
def test_any_chunking_gives_the_same_lines(text: bytes, cuts: list[int]) -> None:
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert cut(*(text[start:end] for start, end in itertools.pairwise(at))) == cut(text)


@given(st.lists(st.binary(max_size=8) | parts, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_flushes_anywhere_lose_nothing(chunks: list[bytes], flushes: list[bool]) -> None:
    cutter = LineCutter()
    log = b""
    for chunk, flush in zip(chunks, flushes, strict=False):
        log += cutter.feed(chunk, STAMP)
        assert cutter.held <= LIMIT + 1
        if flush:
            log += cutter.flush(STAMP)
    assert glued(parsed(log + cutter.end(STAMP))) == b"".join(chunks).replace(b"\r\n", b"\n")


def test_a_flood_of_short_lines_is_cheap() -> None:
    cutter = LineCutter()
    line, calls = b"[   12.345678] some kernel message of usual length, nothing else\r\n", 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        cutter.feed(line * 10_000, STAMP)
    finally:
        sys.setprofile(before)
    assert calls < 1000, "a line costs no call of its own"
