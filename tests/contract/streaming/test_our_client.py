"""`exec` and `console`, as separate programs, work with the real streaming server. The test scripts the guest's
side."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from fakes.sessions import FakeSession
from fakes.streamnode import CONTAINER, StreamNode

from virtshim.model.errors import ResourceExhausted, Unavailable
from virtshim.streaming.client import connect
from virtshim.streaming.connection import StreamTimeouts
from virtshim.streaming.ports import AttachStreams, Streams
from virtshim.streaming.room import StreamLimits

LIMIT = 20.0

# The commands' work once they have their URL: flags, then the URL.
OURS = """
import contextlib, sys
from virtshim.cli.sessions import Detached, relay
from virtshim.streaming.client import connect
flags, url = sys.argv[1], sys.argv[2]
with contextlib.closing(connect(url)) as client:
    try:
        sys.exit(relay(client, stdin="i" in flags, is_terminal="t" in flags, detachable="d" in flags))
    except Detached:
        sys.exit("detached")
"""


@pytest.fixture
def node() -> Iterator[StreamNode]:
    made = StreamNode(StreamTimeouts())
    made.start()
    yield made
    made.server.stop()


def ran(url: str, flags: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", OURS, flags, url]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=LIMIT, check=False)


def test_output_goes_to_its_stream_and_the_exit_code_is_the_commands(node: StreamNode) -> None:
    async def guest(session: FakeSession) -> int:
        await session.out(b"out\n")
        await session.err(b"err\n")
        return 42

    node.sessions.script = guest
    done = ran(node.exec("any", stdout=True, stderr=True), "-")
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n", b"err\n")


def test_large_input_and_output_pass_at_once_without_blocking_each_other(node: StreamNode) -> None:
    data = os.urandom(5_000_000)
    done = ran(node.exec(), "i", data)  # cat
    assert done.returncode == 0, done.stderr
    assert done.stdout == data


def test_a_nonblocking_output_pipe_gets_all_output(node: StreamNode) -> None:
    """Shells and editors make such pipes for output that they read themselves; the flag applies to every holder of the
    pipe."""

    async def guest(session: FakeSession) -> int:
        await session.out(b"x" * 1_000_000)
        return 0

    node.sessions.script = guest
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = subprocess.Popen([sys.executable, "-c", OURS, "-", node.exec("any", stdout=True)], stdout=writing)
    try:
        while select.select([], [writing], [], 0)[1] and process.poll() is None:  # until it is full
            select.select([reading], [], [], 0.1)
        os.close(writing)
        with open(reading, "rb") as file:
            assert len(file.read()) == 1_000_000
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()


def test_a_failed_session_reports_the_reason(node: StreamNode) -> None:
    node.sessions.refuse = Unavailable("the guest has no agent")
    done = ran(node.exec("any", stdout=True), "-")
    assert done.returncode == 1
    assert b"the guest has no agent" in done.stderr


def test_a_used_url_is_refused_with_a_clear_error(node: StreamNode) -> None:
    url = node.exec("any", stdin=True, stdout=True)
    assert ran(url, "i").returncode == 0
    assert b"refused the stream (HTTP 404)" in ran(url, "i").stderr


def test_a_session_beyond_a_limit_fails_with_the_nodes_error() -> None:
    node = StreamNode(StreamTimeouts(), StreamLimits(sessions=100, pod_sessions=1))
    node.start()
    wanted = AttachStreams(CONTAINER, Streams(stdin=True, stdout=True), pod="default/web")
    try:
        with (
            contextlib.closing(connect(node.server.offer(wanted))),
            pytest.raises(ResourceExhausted, match=r"^pod default/web has 1 .* streaming\.pod_sessions$"),
        ):
            connect(node.server.offer(wanted))
    finally:
        node.server.stop()


def test_a_session_fails_if_its_server_disappears(node: StreamNode) -> None:
    async def guest(session: FakeSession) -> int:
        await session.out(b"on\n")
        await session.closed.wait()
        return 0

    node.sessions.script = guest
    process = subprocess.Popen(
        [sys.executable, "-c", OURS, "-", node.exec("any", stdout=True)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    node.server.stop()
    assert process.communicate(timeout=LIMIT)[1] != b""
    assert process.returncode == 1


class Person:
    """A person at a terminal of 80 by 24, which runs the program."""

    def __init__(self, flags: str, url: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", OURS, flags, url], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )

    def types(self, data: bytes) -> None:
        os.write(self.master, data)

    def sees(self, text: bytes) -> None:
        until = time.monotonic() + LIMIT
        while text not in self.seen:
            assert select.select([self.master], [], [], until - time.monotonic())[0], self.seen
            self.seen += os.read(self.master, 4096)

    def has_terminal_back(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before

    def left(self) -> int:
        return self.process.wait(LIMIT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def person(node: StreamNode) -> Iterator[Person]:
    """A person attached to a guest that prints its size, then each typed byte as a number."""

    async def guest(session: FakeSession) -> int:
        await session.out(b"size %d %d\r\n" % await session.sizes.get())
        while data := await session.stdin.get():
            await session.out(b"".join(b"<%d>" % byte for byte in data))
            if b"w" in data:
                await session.out(b"size %d %d\r\n" % await session.sizes.get())
        return 0

    node.sessions.script = guest
    made = Person("itd", node.attach(stdin=True, stdout=True, tty=True))
    yield made
    made.close()


def test_a_terminal_is_raw_and_its_size_is_sent(person: Person) -> None:
    person.sees(b"size 80 24")
    person.types(b"\x03\r")
    person.sees(b"<3><13>")
    termios.tcsetwinsize(person.slave, (30, 100))
    os.kill(person.process.pid, signal.SIGWINCH)
    person.types(b"w")
    person.sees(b"size 100 30")


def test_ctrl_right_bracket_detaches_and_restores_the_terminal(person: Person) -> None:
    person.sees(b"size 80 24")
    person.types(b"a\x1db")
    person.sees(b"detached")
    assert person.left() == 1  # sys.exit with a text
    assert person.has_terminal_back()


def test_a_terminated_client_restores_the_terminal(person: Person) -> None:
    person.sees(b"size 80 24")
    assert not person.has_terminal_back()
    person.process.terminate()
    assert person.left() == 128 + signal.SIGTERM
    assert person.has_terminal_back()
