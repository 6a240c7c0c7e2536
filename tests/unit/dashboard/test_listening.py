"""The dashboard listens on all addresses that a browser may use for the page's name, or does not run."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from virtshim.dashboard import listening
from virtshim.dashboard.listening import listening_sockets
from virtshim.model.errors import WrongState


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Who has a port of the second address."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as one:
        yield one


def test_both_addresses_are_bound_to_one_port() -> None:
    first, second = listening_sockets(0)
    with first, second:
        assert first.getsockname() == ("127.0.0.1", first.getsockname()[1])
        assert second.getsockname()[:2] == ("::1", first.getsockname()[1])


def test_a_port_in_use_at_either_address_is_refused(stranger: socket.socket) -> None:
    with pytest.raises(WrongState, match="and ::1: Address already in use; choose another port with --port"):
        listening_sockets(stranger.getsockname()[1])
    with socket.create_server(("127.0.0.1", stranger.getsockname()[1])):  # it was given back
        pass


def test_a_free_port_is_free_at_both_addresses(stranger: socket.socket) -> None:
    taken = stranger.getsockname()[1]
    for one in listening_sockets(0, (taken, 0)):
        with one:
            assert one.getsockname()[1] != taken


def test_a_kernel_without_ipv6_has_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel here has it."""
    real = socket.socket

    def without(family: int, *more: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *more)

    monkeypatch.setattr(listening.socket, "socket", without)
    (one,) = listening_sockets(0)
    with one:
        assert one.getsockname()[0] == "127.0.0.1"
