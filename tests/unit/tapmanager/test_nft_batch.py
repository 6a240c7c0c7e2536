"""The guard's bytes: well-formed netlink; the real kernel's opinion is in the integration tests."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from tapmanager import nft_batch


def test_the_batch_is_messages_end_to_end_with_consecutive_numbers() -> None:
    data, acknowledgements = nft_batch.dhcp_guard()
    numbers, asking, at = [], 0, 0
    while at < len(data):
        length, _, flags, number, _ = struct.unpack_from("=IHHII", data, at)
        assert length % 4 == 0
        numbers.append(number)
        asking += bool(flags & 4)
        at += length
    assert at == len(data)
    assert numbers == list(range(len(numbers)))
    assert asking == acknowledgements


def test_the_kernels_error_codes_are_found() -> None:
    ack = struct.pack("=IHHIIi", 36, 2, 0, 1, 0, 0) + bytes(16)
    refusal = struct.pack("=IHHIIi", 36, 2, 0, 2, 0, -95) + bytes(16)
    assert nft_batch.errors_in(ack + refusal) == [0, 95]


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_to_their_end(data: bytes) -> None:
    nft_batch.errors_in(data)
