"""Terminal sizes are read as clients send them."""

from __future__ import annotations

import json

import pytest

from virtshim.streaming.remotecommand import SizeReader


def test_the_newest_of_several_sizes_counts():
    reader = SizeReader()
    assert reader.feed(b'{"Width":80,"Height":24}\n{"Width":90,"Height":30}') == (90, 30)
    assert reader.feed(b"\n") is None


def test_a_size_may_arrive_in_pieces():
    reader = SizeReader()
    assert [reader.feed(bytes([byte])) for byte in b'{"Width":1,"Height":2}'][-1] == (1, 2)


@pytest.mark.parametrize(
    "nonsense",
    [
        *(
            b"nonsense",
            b"[1,2]",
            b'{"Width":"80","Height":24}',
            b'{"Width":0,"Height":0}',
            b'{"Width":80}',
            b"\xff\xfe",
        ),
        *(b'{"Width":70000,"Height":24}', b"[" * 5000, b"{" * 5000, b'{"Width":1e999,"Height":1}', b"null", b"1"),
    ],
)
def test_a_malformed_size_is_dropped_and_the_next_one_counts(nonsense):
    reader = SizeReader()
    assert reader.feed(nonsense) is None
    assert (80, 24) in [reader.feed(b'{"Width":80,"Height":24}') for _ in range(2)]


class Counting:
    """Counts what is read, letter by letter."""

    def __init__(self) -> None:
        self.letters = 0
        self._decoder = json.JSONDecoder()

    def raw_decode(self, text: str, place: int = 0) -> tuple[object, int]:
        value, end = self._decoder.raw_decode(text, place)
        self.letters += end - place
        return value, end


@pytest.mark.parametrize("many", [b"{}", b"1 ", b'{"Width":1,"Height":1}\n'])
def test_only_the_last_sizes_of_a_flood_are_parsed(many):
    """All sessions of the node wait meanwhile."""
    reader = SizeReader()
    reader._decoder = counting = Counting()
    assert reader.feed(many * ((256 << 10) // len(many)) + b'{"Width":80,"Height":24}') == (80, 24)
    assert counting.letters <= 4096
    assert reader.feed(b'{"Width":90,') is None
    assert reader.feed(b'"Height":30}') == (90, 30)
