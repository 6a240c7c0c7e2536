"""Whatever a client sends, the streaming protocols answer with events or with their one error, quickly and bounded."""

from __future__ import annotations

import contextlib
import struct
import zlib

from fakes.examples import examples
from fakes.holding import bytes_held
from fakes.spdy import Reader, Writer, control, data, plain_block
from hypothesis import example, given, settings
from hypothesis import strategies as st

from virtshim.streaming.remotecommand import SizeReader
from virtshim.streaming.spdy.connection import DICTIONARY, HalfClosed, Opened, Received, Reset, SpdyConnection
from virtshim.streaming.spdy.frames import MAX_CONTROL_BYTES, SpdyError, Status
from virtshim.streaming.websocket import BadMessage, ChannelReader, Fragment, encode

MAX_STREAMS = 16

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20)
HEADERS = st.dictionaries(NAMES, st.text(max_size=30), max_size=5)
STREAMS = st.integers(0, 40)


UNFED_SERVER = bytes_held(SpdyConnection(MAX_STREAMS))


class Fed:
    """A server that gets input in pieces; its invariants are checked after each."""

    def __init__(self) -> None:
        self.server = SpdyConnection(MAX_STREAMS)
        self.open: set[int] = set()
        # Of which one half at least is open.
        self.known: set[int] = set()
        self.broken = False

    def feed(self, wire: bytes) -> None:
        try:
            events = self.server.receive(wire)
        except SpdyError:
            self.broken = True
            kinds = [frame[0] for frame in Reader().feed(self.server.output())]
            assert kinds.count(7) <= 1
            return
        for event in events:
            match event:
                case Opened(number, _):
                    assert number % 2 == 1
                    assert number not in self.open
                    self.open.add(number)
                    self.known.add(number)
                case Received(number, piece):
                    assert number in self.open
                    assert piece
                case HalfClosed(number):
                    assert number in self.open
                case Reset(number):
                    self.open.remove(number)
        self.known = set(filter(self.server.known, self.known))
        assert len(self.known) <= MAX_STREAMS
        # All that it answers are whole frames, about as many as came in.
        answers = self.server.output()
        assert bytes_held(self.server) <= UNFED_SERVER + MAX_CONTROL_BYTES + 8
        assert len(answers) <= 64 + 2 * len(wire)
        assert sum(1 for _ in Reader().feed(answers)) <= 2 + len(wire)


def in_pieces(wire: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(wire) + 1) for cut in cuts})
    return [wire[start:end] for start, end in zip([0, *at], [*at, len(wire)], strict=True)]


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=5))
@settings(max_examples=examples(300))
def test_no_bytes_break_a_spdy_connection(wire, cuts):
    fed = Fed()
    for piece in in_pieces(wire, cuts):
        fed.feed(piece)


random_control = st.builds(
    control,
    st.integers(0, 20),
    st.binary(max_size=60),
    st.integers(0, 255),
    st.sampled_from([3, 3, 3, 3, 2, 0x7FFF]),
)
random_data = st.builds(
    lambda stream, payload, fin: data(stream, payload, fin=fin), STREAMS, st.binary(max_size=50), st.booleans()
)


@given(st.lists(random_control | random_data, max_size=20), st.lists(st.integers(0, 4000), max_size=5))
@settings(max_examples=examples(300))
def test_no_frames_break_a_spdy_connection(frames, cuts):
    fed = Fed()
    for piece in in_pieces(b"".join(frames), cuts):
        fed.feed(piece)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), HEADERS, st.booleans()),
        st.tuples(st.just("data"), STREAMS, st.binary(max_size=200), st.booleans()),
        st.tuples(st.just("reset"), STREAMS),
        st.tuples(st.just("headers"), STREAMS, HEADERS),
        st.tuples(st.just("ping"), st.integers(0, 2**32 - 1)),
        st.tuples(st.just("answer"), STREAMS, st.binary(max_size=50), st.booleans()),
        st.tuples(st.just("our reset"), STREAMS),
    ),
    max_size=40,
)


