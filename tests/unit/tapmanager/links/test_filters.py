"""A filter's bytes are well-formed netlink. The integration tests send them to a real kernel."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from tapmanager.links import nft
from tapmanager.links.filters import dhcp_guard, dhcp_guard_exceptions, gateway_rewrite_rules, spoof_filter_rules
from tapmanager.network_values import FILTERS
from tapmanager.pod import Nic, Route

_NIC = Nic(
    "eth0", "0a:58:00:00:00:01", "02:00:00:00:00:01", "br0", "02:00:00:00:00:02", "tap0", 1500,
    ("10.88.0.5/16", "fd00::5/64"), (Route("::/0", "fe80::1"),), (), (), filter="mac+ip",
)  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (dhcp_guard(), 3 + 8),
        (dhcp_guard_exceptions(("net1", "tap1")), 2),
        (spoof_filter_rules([_NIC]), 2 + 13),
        (gateway_rewrite_rules("tap0", 1, bytes(6), bytes(6)), 4),
        (spoof_filter_rules([dataclasses.replace(_NIC, filter="mac"), dataclasses.replace(_NIC, filter="off")]), 2 + 2),
    ],
)
def test_a_batch_is_a_sequence_of_complete_messages(messages: list[bytes], wanted: int) -> None:
    data, acknowledgements = nft.batch(messages)
    count, asking, at = 0, 0, 0
    while at < len(data):
        length, _, flags, _, _ = struct.unpack_from("=IHHII", data, at)
        assert length % 4 == 0
        count += 1
        asking += bool(flags & 4)
        at += length
    assert at == len(data)
    assert count == wanted + 2
    assert asking == acknowledgements == wanted


def test_without_a_filter_no_messages_are_sent() -> None:
    assert FILTERS == ("off", "mac", "mac+ip")
    assert spoof_filter_rules([dataclasses.replace(_NIC, filter="off")]) == []
