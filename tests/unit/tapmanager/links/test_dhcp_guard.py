"""The guard's bytes: well-formed netlink; the real kernel's opinion is in the integration tests."""

from __future__ import annotations

import struct

import pytest

from tapmanager.links import dhcp_guard


@pytest.mark.parametrize("unguarded", [(), ("net1", "tap1")])
def test_the_batch_is_messages_end_to_end_with_consecutive_numbers(unguarded: tuple[str, ...]) -> None:
    data, acknowledgements = dhcp_guard.dhcp_guard(unguarded)
    numbers, asking, at = [], 0, 0
    while at < len(data):
        length, _, flags, number, _ = struct.unpack_from("=IHHII", data, at)
        assert length % 4 == 0
        numbers.append(number)
        asking += bool(flags & 4)
        at += length
    assert at == len(data)
    assert numbers == list(range(len(numbers)))
    assert asking == acknowledgements == 4 + len(unguarded)
