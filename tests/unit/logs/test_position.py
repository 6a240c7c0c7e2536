"""A record says how far a console has been written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.logs.lines import ENCODED_BYTES, Position, decode, encode

numbers = st.integers(0, 2**64 - 1)


@given(st.builds(Position, numbers, numbers, numbers, numbers, numbers))
def test_round_trip_in_a_fixed_length(position: Position) -> None:
    record = encode(position)
    assert len(record) == ENCODED_BYTES
    assert decode(record) == position


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\0" * ENCODED_BYTES,
        b"{}x",
        b"[1]",
        b"null",
        b'{"offset": -1}',
        b'{"offset": true}',
        b'{"other": 1}',
        b"\xff",
        b"1",
    ],
)
def test_a_malformed_record_decodes_to_none(record: bytes) -> None:
    assert decode(record) is None


@given(st.binary(max_size=300))
def test_any_bytes_give_a_record_or_none(record: bytes) -> None:
    decode(record)
