"""The small texts of the protocols: results, terminal sizes, channel messages."""

from __future__ import annotations

import json

import pytest

from virtshim.streaming.channel_messages import BadMessage, ChannelReader, Piece, encode
from virtshim.streaming.remotecommand.status import Exited, Failed, as_status, as_text, from_status
from virtshim.streaming.remotecommand.terminal_size import Size, SizeReader
from virtshim.streaming.websocket import Fragment


def test_success_is_told_as_kubernetes_tells_it():
    assert json.loads(as_status(Exited(0))) == {"metadata": {}, "status": "Success"}
    assert as_text(Exited(0)) == b""


@pytest.mark.parametrize("code", [1, 137, 255])
def test_an_exit_code_is_a_number_in_a_cause(code):
    status = json.loads(as_status(Exited(code)))
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": str(code)}]
    assert str(code) in as_text(Exited(code)).decode()


def test_a_failure_has_its_message_and_no_end_of_it():
    assert json.loads(as_status(Failed("no agent")))["message"] == "no agent"
    assert len(as_status(Failed("x" * 1_000_000))) < 40_000
    assert len(as_text(Failed("\ud800" + "x" * 1_000_000))) < 40_000


def test_sizes_come_one_after_another_and_the_newest_counts():
    reader = SizeReader()
    assert reader.feed(b'{"Width":80,"Height":24}\n{"Width":90,"Height":30}') == Size(90, 30)
    assert reader.feed(b"\n") is None


def test_a_size_may_come_in_pieces():
    reader = SizeReader()
    assert [reader.feed(bytes([byte])) for byte in b'{"Width":1,"Height":2}'][-1] == Size(1, 2)


@pytest.mark.parametrize(
    "nonsense",
    [
        *(
            b"nonsense",
            b"[1,2]",
            b'{"Width":"80","Height":24}',
            b'{"Width":0,"Height":0}',
            b'{"Width":80}',
            b"\xff\xfe",
        ),
        *(b'{"Width":70000,"Height":24}', b"[" * 5000, b"{" * 5000, b'{"Width":1e999,"Height":1}', b"null", b"1"),
    ],
)
def test_a_wrong_size_is_thrown_away_and_the_next_one_counts(nonsense):
    reader = SizeReader()
    assert reader.feed(nonsense) is None
    assert Size(80, 24) in [reader.feed(b'{"Width":80,"Height":24}') for _ in range(2)]


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


def test_base64_may_be_cut_anywhere():
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
def test_what_is_not_base64_is_one_kind_of_error(text):
    with pytest.raises(BadMessage):
        ChannelReader(in_base64=True).feed(whole(text))


@pytest.mark.parametrize("outcome", [Exited(0), Exited(1), Exited(255), Failed("no agent")])
def test_a_client_reads_the_end_as_it_was_told(outcome):
    assert from_status(as_status(outcome)) == outcome


@pytest.mark.parametrize("told", [b"\xff", b"[]", b"{}", b'{"status":"Failure","details":[]}'])
def test_an_end_told_in_nonsense_is_a_failure(told):
    assert "unreadable" in from_status(told).message
