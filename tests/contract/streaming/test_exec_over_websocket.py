"""Exec and attach work over WebSocket with channel numbers, as client libraries request them."""

from __future__ import annotations

import json

import pytest
from fakes.sessions import FakeSession
from fakes.ws import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, WsClient, asked, websocket

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)


async def five(session: FakeSession) -> int:
    await session.out(b"out")
    await session.err(b"err")
    return 5


def test_the_first_message_is_empty_and_signals_readiness(node):
    assert websocket(node.exec()).message() == (STDOUT, b"")
    assert websocket(node.exec(stderr=True)).message() == (STDERR, b"")
    assert websocket(node.exec(stdin=True)).message() == (ERROR, b"")


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
def test_output_is_sorted_by_channel_and_the_exit_code_comes_last(node, protocol):
    node.sessions.script = five
    client = websocket(node.exec(stdout=True, stderr=True), protocol)
    got = client.all_until_close()
    assert (got[STDOUT], got[STDERR]) == (b"out", b"err")
    assert json.loads(got[ERROR])["details"]["causes"] == [{"reason": "ExitCode", "message": "5"}]
    assert client.close_code == 1000


@pytest.mark.parametrize("protocol", ["channel.k8s.io", None])
def test_the_oldest_protocol_reports_the_end_as_text(node, protocol):
    node.sessions.script = five
    got = websocket(node.exec(stdout=True, stderr=True), protocol).all_until_close()
    assert got[ERROR] == b"command terminated with exit code 5"


def test_input_is_echoed_and_v5_closes_it(node):
    client = websocket(node.exec(stdin=True, stdout=True), "v5.channel.k8s.io")
    client.send(STDIN, b"hello")
    assert [client.message() for _ in range(2)] == [(STDOUT, b""), (STDOUT, b"hello")]
    client.send(255, bytes([STDIN]))
    assert json.loads(client.all_until_close()[ERROR])["status"] == "Success"


@pytest.mark.parametrize("protocol", ["v4.base64.channel.k8s.io", "base64.channel.k8s.io"])
def test_base64_protocols_use_text_messages(node, protocol):
    client = websocket(node.exec(stdin=True, stdout=True), protocol)
    assert client.message_base64() == (STDOUT, b"")
    client.send_base64(STDIN, b"\x00\xff binary")
    assert client.message_base64() == (STDOUT, b"\x00\xff binary")


def test_a_message_may_come_in_fragments_with_a_ping_between(node):
    client = websocket(node.exec(stdin=True, stdout=True))
    client.message()
    client.frame(BINARY, b"", fin=False)
    client.frame(CONTINUATION, b"\x00he", fin=False)
    client.frame(PING, b"are you there")
    client.frame(CONTINUATION, b"llo", fin=True)
    seen, got, pongs = b"", [], []
    while seen != b"hello":
        opcode, payload = client.next()
        got.append(opcode)
        if opcode == PONG:
            pongs.append(payload)
        else:
            seen += payload[1:]
    assert pongs == [b"are you there"]


def test_a_message_of_many_megabytes_uses_bounded_memory(node):
    total = 0

    async def count(session: FakeSession) -> int:
        nonlocal total
        while total < 20 << 20:
            piece = await session.stdin.get()
            assert len(piece) <= 1 << 20, "a long message must come through in pieces"
            total += len(piece)
        return 0

    node.sessions.script = count
    client = websocket(node.exec(stdin=True, stdout=True))
    client.frame(BINARY, b"\x00" + b"x" * (20 << 20))
    assert json.loads(client.all_until_close()[ERROR])["status"] == "Success"
    assert total == 20 << 20


def test_the_terminal_size_arrives_on_the_resize_channel(node):
    async def size(session: FakeSession) -> int:
        width, height = await session.sizes.get()
        await session.out(f"{width}x{height}".encode())
        return 0

    node.sessions.script = size
    client = websocket(node.exec(stdin=True, stdout=True, tty=True))
    client.send(RESIZE, b'{"Width":100,"Height":30}')
    assert client.all_until_close()[STDOUT] == b"100x30"


def test_input_that_was_not_requested_is_discarded(node):
    client = websocket(node.exec(stdout=True))
    client.send(STDIN, b"x" * 100_000)
    client.send(9, b"?")
    assert json.loads(client.all_until_close()[ERROR])["status"] == "Success", "cat reads the end at once"


@pytest.mark.parametrize(
    ("opcode", "payload", "options"),
    [
        (BINARY, b"\x00x", {"masked": False}),
        (3, b"", {}),
        (TEXT, b"\xff\xff", {}),
        (PING, b"x" * 126, {}),
        (CONTINUATION, b"\x00x", {}),
    ],
)
def test_a_broken_frame_ends_the_connection(node, opcode, payload, options):
    client = websocket(node.exec())
    client.message()
    client.frame(opcode, payload, **options)
    closes(client)


def test_invalid_base64_ends_the_connection(node):
    client = websocket(node.exec(), "v4.base64.channel.k8s.io")
    client.frame(TEXT, b"0!!!!")
    closes(client)


def closes(client: WsClient) -> None:
    opcode = BINARY
    while opcode != CLOSE:
        opcode, _ = client.next()
    assert client.close_code in (1002, 1007)
    with pytest.raises(EOFError):
        client.next()


def test_the_server_answers_the_clients_close_frame(node):
    client = websocket(node.exec())
    client.message()
    client.close(1001)
    assert client.next()[0] == CLOSE


def test_a_request_without_a_common_subprotocol_is_refused(node):
    _, head, _ = asked(node.exec(), "v99.channel.k8s.io")
    assert head.startswith("HTTP/1.1 403 ")


@pytest.mark.parametrize("key", ["", "short", "!" * 24, "QUJD"])
def test_a_wrong_key_is_refused(node, key):
    _, head, _ = asked(node.exec(), "v4.channel.k8s.io", key=key)
    assert head.startswith("HTTP/1.1 400 ")


def test_a_websocket_by_post_is_refused(node):
    _, head, _ = asked(node.exec(), "v4.channel.k8s.io", method="POST")
    assert head.startswith("HTTP/1.1 400 ")
