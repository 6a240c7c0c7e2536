"""What the logs of consoles and of containers' own commands do: the fakes, and the real ones on real files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.consoles import FakeConsoles, FakeEntrypointLogs
from fakes.waiting import eventually

from virtshim.guest.command import OutputPosition, StreamPosition
from virtshim.logs.entrypoint_log import EntrypointLogFiles
from virtshim.logs.follower import ConsoleLogs
from virtshim.logs.ports import Consoles, EntrypointLogs
from virtshim.logs.tail import Pace
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Output, OutStream
from virtshim.system.clock import SystemClock

A = ContainerId("a" * 64)
B = ContainerId("b" * 64)
LINE = re.compile(r"\S+Z (stdout|stderr) F (.*)\n")
SOON = Pace(flush_after=0.05, gap=0.002, retry_after=0.05, sweep_every=60.0)


class World:
    """`console` follows what guests say on their consoles, `command` writes what it is given; `restart` is the next process."""

    console: Consoles
    command: EntrypointLogs

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def log(self, name: str = "0.log") -> str:
        return str(self.directory / "pods" / "vm" / name)

    def says(self, container: ContainerId, line: str) -> None:
        raise NotImplementedError

    def exists(self, log: str) -> bool:
        raise NotImplementedError

    def rename(self, log: str, new: str) -> None:
        raise NotImplementedError

    def lines(self, log: str) -> list[str]:
        """`stdout TEXT` each."""
        raise NotImplementedError

    def restart(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs."""


