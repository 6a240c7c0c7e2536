"""The streams of a SPDY connection keep their states and limits, and a client that breaks the rules gets an error."""

from __future__ import annotations

import struct
import zlib

import pytest
from fakes.spdy import (
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    SYN_REPLY,
    SYN_STREAM,
    WINDOW_UPDATE,
    Reader,
    Writer,
    control,
    data,
    plain_block,
)

from virtshim.streaming.spdy.connection import (
    DICTIONARY,
    MAX_BYTES,
    GoneAway,
    HalfClosed,
    Opened,
    Received,
    Reset,
    SpdyConnection,
)
from virtshim.streaming.spdy.frames import SpdyError, Status


@pytest.fixture
def server() -> SpdyConnection:
    return SpdyConnection(max_streams=3)


@pytest.fixture
def client() -> Writer:
    return Writer()


def sent(server: SpdyConnection) -> list[tuple]:
    """Frames that the server has sent, header blocks left out."""
    return [f if f[0] == "data" else (f[0], f[2][:8] if f[0] != SYN_REPLY else f[2][:4]) for f in output(server)]


def output(server: SpdyConnection) -> list[tuple]:
    return Reader().feed(server.output())


def numbers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def test_a_stream_is_opened_answered_and_closed_from_both_ends(server, client):
    assert server.receive(client.syn_stream(1, {"streamtype": "stdin"})) == [Opened(1, {"streamtype": "stdin"})]
    server.reply(1)
    assert server.receive(data(1, b"in", fin=True)) == [Received(1, b"in"), HalfClosed(1)]
    server.data(1, b"out", fin=True)
    assert sent(server) == [(SYN_REPLY, numbers(1)), ("data", 1, b"out", True)]
    assert not server.known(1)


def test_the_reply_carries_a_header_block_that_the_client_can_unpack(server, client):
    inflate = zlib.decompressobj(zdict=DICTIONARY)
    for stream in (1, 3):
        server.receive(client.syn_stream(stream, {"a": "b"}))
        server.reply(stream)
    for frame in output(server):
        assert inflate.decompress(frame[2][4:]) == numbers(0)


def test_a_stream_may_be_opened_half_closed(server, client):
    assert server.receive(client.syn_stream(1, {}, fin=True)) == [Opened(1, {}), HalfClosed(1)]
    assert server.writable(1)


def test_one_compression_context_serves_all_blocks(server, client):
    for stream in (1, 3, 5):
        (event,) = server.receive(client.syn_stream(stream, {"streamtype": "data", "port": "8080"}))
        assert event == Opened(stream, {"streamtype": "data", "port": "8080"})


def test_headers_frames_are_unpacked_so_that_later_headers_can_be_read(server, client):
    server.receive(client.syn_stream(1, {"a": "b"}))
    assert server.receive(client.headers(1, {"more": "later"})) == []
    assert server.receive(client.syn_stream(3, {"port": "80"})) == [Opened(3, {"port": "80"})]


def test_header_names_are_compared_in_lower_case(server, client):
    assert server.receive(client.syn_stream(1, {"StreamType": "Error"})) == [Opened(1, {"streamtype": "Error"})]


def test_a_clients_ping_is_echoed_and_an_even_ping_is_ignored(server):
    assert server.receive(control(PING, numbers(7)) + control(PING, numbers(8))) == []
    assert sent(server) == [(PING, numbers(7))]


def test_settings_window_updates_and_unknown_frames_are_ignored(server):
    wire = control(SETTINGS, numbers(0)) + control(WINDOW_UPDATE, numbers(0, 1)) + control(200, b"???")
    assert server.receive(wire) == []
    assert server.output() == b""


def test_a_reset_ends_the_stream_and_later_data_is_ignored(server, client):
    server.receive(client.syn_stream(1, {}))
    assert server.receive(control(RST_STREAM, numbers(1, 5))) == [Reset(1)]
    assert server.receive(data(1, b"late") + control(RST_STREAM, numbers(1, 5))) == []
    server.data(1, b"too late")
    server.reply(1)
    assert server.output() == b""


def test_data_after_the_end_resets_the_stream(server, client):
    server.receive(client.syn_stream(1, {}, fin=True))
    assert server.receive(data(1, b"more")) == [Reset(1)]
    assert sent(server) == [(RST_STREAM, numbers(1, Status.STREAM_ALREADY_CLOSED))]


def test_our_own_reset_is_sent_once(server, client):
    server.receive(client.syn_stream(1, {}))
    server.reset(1, Status.CANCEL)
    server.reset(1, Status.CANCEL)
    assert sent(server) == [(RST_STREAM, numbers(1, Status.CANCEL))]


