"""SPDY/3.1 frames are read and written as they are on the wire."""

from __future__ import annotations

import zlib

import pytest

from virtshim.streaming.spdy import frames
from virtshim.streaming.spdy.connection import DICTIONARY
from virtshim.streaming.spdy.frames import (
    DataPiece,
    Decoder,
    GoAway,
    GoAwayStatus,
    Ignored,
    Ping,
    RstStream,
    SpdyError,
    Status,
    SynStream,
)


def decoded(wire: bytes) -> list[frames.Frame]:
    return list(Decoder().feed(wire))


def test_the_dictionary_is_the_one_of_the_standard():
    assert (len(DICTIONARY), zlib.adler32(DICTIONARY)) == (1423, 0xE3C6A7C2)


@pytest.mark.parametrize(
    ("wire", "frame"),
    [
        ("80030006 00000004 00000001", Ping(1)),
        ("80030007 00000008 00000005 00000001", GoAway(5, 1)),
        ("80030003 00000008 80000003 00000005", RstStream(3, 5)),
        ("80030001 0100000c 00000001 00000000 e000 abcd", SynStream(1, b"\xab\xcd", True)),
        ("00000003 01000002 6869", DataPiece(3, b"hi", True)),
        ("00000003 00000000", DataPiece(3, b"", False)),
        ("80030004 00000004 00000000", Ignored(4)),
        ("80030009 00000008 00000001 00001000", Ignored(9)),
        ("80030fff 00000003 010203", Ignored(0xFFF)),
    ],
)
def test_each_kind_of_frame_is_read(wire: str, frame: frames.Frame):
    assert decoded(bytes.fromhex(wire)) == [frame]


def test_frames_are_read_the_same_in_one_piece_and_byte_by_byte():
    wire = bytes.fromhex("80030006 00000004 00000001 00000001 01000003 616263 80030007 00000008 00000001 00000000")
    decoder = Decoder()
    one_by_one = [frame for byte in wire for frame in decoder.feed(bytes([byte]))]
    pieces = [frame for frame in one_by_one if isinstance(frame, DataPiece)]
    assert b"".join(piece.data for piece in pieces) == b"abc"
    assert [piece.fin for piece in pieces] == [False, False, True]
    assert [frame for frame in one_by_one if frame not in pieces] == [Ping(1), GoAway(1, 0)]
    assert decoded(wire) == [Ping(1), DataPiece(1, b"abc", True), GoAway(1, 0)]


def test_a_data_frame_of_16_mib_is_passed_on_while_it_arrives():
    decoder = Decoder()
    assert list(decoder.feed(bytes.fromhex("00000001 01ffffff"))) == []
    piece, last = b"x" * (1 << 16), b"y" * ((1 << 16) - 1)
    for _ in range(255):
        assert list(decoder.feed(piece)) == [DataPiece(1, piece, False)]
    assert list(decoder.feed(last)) == [DataPiece(1, last, True)]


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        ("80020006 00000004 00000001", "version 2"),
        ("80030001 00100001", "1048577 bytes"),
        ("80030006 00000005 0000000100", "PING frame of 5 bytes"),
        ("80030001 00000009 000000010000000000", "SYN_STREAM frame of 9 bytes"),
        ("80030003 00000004 00000001", "RST_STREAM frame of 4 bytes"),
        ("80030002 00000002 0000", "SYN_REPLY frame of 2 bytes"),
    ],
)
def test_a_malformed_frame_is_one_kind_of_error(wire: str, says: str):
    with pytest.raises(SpdyError, match=says):
        decoded(bytes.fromhex(wire))


@pytest.mark.parametrize(
    ("wire", "written"),
    [
        ("00000003 01000002 6869", frames.data(3, b"hi", fin=True)),
        ("80030002 00000006 00000003 abcd", frames.syn_reply(3, b"\xab\xcd")),
        ("80030003 00000008 00000003 00000003", frames.rst_stream(3, Status.REFUSED_STREAM)),
        ("80030006 00000004 00000007", frames.ping(7)),
        ("80030007 00000008 00000009 00000001", frames.goaway(9, GoAwayStatus.PROTOCOL_ERROR)),
    ],
)
def test_each_kind_of_frame_is_written(wire: str, written: bytes):
    assert written == bytes.fromhex(wire)
