"""The log of a container's own command has both streams, and remembers how far the guest was read."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.clock import FakeClock

from virtshim.guest.command import OutputPosition, StreamPosition
from virtshim.logs.entrypoint_log import EntrypointLogFiles
from virtshim.model.errors import ResourceExhausted, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Output, OutStream

CONTAINER = ContainerId("c" * 64)
OUT, ERR = OutStream.STDOUT, OutStream.STDERR
THERE = OutputPosition(StreamPosition(3, 17), StreamPosition(0, 2, over=True))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(str(tmp_path / "state"), str(tmp_path / "run"))
    Path(layout.container_dir(CONTAINER)).mkdir(parents=True)
    return layout


@pytest.fixture
def logs(layout: Layout) -> EntrypointLogFiles:
    return EntrypointLogFiles(layout, FakeClock())


def contents(path: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in path.read_text().splitlines()]


def test_streams_are_labelled_and_unfinished_lines_are_marked(logs: EntrypointLogFiles, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "0.log"
    logs.open(CONTAINER, str(log))
    logs.write(CONTAINER, (Output(OUT, b"one\nha"), Output(ERR, b"bad\n")), THERE)
    logs.write(CONTAINER, (Output(OUT, b"lf\n"),), THERE)
    assert contents(log) == ["stdout F one", "stdout P ha", "stderr F bad", "stdout F lf"]


def test_an_unreadable_position_is_an_error_and_not_the_beginning(logs: EntrypointLogFiles, layout: Layout) -> None:
    Path(layout.container_dir(CONTAINER), "command.pos").write_text("[{")
    with pytest.raises(ShimError, match="cannot be read from"):
        logs.read_to(CONTAINER)


def test_a_renamed_log_is_complete_and_a_new_one_continues(logs: EntrypointLogFiles, tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    logs.open(CONTAINER, str(log))
    logs.write(CONTAINER, (Output(OUT, b"old\n"),), THERE)
    log.rename(tmp_path / "0.log.1")
    logs.reopen(CONTAINER)
    logs.write(CONTAINER, (Output(OUT, b"new\n"),), THERE)
    assert contents(tmp_path / "0.log.1") == ["stdout F old"]
    assert contents(log) == ["stdout F new"]


def test_if_the_position_cannot_be_written_its_lines_are_taken_back(
    logs: EntrypointLogFiles, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file system to fill would need a mount."""
    log = tmp_path / "0.log"
    logs.open(CONTAINER, str(log))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("os.replace", full)
        with pytest.raises(ResourceExhausted):
            logs.write(CONTAINER, (Output(OUT, b"again\n"),), THERE)
    logs.write(CONTAINER, (Output(OUT, b"again\n"),), THERE)
    assert contents(log) == ["stdout F again"]


def test_nothing_is_written_after_the_end(logs: EntrypointLogFiles, tmp_path: Path) -> None:
    logs.open(CONTAINER, str(tmp_path / "0.log"))
    logs.finish(CONTAINER)
    logs.finish(CONTAINER)
    with pytest.raises(WrongState):
        logs.write(CONTAINER, (Output(OUT, b"late\n"),), THERE)
