"""Events reach systemd's journal by the journal's own protocol."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from virtshim.system.logsetup import journal_entry, set_up_logging, stderr_is_journal

pytestmark = pytest.mark.operator


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def received() -> Iterator[socket.socket]:
    """The journal's end."""
    directory = tempfile.mkdtemp(prefix="jn-")
    path = f"{directory}/s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(60)
        listening.bind(path)
        set_up_logging("info", "journal", path)
        yield listening
    shutil.rmtree(directory)


def fields(data: bytes) -> dict[str, str]:
    """As journald reads them."""
    found, rest = {}, data
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            length = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + length], rest[8 + length + 1 :]
        found[name.decode()] = value.decode()
    return found


def test_each_field_of_an_event_is_a_field_of_the_entry(received: socket.socket) -> None:
    with structlog.contextvars.bound_contextvars(pod="default/web", trace="ab"):
        structlog.get_logger("any").warning("container.exited", container="c1", code=137, ips=("10.0.0.1",))
    told = fields(received.recv(1 << 16))
    assert told["VIRTSHIM_EVENT"] == "container.exited"
    assert told["VIRTSHIM_POD"] == "default/web"
    assert told["VIRTSHIM_CONTAINER"] == "c1"
    assert told["VIRTSHIM_CODE"] == "137"
    assert told["VIRTSHIM_TRACE"] == "ab"
    assert told["PRIORITY"] == "4"
    assert told["SYSLOG_IDENTIFIER"] == "virtshim"
    assert "container.exited" in told["MESSAGE"]


@pytest.mark.hostile
def test_foreign_text_cannot_add_a_journal_field(received: socket.socket) -> None:
    structlog.get_logger("any").error("pull.failed", **{"error": "x\nPRIORITY=0\n_UID=0", "a=b\nc": "y"})
    told = fields(received.recv(1 << 16))
    assert told["PRIORITY"] == "3"
    assert not any(name.startswith("_") for name in told)
    assert told["VIRTSHIM_ERROR"] == r"x\nPRIORITY=0\n_UID=0"


def test_a_value_of_several_lines_is_sent_with_its_length() -> None:
    told = fields(journal_entry("one\ntwo=2", logging.INFO, {"event": "x"}))
    assert told["MESSAGE"] == "one\ntwo=2"
    assert told["VIRTSHIM_EVENT"] == "x"


def test_entries_that_the_journal_refuses_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    set_up_logging("info", "journal", str(tmp_path / "absent"))
    structlog.get_logger("any").info("serve.stopped")
    assert "serve.stopped" in capsys.readouterr().err


def test_standard_error_counts_as_the_journal_only_if_systemd_says_so(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as file:
        found, its = os.fstat(file.fileno()), (file.fileno(), str(tmp_path))
        assert stderr_is_journal({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}, *its)
        assert not stderr_is_journal({"JOURNAL_STREAM": f"{found.st_dev}:1"}, *its)
        assert not stderr_is_journal({}, *its)
