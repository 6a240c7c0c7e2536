"""Exec and attach work over SPDY/3.1, as kubelet, crictl and critest request them."""

from __future__ import annotations

import json
import threading

import pytest
from fakes.sessions import FakeSession
from fakes.spdy import PING, SpdyClient, connected, control, spdy
from fakes.streamnode import CONTAINER
from podclient import wait_until

from virtshim.model.errors import Unavailable
from virtshim.streaming.ports import Streams


def open_streams(client: SpdyClient, *names: str) -> dict[str, int]:
    """In the order of real clients: error first."""
    streams = {name: client.open(streamtype=name) for name in ("error", *names)}
    client.until(lambda: client.replied >= set(streams.values()))
    return streams


def result(client: SpdyClient, streams: dict[str, int]) -> dict:
    return json.loads(client.read_all(streams["error"]))


def test_input_output_and_success_are_transmitted(node):
    client = spdy(node.exec())
    streams = open_streams(client, "stdin", "stdout", "stderr")
    client.write(streams["stdin"], b"hello ")
    client.write(streams["stdin"], b"guest", fin=True)
    assert client.read_all(streams["stdout"]) == b"hello guest"
    assert client.read_all(streams["stderr"]) == b""
    assert result(client, streams) == {"metadata": {}, "status": "Success"}
    assert client.goaway == 0


def test_the_status_has_the_exit_code_as_a_cause(node):
    async def fails(session: FakeSession) -> int:
        await session.err(b"no such file\n")
        return 7

    node.sessions.script = fails
    client = spdy(node.exec(stdout=True, stderr=True))
    streams = open_streams(client, "stdout", "stderr")
    assert client.read_all(streams["stderr"]) == b"no such file\n"
    status = result(client, streams)
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]


@pytest.mark.parametrize("protocol", ["v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io", None])
def test_old_protocols_report_the_end_as_text(node, protocol):
    async def fails(session: FakeSession) -> int:
        return 3

    client = spdy(node.exec(stdout=True), protocol)
    streams = open_streams(client, "stdout")
    assert client.read_all(streams["error"]) == b""
    node.sessions.script = fails
    client = spdy(node.exec(stdout=True), protocol)
    streams = open_streams(client, "stdout")
    assert client.read_all(streams["error"]) == b"command terminated with exit code 3"


def test_old_protocols_report_nothing_if_the_command_succeeds(node):
    async def well(session: FakeSession) -> int:
        return 0

    node.sessions.script = well
    client = spdy(node.exec(stdout=True), "v2.channel.k8s.io")
    streams = open_streams(client, "stdout")
    assert client.read_all(streams["error"]) == b""


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ("v5.channel.k8s.io, v4.channel.k8s.io", "v5.channel.k8s.io"),
        ("v4.channel.k8s.io,v3.channel.k8s.io", "v4.channel.k8s.io"),
        ("v9.channel.k8s.io\r\nX-Stream-Protocol-Version: channel.k8s.io", "channel.k8s.io"),
    ],
)
def test_the_first_common_protocol_in_the_clients_order_is_chosen(node, offered, chosen):
    sock, head = connected(node.exec(), offered)
    sock.close()
    assert head.startswith("HTTP/1.1 101 ")
    assert f"x-stream-protocol-version: {chosen}\r\n" in head.lower()
    assert "upgrade: spdy/3.1\r\n" in head.lower()


def test_a_request_without_a_common_protocol_is_refused_with_the_supported_ones(node):
    sock, head = connected(node.exec(), "v99.channel.k8s.io")
    sock.close()
    assert head.startswith("HTTP/1.1 403 ")
    assert "x-accepted-stream-protocol-versions: v4.channel.k8s.io\r\n" in head.lower()


def test_the_terminal_size_reaches_the_session_even_in_fragments(node):
    async def sizes(session: FakeSession) -> int:
        for _ in range(2):
            width, height = await session.sizes.get()
            await session.out(f"{width}x{height} ".encode())
        return 0

    node.sessions.script = sizes
    client = spdy(node.exec(stdin=True, stdout=True, tty=True))
    streams = open_streams(client, "stdin", "stdout", "resize")
    client.write(streams["resize"], b'{"Width":80,"Hei')
    client.write(streams["resize"], b'ght":24}\n')
    client.until(lambda: b"80x24" in client.received[streams["stdout"]])
    client.write(streams["resize"], b'nonsense{"Width":132,"Height":50}\n{"Width":132,"Height":50}\n')
    client.write(streams["resize"], b'{"Width":132,"Height":50}\n')
    assert client.read_all(streams["stdout"]).split()[1] == b"132x50"


def test_a_session_that_cannot_start_reports_the_reason(node):
    node.sessions.refuse = Unavailable("no guest agent answers in container abc")
    client = spdy(node.exec(stdout=True))
    streams = open_streams(client, "stdout")
    status = result(client, streams)
    assert (status["status"], status["reason"]) == ("Failure", "InternalError")
    assert status["message"] == "no guest agent answers in container abc"


def test_a_crash_of_the_server_is_reported_without_details(node):
    node.sessions.refuse = KeyError("secret")
    client = spdy(node.exec(stdout=True))
    streams = open_streams(client, "stdout")
    assert "secret" not in str(result(client, streams))


def test_a_broken_session_reports_the_reason_after_its_output(node):
    async def breaks(session: FakeSession) -> int:
        await session.out(b"so far")
        raise Unavailable("the guest agent is gone")

    node.sessions.script = breaks
    client = spdy(node.exec(stdout=True))
    streams = open_streams(client, "stdout")
    assert client.read_all(streams["stdout"]) == b"so far"
    assert result(client, streams)["message"] == "the guest agent is gone"


