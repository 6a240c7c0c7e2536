"""A frame arrives as it was sent, and nothing that is not a frame gets through or leaks descriptors."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager import protocol
from virtshim.model.errors import Kind

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_error_kinds_are_the_products_except_those_of_pulls() -> None:
    assert {kind.value for kind in Kind} - {Kind.REGISTRY.value, Kind.SIGNATURE.value} == protocol.KINDS


@given(args=st.dictionaries(st.text(max_size=8), _JSON, max_size=5), number=st.integers(0, 2**31))
def test_a_request_is_decoded_as_it_was_encoded(args: dict[str, object], number: int) -> None:
    body = protocol.request(number, "attach", args, 2.5)
    assert protocol.decode(protocol.encode(body)) == body


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    with contextlib.suppress(protocol.FrameError):
        assert protocol.decode(data)["v"] == protocol.VERSION


@pytest.mark.parametrize(
    "data", [b"[]", b"1", b"{}", b'{"v": 2}', b'{"v": "1"}', b"\xff", b"[" * 100_000, b'{"v":1' + b"0" * 6000 + b"}"]
)
def test_anything_but_a_frame_of_this_version_is_refused(data: bytes) -> None:
    with pytest.raises(protocol.FrameError):
        protocol.decode(data)


def test_descriptors_arrive_as_new_ones_that_no_child_inherits(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    read, write = os.pipe()
    protocol.send_frame(left, protocol.answer(1, {"a": 1}), [write])
    received = protocol.recv_frame(right)
    assert received is not None
    body, (fd,) = received
    assert body["ok"] == {"a": 1}
    assert fd != write
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    assert os.read(read, 1) == b"x"
    protocol.close_all([read, write, fd])


def test_a_closed_connection_yields_no_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.close()
    assert protocol.recv_frame(right) is None


def test_a_frame_too_long_to_send_is_refused() -> None:
    with pytest.raises(protocol.FrameError, match="longer than the limit"):
        protocol.encode({"v": 1, "x": "a" * protocol.MAX_FRAME})


def test_the_longest_frame_fits_into_the_kernels_default_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.settimeout(5)
    text = "a" * (protocol.MAX_FRAME - len(protocol.encode({"v": 1, "x": ""})))
    protocol.send_frame(left, {"v": 1, "x": text})
    received = protocol.recv_frame(right)
    assert received is not None
    assert received[0]["x"] == text


def send_raw(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_too_many_descriptors_are_an_error_and_none_of_them_stays_open(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    before = descriptors()
    send_raw(left, b'{"v":1}', [0] * (protocol.MAX_FDS + 1))
    with pytest.raises(protocol.FrameError, match="were truncated"):
        protocol.recv_frame(right)
    assert descriptors() == before


def test_a_bad_frame_closes_the_descriptors_that_came_with_it(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    before = descriptors()
    send_raw(left, b"nonsense", [0, 0])
    with pytest.raises(protocol.FrameError, match="not JSON"):
        protocol.recv_frame(right)
    assert descriptors() == before


def test_a_frame_too_long_to_receive_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    left.settimeout(5)
    length = protocol.MAX_FRAME + 1
    try:
        left.send(b" " * length)
    except OSError:
        pytest.skip("the kernel's limit is below ours")
    with pytest.raises(protocol.FrameError, match="were truncated"):
        protocol.recv_frame(right)


def test_a_call_without_a_listener_is_a_connection_error(tmp_path: object) -> None:
    with pytest.raises(FileNotFoundError):
        protocol.call(f"{tmp_path}/nothing", "list", {}, 1.0)
