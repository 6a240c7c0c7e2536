"""A client with a token that sends nonsense ends its own session only."""

from __future__ import annotations

import random

import pytest
from fakes.spdy import Writer, control, data, spdy
from fakes.ws import BINARY, WsClient, websocket

TUNNEL = "SPDY/3.1+portforward.k8s.io"


def noise(seed: int) -> bytes:
    """Random bytes, or a valid session with some bytes changed."""
    chance = random.Random(seed)
    if seed % 2:
        return chance.randbytes(chance.randrange(1, 5000))
    client = Writer()
    names = ("error", "stdin", "stdout", "stderr")
    wire = bytearray(b"".join(client.syn_stream(2 * n + 1, {"streamtype": name}) for n, name in enumerate(names)))
    wire += data(3, chance.randbytes(500), fin=True) + control(6, b"\0\0\0\1") * 3
    for _ in range(chance.randrange(4)):
        wire[chance.randrange(len(wire))] = chance.randrange(256)
    return bytes(wire)


def over_spdy(node, wire: bytes) -> None:
    spdy(node.exec()).send(wire)


def over_spdy_forward(node, wire: bytes) -> None:
    spdy(node.forward(), "portforward.k8s.io").send(wire)


def over_websocket(node, wire: bytes) -> None:
    websocket(node.exec()).sock.sendall(wire)


def over_websocket_messages(node, wire: bytes) -> None:
    client: WsClient = websocket(node.exec(), "v5.channel.k8s.io")
    for at in range(0, len(wire), 100):
        client.frame(BINARY, wire[at : at + 100])


def over_tunnel(node, wire: bytes) -> None:
    websocket(node.forward(), TUNNEL).frame(BINARY, wire)


@pytest.mark.parametrize("send", [over_spdy, over_spdy_forward, over_websocket, over_websocket_messages, over_tunnel])
def test_random_input_breaks_only_its_own_session(node, caplog, capsys, send):
    neighbour = spdy(node.exec(stdin=True, stdout=True))
    streams = {name: neighbour.open(streamtype=name) for name in ("error", "stdin", "stdout")}
    for seed in range(40):
        send(node, noise(seed))
    neighbour.write(streams["stdin"], b"still here", fin=True)
    assert neighbour.read_all(streams["stdout"]) == b"still here"
    assert "crashed" not in capsys.readouterr().out + caplog.text
