"""Two nodes exchange messages, errors and files over a real connection."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fakes.node_certificates import ClusterCa

from virtshim.model.errors import (
    Aborted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
)
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.peers.server import PeerServer, by_operation
from virtshim.system.live import Live

pytestmark = pytest.mark.outlive

Serve = Callable[..., PeerClient]
MIB = 1 << 20
WAIT = 30.0


@contextmanager
def a_file(content: bytes = b"") -> Iterator[int]:
    descriptor = os.memfd_create("file")
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, 64 * MIB, 0)


def test_nodes_exchange_messages_and_know_each_other_by_their_certificates(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        link.send({"peer": link.peer, "said": link.receive(WAIT)}, WAIT)

    with serve(handle).connect("two", WAIT) as link:
        link.send({"text": "grüße", "numbers": [1, 2.5, None]}, WAIT)
        assert link.receive(WAIT) == {"peer": "one", "said": {"text": "grüße", "numbers": [1, 2.5, None]}}
        assert link.peer == "two"


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 7])
def test_a_file_arrives_whole_in_both_directions(serve: Serve, size: int) -> None:
    content = os.urandom(size)

    def handle(link: PeerLink) -> None:
        with a_file() as kept:
            assert link.receive_file(kept, size, WAIT) == size
            os.lseek(kept, 0, os.SEEK_SET)
            assert link.send_file(kept, WAIT) == size

    with serve(handle).connect("two", WAIT) as link, a_file(content) as source, a_file() as sink:
        assert link.send_file(source, WAIT) == size
        assert link.receive_file(sink, size, WAIT) == size
        assert content_of(sink) == content


def test_a_stream_passes_from_pipe_to_pipe_at_their_own_pace(serve: Serve) -> None:
    """The receiver's pipe holds less than a chunk, and its mode is as it was."""
    content = os.urandom(3 * MIB)
    modes: list[bool] = []

    def handle(link: PeerLink) -> None:
        modes.append(os.get_blocking(sink))
        link.receive_file(sink, len(content), WAIT)
        modes.append(os.get_blocking(sink))
        os.close(sink)

    def write() -> None:
        with open(into, "wb") as file:
            file.write(content)

    def read() -> None:
        with open(out, "rb") as file:
            arrived.extend(file.read())

    source, into = os.pipe()
    out, sink = os.pipe()
    arrived = bytearray()
    threads = [threading.Thread(target=one) for one in (write, read)]
    with serve(handle).connect("two", WAIT) as link:
        for one in threads:
            one.start()
        assert link.send_file(source, WAIT) == len(content)
        for one in threads:
            one.join(WAIT)
    os.close(source)
    assert (arrived == content, modes) == (True, [True, True])


