"""Messages of the channel protocols are read whole and in pieces."""

from __future__ import annotations

import pytest

from virtshim.streaming.websocket import BadMessage, ChannelReader, Fragment, Piece, encode


def whole(data: bytes) -> Fragment:
    return Fragment(data, starts=True, ends=True)


def test_the_first_byte_is_the_channel():
    reader = ChannelReader(in_base64=False)
    assert reader.feed(whole(b"\x00hello")) == Piece(0, b"hello")
    assert reader.feed(whole(b"\x04")) is None
    assert reader.feed(whole(b"")) is None
    assert reader.feed(whole(b"\xff\x00")) == Piece(255, b"\x00")


def test_the_rest_of_a_long_message_is_of_the_same_channel():
    reader = ChannelReader(in_base64=False)
    assert reader.feed(Fragment(b"", starts=True, ends=False)) is None
    assert reader.feed(Fragment(b"\x00a", starts=False, ends=False)) == Piece(0, b"a")
    assert reader.feed(Fragment(b"\x01b", starts=False, ends=True)) == Piece(0, b"\x01b")


def test_base64_may_be_split_anywhere():
    text = encode(0, b"hello, guest!", in_base64=True)
    assert text == b"0aGVsbG8sIGd1ZXN0IQ=="
    for cut in range(len(text)):
        reader = ChannelReader(in_base64=True)
        pieces = [
            reader.feed(Fragment(text[:cut], starts=True, ends=False)),
            reader.feed(Fragment(text[cut:], starts=False, ends=True)),
        ]
        assert b"".join(piece.data for piece in pieces if piece) == b"hello, guest!"


@pytest.mark.parametrize("text", [b"xAAAA", b"0A", b"0!!!!", b"0AA=A", b"\xc3\xa4"])
def test_text_that_is_not_base64_is_a_bad_message(text):
    with pytest.raises(BadMessage):
        ChannelReader(in_base64=True).feed(whole(text))
