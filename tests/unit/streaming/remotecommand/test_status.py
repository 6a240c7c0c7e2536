"""A client can read back the status of a session's end."""

from __future__ import annotations

import json

import pytest

from virtshim.streaming.remotecommand_status import Exited, Failed, as_status, as_text, from_status


def test_success_is_reported_in_kubernetes_format():
    assert json.loads(as_status(Exited(0))) == {"metadata": {}, "status": "Success"}
    assert as_text(Exited(0)) == b""


@pytest.mark.parametrize("code", [1, 137, 255])
def test_an_exit_code_is_a_number_in_a_cause(code):
    status = json.loads(as_status(Exited(code)))
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": str(code)}]
    assert str(code) in as_text(Exited(code)).decode()


def test_a_failure_has_its_message_cut_to_a_limit():
    assert json.loads(as_status(Failed("no agent")))["message"] == "no agent"
    assert len(as_status(Failed("x" * 1_000_000))) < 40_000
    assert len(as_text(Failed("\ud800" + "x" * 1_000_000))) < 40_000


@pytest.mark.parametrize("outcome", [Exited(0), Exited(1), Exited(255), Failed("no agent")])
def test_a_client_reads_back_the_reported_end(outcome):
    assert from_status(as_status(outcome)) == outcome


@pytest.mark.parametrize("told", [b"\xff", b"[]", b"{}", b'{"status":"Failure","details":[]}'])
def test_a_malformed_end_is_a_failure(told):
    assert "unreadable" in from_status(told).message
