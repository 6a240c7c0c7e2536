"""What reaches the log."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from grpc import _common

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.logsetup import set_up_logging


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_shows_no_values_of_variables(capsys: pytest.CaptureFixture[str], form: str) -> None:
    set_up_logging("info", form)
    password = "hunter2"  # noqa: F841  the log must not show it
    try:
        int("seven")
    except ValueError:
        structlog.get_logger("any").exception("pull.crashed")
        logging.getLogger("grpc").exception("call.crashed")
    text = capsys.readouterr().err
    assert text.count("invalid literal") == 2
    assert "test_logsetup.py" in text
    assert "'hunter2'" not in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_request_that_is_no_protobuf_is_one_line(capsys: pytest.CaptureFixture[str], form: str) -> None:
    set_up_logging("info", form)
    assert _common.deserialize(b"\xff\xff", pb.RunPodSandboxRequest.FromString) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "Exception deserializing message!" in line
    assert "runtime.v1.RunPodSandboxRequest" in line