def wire_of(client: Writer, step: tuple, number: int) -> bytes:
    match step:
        case ("open", headers, fin):
            return client.syn_stream(
                number, {k: v.encode("ascii", "replace").decode() for k, v in headers.items()}, fin=fin
            )
        case ("data", stream, payload, fin):
            return data(stream, payload, fin=fin)
        case ("reset", stream):
            return control(3, struct.pack(">II", stream, 5))
        case ("headers", stream, headers):
            return client.headers(stream, {k: v.encode("ascii", "replace").decode() for k, v in headers.items()})
        case ("ping", number):
            return control(6, struct.pack(">I", number))
    return b""


@given(steps)
@settings(max_examples=examples(200))
def test_any_sequence_of_client_and_server_actions(sequence):
    fed, client, number = Fed(), Writer(), -1
    for step in sequence:
        if fed.broken:
            break
        number += 2 * (step[0] == "open")
        if step[0] == "answer":
            fed.server.data(step[1], step[2], fin=step[3])
        elif step[0] == "our reset":
            fed.server.reset(step[1], Status.CANCEL)
            fed.open.discard(step[1])
        else:
            fed.feed(wire_of(client, step, number))


def valid_session() -> bytes:
    client = Writer()
    return (
        client.syn_stream(1, {"streamtype": "error"})
        + client.syn_stream(3, {"streamtype": "stdin"})
        + client.headers(3, {"a": "b"})
        + data(3, b"hello", fin=True)
        + control(6, struct.pack(">I", 1))
        + control(7, struct.pack(">II", 0, 0))
    )


SESSION = valid_session()


@given(st.lists(st.tuples(st.integers(0, len(SESSION) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=examples(400))
def test_a_valid_session_with_some_bytes_changed(changes):
    wire = bytearray(SESSION)
    for at, value in changes:
        wire[at] = value
    Fed().feed(bytes(wire))


@given(st.integers(0, 1 << 21), st.integers(0, 255))
@settings(max_examples=examples(25), deadline=None)
@example(1 << 20, 0)
@example((1 << 20) - 20, 65)
def test_header_blocks_of_any_size_and_content(size, filler):
    pack = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)
    block = pack.compress(plain_block({"a": ""})[:-4] + struct.pack(">I", size) + bytes([filler]) * size)
    block += pack.flush(zlib.Z_SYNC_FLUSH)
    if len(block) + 10 <= MAX_CONTROL_BYTES:
        Fed().feed(control(1, struct.pack(">IIBB", 1, 0, 0, 0) + block))


def test_ten_thousand_streams_are_opened_and_dropped_in_bounded_memory():
    fed, client = Fed(), Writer()
    for number in range(1, 20_001, 2):
        fed.feed(client.syn_stream(number, {"streamtype": "data", "port": "80", "requestid": str(number)}))
        if number % 3 == 0:
            fed.feed(control(3, struct.pack(">II", number, 5)))
    assert not fed.broken


@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=6), st.booleans(), st.integers(0, 9))
def test_channel_messages_are_independent_of_fragmentation(payload, cuts, in_base64, channel):
    pieces = in_pieces(encode(channel, payload, in_base64=in_base64), cuts)
    reader = ChannelReader(in_base64=in_base64)
    got = [reader.feed(Fragment(piece, starts=at == 0, ends=at == len(pieces) - 1)) for at, piece in enumerate(pieces)]
    assert b"".join(piece.data for piece in got if piece) == payload
    assert {piece.channel for piece in got if piece} <= {channel}


@given(st.lists(st.tuples(st.binary(max_size=50), st.booleans(), st.booleans()), max_size=10), st.booleans())
def test_no_channel_message_makes_the_reader_keep_many_bytes(fragments, in_base64):
    reader = ChannelReader(in_base64=in_base64)
    unfed = bytes_held(reader)
    with contextlib.suppress(BadMessage):
        for payload, starts, ends in fragments:
            reader.feed(Fragment(payload, starts, ends))
            assert bytes_held(reader) - unfed < 4


@given(
    st.lists(st.binary(max_size=100) | st.sampled_from([b'{"Width":', b"80", b'"Height":24}', b"{", b"}"]), max_size=20)
)
def test_no_terminal_size_makes_the_reader_keep_many_bytes(pieces):
    reader = SizeReader()
    unfed = bytes_held(reader)
    for piece in pieces:
        reader.feed(piece)
        assert bytes_held(reader) - unfed <= 4096
