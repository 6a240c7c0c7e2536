"""A tap's counters, read from the other end, are the guest's."""

from __future__ import annotations

from tapmanager.links.packet_rules import counters_parsed

DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0
  tap0:    1000      10    1    2    7     7          7         7     2000      20    3    4    7     7       7          7
"""


def test_bytes_that_a_tap_received_count_as_sent_by_the_guest() -> None:
    assert counters_parsed(DEV)["tap0"] == (2000, 20, 3, 4, 1000, 10, 1, 2)


def test_heading_lines_are_not_taken_for_interfaces() -> None:
    assert set(counters_parsed(DEV)) == {"lo", "tap0"}