class InMemory(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.console = self._console = FakeConsoles()
        self.command = self._command = FakeEntrypointLogs()

    def says(self, container: ContainerId, line: str) -> None:
        self._console.say(container, f"stdout {line}\n")

    def exists(self, log: str) -> bool:
        return log in self._logs

    def rename(self, log: str, new: str) -> None:
        for fake in (self._console, self._command):
            if log in fake.logs:
                fake.logs[new] = fake.logs.pop(log)

    def lines(self, log: str) -> list[str]:
        return [line.rstrip("\n") for line in self._logs[log]]

    def restart(self) -> None:
        self._console.forget()
        self._command.forget()

    @property
    def _logs(self) -> dict[str, list[str]]:
        return self._console.logs | self._command.logs


class OnDisk(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._layout = Layout(str(self.directory / "state"), str(self.directory / "run"))
        for container in (A, B):
            os.makedirs(self._layout.container_dir(container))
        self._start()

    def _start(self) -> None:
        self.console = self._console = ConsoleLogs(self._layout, SystemClock(), SOON)
        self.command = self._command = EntrypointLogFiles(self._layout, SystemClock())

    def says(self, container: ContainerId, line: str) -> None:
        with open(self._layout.console_log(container), "a") as raw:
            raw.write(f"{line}\n")

    def exists(self, log: str) -> bool:
        return os.path.exists(log)

    def rename(self, log: str, new: str) -> None:
        os.rename(log, new)

    def lines(self, log: str) -> list[str]:
        text = Path(log).read_text()
        assert LINE.sub("", text) == ""
        return [f"{stream} {words}" for stream, words in LINE.findall(text)]

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._console.close()
        self._command.close()


@pytest.fixture(params=[InMemory, OnDisk])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made: World = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["console", "command"])
def logs(request: pytest.FixtureRequest, world: World) -> Callable[[], Consoles]:
    """Either kind, of the process that runs now."""
    return lambda: getattr(world, request.param)


def out(text: str) -> Output:
    return Output(OutStream.STDOUT, f"{text}\n".encode())


def err(text: str) -> Output:
    return Output(OutStream.STDERR, f"{text}\n".encode())


# --- both kinds


def test_the_log_is_there_and_empty_when_it_is_open(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, world.log(), str(world.directory / "pods"))
    assert world.lines(world.log()) == []


def test_opening_it_again_is_no_error_and_changes_nothing(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, world.log())
    logs().open(A, world.log("other"))
    assert not world.exists(world.log("other"))


def test_a_renamed_log_has_a_new_file_in_its_place_when_it_is_reopened(
    world: World, logs: Callable[[], Consoles]
) -> None:
    logs().open(A, world.log())
    world.rename(world.log(), world.log("old"))
    assert not world.exists(world.log())
    logs().reopen(A)
    assert world.lines(world.log()) == []


def test_what_is_not_open_cannot_be_reopened(logs: Callable[[], Consoles]) -> None:
    with pytest.raises(WrongState):
        logs().reopen(A)


def test_a_log_may_be_finished_twice_and_is_not_open_then(world: World, logs: Callable[[], Consoles]) -> None:
    logs().finish(A)
    logs().open(A, world.log())
    logs().finish(A)
    logs().finish(A)
    with pytest.raises(WrongState):
        logs().reopen(A)


def test_a_log_that_is_discarded_is_open_like_any_other(logs: Callable[[], Consoles], world: World) -> None:
    logs().open(A, "")
    logs().reopen(A)
    logs().finish(A)
    assert not world.exists("")


def test_a_line_of_virtshims_own_is_in_the_log_at_once_also_after_a_rotation(
    world: World, logs: Callable[[], Consoles]
) -> None:
    logs().open(A, world.log())
    logs().note(A, "virtshim: paused")
    assert world.lines(world.log()) == ["stderr virtshim: paused"]
    world.rename(world.log(), world.log("old"))
    logs().reopen(A)
    logs().note(A, "virtshim: paused is over")
    assert world.lines(world.log()) == ["stderr virtshim: paused is over"]


def test_a_line_of_virtshims_own_stays_when_the_next_process_goes_on(
    world: World, logs: Callable[[], Consoles]
) -> None:
    logs().open(A, world.log())
    logs().note(A, "virtshim: paused")
    world.restart()
    logs().open(A, world.log())
    logs().note(A, "virtshim: paused is over")
    assert world.lines(world.log()) == ["stderr virtshim: paused", "stderr virtshim: paused is over"]


def test_a_line_is_added_to_no_log_that_is_not_open(world: World, logs: Callable[[], Consoles]) -> None:
    with pytest.raises(WrongState):
        logs().note(A, "virtshim: paused")
    logs().open(A, world.log())
    logs().finish(A)
    with pytest.raises(WrongState):
        logs().note(A, "virtshim: paused")


def test_a_line_for_a_log_that_is_discarded_is_discarded(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, "")
    logs().note(A, "virtshim: paused")
    assert not world.exists("")


# --- consoles


def test_what_a_guest_says_is_in_its_log_and_in_no_other(world: World) -> None:
    world.console.open(A, world.log())
    world.console.open(B, world.log("b"))
    world.says(A, "hello")
    eventually(lambda: world.lines(world.log()) == ["stdout hello"])
    assert world.lines(world.log("b")) == []


def test_what_was_said_before_anybody_followed_is_not_lost(world: World) -> None:
    world.says(A, "early")
    world.console.open(A, world.log())
    eventually(lambda: world.lines(world.log()) == ["stdout early"])


def test_all_that_a_guest_said_is_in_the_log_when_it_is_finished(world: World) -> None:
    world.console.open(A, world.log())
    world.says(A, "last words")
    world.console.finish(A)
    assert world.lines(world.log()) == ["stdout last words"]


def test_after_a_rename_the_old_log_is_written_on_until_it_is_reopened(world: World) -> None:
    world.console.open(A, world.log())
    world.rename(world.log(), world.log("old"))
    world.says(A, "before")
    eventually(lambda: world.lines(world.log("old")) == ["stdout before"])
    world.console.reopen(A)
    world.says(A, "after")
    eventually(lambda: world.lines(world.log()) == ["stdout after"])
    assert world.lines(world.log("old")) == ["stdout before"]


def test_a_line_of_virtshims_own_takes_nothing_from_what_the_guest_says(world: World) -> None:
    world.console.open(A, world.log())
    world.says(A, "before")
    eventually(lambda: world.lines(world.log()) == ["stdout before"])
    world.console.note(A, "virtshim: paused")
    world.says(A, "after")
    eventually(lambda: len(world.lines(world.log())) == 3)
    assert world.lines(world.log()) == ["stdout before", "stderr virtshim: paused", "stdout after"]


def test_the_next_process_goes_on_where_this_one_stopped(world: World) -> None:
    world.console.open(A, world.log())
    world.says(A, "one")
    eventually(lambda: world.lines(world.log()) == ["stdout one"])
    world.restart()
    world.says(A, "two")
    world.console.open(A, world.log())
    world.console.finish(A)
    assert world.lines(world.log()) == ["stdout one", "stdout two"]


# --- containers' own commands


def test_both_streams_of_a_command_are_in_one_log_in_their_order(world: World) -> None:
    world.command.open(A, world.log())
    world.command.write(A, [out("one"), err("two")], OutputPosition())
    world.command.write(A, [out("three")], OutputPosition())
    assert world.lines(world.log()) == ["stdout one", "stderr two", "stdout three"]


def test_a_command_goes_on_in_the_new_file_when_its_log_was_reopened(world: World) -> None:
    world.command.open(A, world.log())
    world.rename(world.log(), world.log("old"))
    world.command.write(A, [out("before")], OutputPosition())
    world.command.reopen(A)
    world.command.write(A, [out("after")], OutputPosition())
    assert (world.lines(world.log("old")), world.lines(world.log())) == (["stdout before"], ["stdout after"])


@pytest.mark.parametrize("discarded", [False, True])
def test_how_far_a_command_was_read_outlives_the_process(world: World, discarded: bool) -> None:
    there = OutputPosition(StreamPosition(2, 17), StreamPosition(1, 0, over=True))
    world.command.open(A, "" if discarded else world.log())
    assert world.command.read_to(A) == OutputPosition()
    world.command.write(A, [out("some")], there)
    world.restart()
    assert world.command.read_to(A) == there
    assert world.command.read_to(B) == OutputPosition()


def test_more_output_is_more_bytes_of_log_also_if_it_is_discarded(world: World) -> None:
    world.command.open(A, world.log())
    world.command.open(B, "")
    kept, discarded = (world.command.write(one, [out("some")], OutputPosition()) for one in (A, B))
    assert kept == discarded >= len("some\n")
    assert world.command.write(A, [], OutputPosition()) == 0


def test_a_log_that_is_not_open_is_not_written(world: World) -> None:
    with pytest.raises(WrongState):
        world.command.write(A, [out("lost")], OutputPosition(StreamPosition(1)))
    assert world.command.read_to(A) == OutputPosition()
