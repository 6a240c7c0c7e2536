"""Log lines are short, safe and limited in number."""

import ipaddress
import json
import logging
from pathlib import Path

import pytest
import structlog
from grpc import _common

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.system.logsetup import set_up_logging


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
def test_a_malformed_request_is_logged_in_one_line(capsys: pytest.CaptureFixture[str], form: str) -> None:
    set_up_logging("info", form)
    assert _common.deserialize(b"\xff\xff", pb.RunPodSandboxRequest.FromString) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "Exception deserializing message!" in line
    assert "runtime.v1.RunPodSandboxRequest" in line


FORGED = "x\n2026-01-01T00:00:00Z [info     ] container.created container=forged\r\x1b[2J\u2028\u202ey"


@pytest.mark.hostile
@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "value",
    [FORGED, [FORGED], {FORGED: FORGED}, ValueError(FORGED), FORGED.encode(), Path(FORGED)],
    ids=["text", "list", "dict", "exception", "bytes", "path"],
)
def test_foreign_text_cannot_add_a_log_line(capsys: pytest.CaptureFixture[str], form: str, value: object) -> None:
    set_up_logging("info", form)
    structlog.get_logger("any").warning("image.unusable", error=value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "image.unusable" in line


@pytest.mark.hostile
@pytest.mark.parametrize("form", ["text", "json"])
def test_foreign_text_in_a_librarys_message_cannot_add_a_log_line(
    capsys: pytest.CaptureFixture[str], form: str
) -> None:
    set_up_logging("info", form)
    logging.getLogger("library").warning("it said %s", FORGED)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


@pytest.mark.hostile
@pytest.mark.parametrize("form", ["text", "json"])
def test_foreign_text_in_a_traceback_cannot_forge_an_event_line(capsys: pytest.CaptureFixture[str], form: str) -> None:
    set_up_logging("info", form)
    try:
        ipaddress.ip_address(FORGED)
    except ValueError:
        structlog.get_logger("any").exception("rpc.crashed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert "rpc.crashed" in first
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


@pytest.mark.hostile
@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("value", ["a" * 200_000, ["a" * 200_000] * 3, list(range(10_000))])
def test_a_long_value_is_cut(capsys: pytest.CaptureFixture[str], form: str, value: object) -> None:
    set_up_logging("info", form)
    structlog.get_logger("any").warning("image.unusable", error=value)
    assert len(capsys.readouterr().err) < 8000


@pytest.mark.hostile
def test_a_flood_of_warnings_is_limited_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [100.0]
    set_up_logging("info", "json", monotonic=lambda: now[0])
    log = structlog.get_logger("any")
    for _ in range(1000):
        log.warning("console.lost", bytes=1)
    log.warning("another")
    log.info("container.created")
    logged = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert logged == [*["console.lost"] * 100, "another", "container.created"]
    now[0] += 60
    log.warning("console.lost", bytes=1)
    assert json.loads(capsys.readouterr().err)["unlogged"] == 900


@pytest.mark.parametrize("form", ["text", "json"])
def test_under_up_the_log_is_in_a_file_too_as_json_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("UP_LOG_FILE", str(tmp_path / "virtshim.log"))
    set_up_logging("info", form)
    try:
        int("seven")
    except ValueError:
        structlog.get_logger("any").exception("pull.crashed", image="x\ny")
    (line,) = (tmp_path / "virtshim.log").read_text().splitlines()
    assert json.loads(line)["event"] == "pull.crashed"
    assert "invalid literal" in line
    assert "pull.crashed" in capsys.readouterr().err


def test_an_unwritable_log_file_only_loses_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UP_LOG_FILE", "/dev/full")
    set_up_logging("info", "json")
    structlog.get_logger("any").info("one.event")
    assert capsys.readouterr().err.count("\n") == 1
