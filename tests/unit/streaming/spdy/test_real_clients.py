"""The SPDY server understands recorded bytes of crictl, whose client side is Kubernetes' own Go library."""

from __future__ import annotations

from virtshim.streaming.spdy.connection import Opened, Received, Reset, SpdyConnection

# `crictl exec CONTAINER CMD`: the three streams, headers compressed in one context.
EXEC = """
80030001000000290000000100000000000078f9e3c6a7c26260606004a7b392a2d4c45c6851c29a0a0a6800000000ffff80
0300010000001900000003000000000000c22ac5565c92925f5a02000000ffff800300010000001500000005000000000000
c229975a5404000000ffff
"""

# `crictl exec -it CONTAINER CMD` in a terminal of 101 x 33, "typed" and Enter, then the command ended.
EXEC_IN_A_TERMINAL = """
80030001000000290000000100000000000078f9e3c6a7c26260606004a7b392a2d4c45c6851c29a0a0a6800000000ffff80
0300010000001700000003000000000000c22e555c92929907000000ffff800300010000001900000005000000000000c22a
c5565c92925f5a02000000ffff800300010000001800000007000000000000c22e57945a9c59950a000000ffff0000000700
00001a7b225769647468223a3130312c22486569676874223a33337d0a000000030000000674797065640d80030003000000
0800000001000000058003000300000008000000030000000580030003000000080000000500000005
"""


def test_the_streams_of_a_plain_exec_are_understood():
    assert SpdyConnection(max_streams=8).receive(bytes.fromhex(EXEC)) == [
        Opened(1, {"streamtype": "error"}),
        Opened(3, {"streamtype": "stdout"}),
        Opened(5, {"streamtype": "stderr"}),
    ]


def test_an_exec_in_a_terminal_is_understood_byte_by_byte():
    server = SpdyConnection(max_streams=8)
    events = [event for byte in bytes.fromhex(EXEC_IN_A_TERMINAL) for event in server.receive(bytes([byte]))]
    opened = [event for event in events if isinstance(event, Opened)]
    assert [event.headers["streamtype"] for event in opened] == ["error", "stdin", "stdout", "resize"]
    assert received(events, 7) == b'{"Width":101,"Height":33}\n'
    assert received(events, 3) == b"typed\r"
    assert [event.stream for event in events if isinstance(event, Reset)] == [1, 3, 5]


def received(events: list, stream: int) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Received) and event.stream == stream)