def test_a_stream_beyond_the_limit_is_refused_until_another_ends(server, client):
    for stream in (1, 3, 5):
        assert len(server.receive(client.syn_stream(stream, {}))) == 1
    assert server.receive(client.syn_stream(7, {})) == []
    assert sent(server) == [(RST_STREAM, numbers(7, Status.REFUSED_STREAM))]
    server.receive(control(RST_STREAM, numbers(3, 5)))
    assert server.receive(client.syn_stream(9, {})) == [Opened(9, {})]


def test_after_goaway_new_streams_are_refused_and_old_ones_continue(server, client):
    server.receive(client.syn_stream(1, {}))
    server.goaway()
    server.goaway()
    assert server.receive(client.syn_stream(3, {}) + data(1, b"x")) == [Received(1, b"x")]
    assert sent(server) == [(GOAWAY, numbers(1, 0)), (RST_STREAM, numbers(3, Status.REFUSED_STREAM))]


def test_the_clients_goaway_is_reported(server):
    assert server.receive(control(GOAWAY, numbers(0, 0))) == [GoneAway()]


def block_of(plain: bytes) -> bytes:
    return control(SYN_STREAM, numbers(1, 0) + b"\0\0" + Writer().block(plain))


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (control(SYN_STREAM, numbers(2, 0) + b"\0\0" + Writer().block(plain_block({}))), "odd and rising"),
        (data(1, b"x"), "never opened"),
        (data(0, b"x"), "never opened"),
        (control(SYN_REPLY, numbers(1) + b""), "SYN_REPLY"),
        (control(PING, numbers(1), version=2), "version 2"),
        (control(SYN_STREAM, numbers(1, 0) + b"\0\0garbage"), "cannot be unpacked"),
        (control(HEADERS, numbers(1) + b"garbage"), "cannot be unpacked"),
        (block_of(numbers(101)), "101 headers"),
        (block_of(numbers(1)), "cut short"),
        (block_of(numbers(1, 0xFFFFFFFF)), "cut short"),
        (block_of(numbers(1, 1) + b"a" + numbers(9) + b"b"), "cut short"),
        (block_of(numbers(1, 0, 0)), "without a name"),
        (block_of(plain_block({"a": "1", "A": "2"})), "twice"),
        (block_of(plain_block({"a": "1"}) + b"!"), "trailing bytes"),
        (block_of(plain_block({"a": "x" * MAX_BYTES})), "more than 8192"),
    ],
)
def test_a_broken_rule_is_one_error_one_goaway_and_the_end(server, client, wire, says):
    with pytest.raises(SpdyError, match=says):
        server.receive(wire)
    assert sent(server)[-1][0] == GOAWAY
    assert sent(server) == []
    with pytest.raises(SpdyError):
        server.receive(b"")


def test_stream_ids_must_increase(server, client):
    server.receive(client.syn_stream(5, {}))
    with pytest.raises(SpdyError, match="odd and rising"):
        server.receive(client.syn_stream(3, {}))


def test_a_hundred_headers_are_allowed(server, client):
    headers = {"streamtype": "data", **{f"name-{number}": "value" for number in range(99)}}
    assert server.receive(client.syn_stream(1, headers)) == [Opened(1, {"streamtype": "data"})]


def test_unused_headers_are_not_kept(client):
    """Large ones cost a client next to nothing: they are sent compressed."""
    server = SpdyConnection(max_streams=1000)
    junk = {"streamtype": "error", "port": "80", "junk": "x" * (MAX_BYTES - 100)}
    wire = b"".join(client.syn_stream(2 * number + 1, junk) for number in range(32))
    assert len(wire) < 64 << 10
    kept = [event.headers for event in server.receive(wire)]
    assert kept == [{"streamtype": "error", "port": "80"}] * 32


@pytest.mark.parametrize("name", ["streamtype", "port", "requestid"])
def test_a_stream_with_an_endless_name_is_refused(server, client, name):
    assert server.receive(client.syn_stream(1, {name: "1" * 257})) == []
    assert sent(server) == [(RST_STREAM, numbers(1, Status.REFUSED_STREAM))]
    assert server.receive(client.syn_stream(3, {name: "1" * 256})) == [Opened(3, {name: "1" * 256})]


def test_a_zip_bomb_is_never_unpacked():
    """It is refused after the first megabyte: what comes after that, and cannot be unpacked, is not looked at."""
    bomb = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)
    block = bomb.compress(bytes(1 << 20)) + bomb.flush(zlib.Z_SYNC_FLUSH) + b"\xff" * (100 << 10)
    with pytest.raises(SpdyError, match="more than"):
        SpdyConnection(max_streams=8).receive(control(SYN_STREAM, numbers(1, 0) + b"\0\0" + block))