def test_a_message_follows_a_file(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        with a_file(b"x" * 10) as source:
            link.send_file(source, WAIT)
        link.send({"then": 1}, WAIT)

    with serve(handle).connect("two", WAIT) as link, a_file() as sink:
        assert link.receive_file(sink, 10, WAIT) == 10
        assert link.receive(WAIT) == {"then": 1}


def test_nothing_beyond_the_agreed_size_is_written(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        with a_file(os.urandom(2 * MIB)) as source:
            link.send_file(source, WAIT)

    with serve(handle).connect("two", WAIT) as link, a_file() as sink:
        with pytest.raises(InvalidRequest, match=f"^node two: sent a file of more than {MIB} bytes"):
            link.receive_file(sink, MIB, WAIT)
        assert len(content_of(sink)) == MIB


@pytest.mark.parametrize("cut", [0, 1, MIB])
def test_a_cut_stream_is_an_error_and_never_the_end_of_a_file(serve: Serve, cut: int) -> None:
    def handle(link: PeerLink) -> None:
        out, into = os.pipe()
        os.write(into, b"x" * min(cut, 1000))
        with pytest.raises(DeadlineExceeded, match=r"^there was nothing to send to node one for 0\.2 s$"):
            link.send_file(out, 0.2)
        os.close(out)
        os.close(into)

    with (
        serve(handle).connect("two", WAIT) as link,
        a_file() as sink,
        pytest.raises(Unavailable, match=r"^node two: closed the connection"),
    ):
        link.receive_file(sink, 10 * MIB, WAIT)


@pytest.mark.parametrize(
    "error", [Aborted("a"), ResourceExhausted("the disk is full"), PermissionRefused("no"), InvalidRequest("do: ä")]
)
def test_an_error_of_the_other_node_arrives_with_its_class_and_its_name(serve: Serve, error: ShimError) -> None:
    def handle(link: PeerLink) -> None:
        raise error

    with serve(handle).connect("two", WAIT) as link, pytest.raises(type(error)) as caught:
        link.receive(WAIT)
    assert type(caught.value) is type(error)
    assert str(caught.value) == f"node two: {error}"


def test_an_unexpected_exception_is_told_without_its_text(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        raise RuntimeError("secret")

    with serve(handle).connect("two", WAIT) as link, pytest.raises(InternalError, match="node two: an internal error"):
        link.receive(WAIT)


def test_a_sender_hears_in_the_middle_of_a_file_that_it_is_refused(serve: Serve) -> None:
    """The refusing node reads no more, and still its error arrives instead of a reset connection."""

    def handle(link: PeerLink) -> None:
        with a_file() as sink:
            link.receive_file(sink, 3 * MIB, WAIT)

    with (
        serve(handle).connect("two", WAIT) as link,
        open("/dev/zero", "rb") as endless,
        pytest.raises(InvalidRequest, match=r"node two: node one: sent a file of more than 3145728 bytes"),
    ):
        link.send_file(endless.fileno(), WAIT)


def test_a_receiver_hears_why_the_sender_stopped(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        with open("/proc/self/mem", "rb") as unreadable:
            link.send_file(unreadable.fileno(), WAIT)

    with (
        serve(handle).connect("two", WAIT) as link,
        a_file() as sink,
        pytest.raises(InternalError, match="node two: what node one is to receive cannot be read: Input/output error"),
    ):
        link.receive_file(sink, MIB, WAIT)


def test_a_full_disk_is_resource_exhausted_on_both_sides(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        sink = os.open("/dev/full", os.O_WRONLY)
        try:
            link.receive_file(sink, MIB, WAIT)
        finally:
            os.close(sink)

    with (
        serve(handle).connect("two", WAIT) as link,
        open("/dev/zero", "rb") as endless,
        pytest.raises(ResourceExhausted, match="node two: what node one sends cannot be written: No space left"),
    ):
        link.send_file(endless.fileno(), WAIT)


def test_a_sink_that_takes_nothing_ends_the_transfer(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        with open("/dev/zero", "rb") as endless:
            link.send_file(endless.fileno(), WAIT)

    out, into = os.pipe()
    with (
        serve(handle).connect("two", WAIT) as link,
        pytest.raises(DeadlineExceeded, match=r"^what node two sends was not taken for 0\.2 s$"),
    ):
        link.receive_file(into, MIB, 0.2)
    os.close(out)
    os.close(into)


def test_a_silent_node_is_not_waited_for_longer_than_asked(serve: Serve) -> None:
    may_end = threading.Event()
    with serve(lambda _: may_end.wait(WAIT)).connect("two", WAIT) as link:
        with pytest.raises(Unavailable, match=r"^node two: is too slow"):
            link.receive(0.1)
        may_end.set()


def test_a_node_that_does_not_read_is_not_waited_for_longer_than_asked(serve: Serve) -> None:
    may_end = threading.Event()
    with (
        serve(lambda _: may_end.wait(WAIT)).connect("two", WAIT) as link,
        open("/dev/zero", "rb") as endless,
    ):
        with pytest.raises(Unavailable, match=r"^node two: is too slow"):
            link.send_file(endless.fileno(), 0.2)
        link.refuse(Aborted("never in the middle of a chunk"))
        may_end.set()


def test_a_message_that_is_too_long_is_not_sent(serve: Serve) -> None:
    def handle(link: PeerLink) -> None:
        link.send(link.receive(WAIT), WAIT)

    with serve(handle).connect("two", WAIT) as link:
        with pytest.raises(InvalidRequest, match="too long for another node"):
            link.send({"text": "x" * MIB}, WAIT)
        link.send({"short": 1}, WAIT)
        assert link.receive(WAIT) == {"short": 1}


def test_the_first_message_chooses_the_operation(serve: Serve) -> None:
    def look(link: PeerLink, asked: dict[str, object]) -> None:
        link.send({"seen": asked}, WAIT)

    client = serve(by_operation({"look": look, "move": look}))
    with client.connect("two", WAIT) as link:
        link.send({"do": "look", "vm": "db"}, WAIT)
        assert link.receive(WAIT) == {"seen": {"do": "look", "vm": "db"}}
    for first in ({"do": "leave"}, {"do": ["look"]}, {}):
        with client.connect("two", WAIT) as link:
            link.send(first, WAIT)
            with pytest.raises(InvalidRequest, match=r"do: there is no operation .*; this node knows look, move"):
                link.receive(WAIT)


def test_a_node_that_is_down_is_unavailable_with_its_address_and_the_remedy(serve: Serve) -> None:
    client = serve(lambda _: None)
    with (
        pytest.raises(
            Unavailable, match=r"node no\.invalid: no\.invalid port 10017 cannot be reached: .*peers\.addresses"
        ),
        client.connect("no.invalid", WAIT),
    ):
        pass


@pytest.mark.parametrize("name", ["", "Two", "a b", "../x", "a" * 254, "two:1", "-a"])
def test_what_is_no_name_of_a_node_is_not_looked_up(serve: Serve, name: str) -> None:
    client = serve(lambda _: None)
    with pytest.raises(InvalidRequest, match="is not the name of a node"), client.connect(name, WAIT):
        pass


def test_closing_the_server_cuts_its_connections(ca: ClusterCa) -> None:
    told: queue.SimpleQueue[ShimError] = queue.SimpleQueue()

    def handle(link: PeerLink) -> None:
        with pytest.raises(ShimError) as caught:
            link.receive(WAIT)
        told.put(caught.value)

    server = PeerServer("127.0.0.1:0", ca.node("two"), handle)
    server.start()
    client = PeerClient(ca.node("one"), Live({"two": f"127.0.0.1:{server.port}"}))
    with client.connect("two", WAIT) as link:
        server.close()
        assert isinstance(told.get(timeout=WAIT), Unavailable)
        with pytest.raises(Unavailable, match="node two: closed the connection"):
            link.receive(WAIT)
    server.close()
