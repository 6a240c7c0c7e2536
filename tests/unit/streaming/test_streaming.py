"""Requests for streams say what is wrong with them, and keep commands out of logs."""

from __future__ import annotations

import pytest

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.streaming.ports import ExecRequest, ForwardRequest, Streams

CONTAINER = ContainerId("c" * 64)


def test_a_terminal_has_no_stderr():
    with pytest.raises(InvalidRequest, match="tty and stderr"):
        Streams(tty=True, stdout=True, stderr=True)


def test_at_least_one_stream_is_required():
    with pytest.raises(InvalidRequest, match="no stream"):
        Streams(tty=True)


def test_stdout_alone_is_enough():
    assert Streams(stdout=True) == Streams(False, True, False, False)


def test_a_command_never_shows_up_in_a_log():
    assert "secret" not in repr(ExecRequest(CONTAINER, ("mysql", "-psecret"), Streams(stdout=True)))


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
def test_a_port_beyond_65535_is_refused(port):
    with pytest.raises(InvalidRequest, match=str(port)):
        ForwardRequest(SandboxId("5" * 64), "10.0.0.2", (80, port))