def test_a_client_that_leaves_ends_its_session(node):
    client = spdy(node.exec())
    open_streams(client, "stdin", "stdout", "stderr")
    session = session_of(node)
    client.leave()
    wait_until(session.closed.is_set, 10, "its session is closed")


def session_of(node) -> FakeSession:
    for _ in range(1000):
        if node.sessions.started:
            return node.sessions.started[0]
        threading.Event().wait(0.01)
    raise AssertionError("no session was started")


def test_pings_are_answered_while_a_command_runs(node):
    client = spdy(node.exec())
    open_streams(client, "stdin", "stdout", "stderr")
    client.send(control(PING, (7).to_bytes(4, "big")))
    client.until(lambda: client.pongs == [7])


def test_a_stream_that_was_not_requested_is_refused(node):
    client = spdy(node.exec(stdout=True))
    wrong = [client.open(streamtype=name) for name in ("stdin", "bogus")] + [client.open()]
    client.until(lambda: client.reset.keys() == set(wrong))
    streams = open_streams(client, "stdout")
    again = client.open(streamtype="stdout")
    client.until(lambda: again in client.reset)
    assert streams["stdout"] not in client.reset


def test_a_client_that_does_not_open_its_streams_gets_an_error(make_node):
    node = make_node(streams=0.3)
    client = spdy(node.exec())
    streams = open_streams(client, "stdin", "stdout")
    assert "did not open its streams" in result(client, streams)["message"]
    assert node.sessions.started == []


def test_attach_gets_the_console(node):
    client = spdy(node.attach())
    streams = open_streams(client, "stdin", "stdout")
    client.write(streams["stdin"], b"ls\n")
    client.until(lambda: client.received[streams["stdout"]] == b"ls\n")
    assert node.sessions.requests[0].container == CONTAINER
    assert node.sessions.requests[0].streams == Streams(stdin=True, stdout=True)


def test_ten_megabytes_go_both_ways_unchanged(node):
    client = spdy(node.exec())
    streams = open_streams(client, "stdin", "stdout", "stderr")
    payload = bytes(range(256)) * (10 << 12)

    def feed() -> None:
        for at in range(0, len(payload), 50_000):
            client.write(streams["stdin"], payload[at : at + 50_000])
        client.write(streams["stdin"], b"", fin=True)

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert client.read_all(streams["stdout"]) == payload
    feeder.join()


def test_unread_input_stops_the_client_and_uses_bounded_memory(node):
    async def deaf(session: FakeSession) -> int:
        await session.closed.wait()
        return 0

    node.sessions.script = deaf
    client = spdy(node.exec())
    streams = open_streams(client, "stdin", "stdout", "stderr")
    client.sock.settimeout(1.0)
    assert sent_until_stuck(client, streams["stdin"]) < 30 << 20
    assert session_of(node).taken < 4 << 20
    client.leave()


def sent_until_stuck(client: SpdyClient, stream: int) -> int:
    for count in range(1000):
        try:
            client.write(stream, b"x" * 100_000)
        except TimeoutError:
            return count * 100_000
    raise AssertionError("the server takes everything")


def test_output_that_the_client_does_not_read_stops_the_command(node):
    written = 0

    async def chatty(session: FakeSession) -> int:
        nonlocal written
        while True:
            await session.out(b"y" * 65536)
            written += 65536

    node.sessions.script = chatty
    client = spdy(node.exec(stdout=True))
    open_streams(client, "stdout")
    before = -1
    while written != before:  # until it stands still
        before = written
        threading.Event().wait(0.3)
    assert 0 < written < 30 << 20
    client.leave()


def test_a_slow_client_gets_all_output(make_node):
    node = make_node(leaving=0.05, linger=0.05)
    page = b"z" * 65536

    async def prints(session: FakeSession) -> int:
        for _ in range(200):
            await session.out(page)
        return 4

    node.sessions.script = prints
    client = spdy(node.exec(stdout=True), receive_buffer=4096)
    streams = open_streams(client, "stdout")
    client.until(session_of(node).closed.is_set)
    threading.Event().wait(0.5)  # longer than any wait that ignores the client
    assert client.read_all(streams["stdout"]) == page * 200
    assert result(client, streams)["details"]["causes"][0]["message"] == "4"


def test_the_end_of_a_container_ends_its_sessions(node):
    async def forever(session: FakeSession) -> int:
        await session.closed.wait()
        return 0

    node.sessions.script = forever
    client = spdy(node.exec(stdout=True))
    streams = open_streams(client, "stdout")
    session_of(node)
    waiting = node.exec()
    node.server.end_container(CONTAINER)
    assert "stopped" in result(client, streams)["message"]
    sock, head = connected(waiting, "v4.channel.k8s.io")
    sock.close()
    assert head.startswith("HTTP/1.1 404 "), "a URL of a container that has ended is void"


def test_a_stopping_server_sends_goaway(node):
    client = spdy(node.exec())
    open_streams(client, "stdin", "stdout", "stderr")
    stopper = threading.Thread(target=node.server.stop)
    stopper.start()
    client.to_the_end()
    assert client.goaway == 0
    stopper.join()


def test_many_sessions_run_at_once(node):
    clients = [spdy(node.exec()) for _ in range(50)]
    opened = [open_streams(client, "stdin", "stdout", "stderr") for client in clients]
    for number, (client, streams) in enumerate(zip(clients, opened, strict=True)):
        client.write(streams["stdin"], f"client {number}".encode(), fin=True)
    for number, (client, streams) in enumerate(zip(clients, opened, strict=True)):
        assert client.read_all(streams["stdout"]) == f"client {number}".encode()
