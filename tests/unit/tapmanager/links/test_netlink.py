"""tapmanager builds and reads netlink messages itself."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from tapmanager.links import netlink


def test_the_kernels_error_codes_are_found() -> None:
    ack = struct.pack("=IHHIIi", 36, 2, 0, 1, 0, 0) + bytes(16)
    refusal = struct.pack("=IHHIIi", 36, 2, 0, 2, 0, -95) + bytes(16)
    assert netlink.errors_in(ack + refusal) == [0, 95]


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_to_their_end(data: bytes) -> None:
    netlink.errors_in(data)


def test_attributes_of_any_length_are_found_by_their_kind() -> None:
    data = b"head" + netlink.attribute(3, b"eth0\0") + netlink.nested(18, netlink.attribute(1, b"veth"))
    found = netlink.attributes(data, 4)
    assert found[3] == b"eth0\0"
    assert netlink.attributes(found[18], 0) == {1: b"veth"}


@given(data=st.binary(max_size=200))
def test_parsing_attributes_of_any_bytes_ends(data: bytes) -> None:
    netlink.attributes(data, 0)
