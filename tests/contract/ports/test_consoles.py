"""The fakes and the real logs on real files fulfil the contract of console logs and command logs."""

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
    """`console` follows the guests' consoles, `command` writes the output that it is given; `restart` starts the next
    process."""

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
        """The lines of the log, each as `stdout TEXT`."""
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
    """The logs of either kind, in the current process."""
    return lambda: getattr(world, request.param)


def out(text: str) -> Output:
    return Output(OutStream.STDOUT, f"{text}\n".encode())


def err(text: str) -> Output:
    return Output(OutStream.STDERR, f"{text}\n".encode())


# --- both kinds


def test_an_opened_log_exists_and_is_empty(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, world.log(), str(world.directory / "pods"))
    assert world.lines(world.log()) == []


def test_opening_a_log_again_changes_nothing(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, world.log())
    logs().open(A, world.log("other"))
    assert not world.exists(world.log("other"))


def test_reopening_a_renamed_log_creates_a_new_file(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, world.log())
    world.rename(world.log(), world.log("old"))
    assert not world.exists(world.log())
    logs().reopen(A)
    assert world.lines(world.log()) == []


def test_a_log_that_is_not_open_cannot_be_reopened(logs: Callable[[], Consoles]) -> None:
    with pytest.raises(WrongState):
        logs().reopen(A)


def test_a_finished_log_is_closed_and_may_be_finished_again(world: World, logs: Callable[[], Consoles]) -> None:
    logs().finish(A)
    logs().open(A, world.log())
    logs().finish(A)
    logs().finish(A)
    with pytest.raises(WrongState):
        logs().reopen(A)


def test_a_discarded_log_counts_as_open(logs: Callable[[], Consoles], world: World) -> None:
    logs().open(A, "")
    logs().reopen(A)
    logs().finish(A)
    assert not world.exists("")


def test_virtshims_own_lines_are_logged_at_once_also_after_a_rotation(
    world: World, logs: Callable[[], Consoles]
) -> None:
    logs().open(A, world.log())
    logs().note(A, "virtshim: paused")
    assert world.lines(world.log()) == ["stderr virtshim: paused"]
    world.rename(world.log(), world.log("old"))
    logs().reopen(A)
    logs().note(A, "virtshim: paused is over")
    assert world.lines(world.log()) == ["stderr virtshim: paused is over"]


def test_virtshims_own_lines_stay_when_the_next_process_continues_the_log(
    world: World, logs: Callable[[], Consoles]
) -> None:
    logs().open(A, world.log())
    logs().note(A, "virtshim: paused")
    world.restart()
    logs().open(A, world.log())
    logs().note(A, "virtshim: paused is over")
    assert world.lines(world.log()) == ["stderr virtshim: paused", "stderr virtshim: paused is over"]


def test_virtshim_adds_lines_to_open_logs_only(world: World, logs: Callable[[], Consoles]) -> None:
    with pytest.raises(WrongState):
        logs().note(A, "virtshim: paused")
    logs().open(A, world.log())
    logs().finish(A)
    with pytest.raises(WrongState):
        logs().note(A, "virtshim: paused")


def test_lines_for_a_discarded_log_are_discarded(world: World, logs: Callable[[], Consoles]) -> None:
    logs().open(A, "")
    logs().note(A, "virtshim: paused")
    assert not world.exists("")


# --- consoles


def test_a_guests_output_is_in_its_own_log_only(world: World) -> None:
    world.console.open(A, world.log())
    world.console.open(B, world.log("b"))
    world.says(A, "hello")
    eventually(lambda: world.lines(world.log()) == ["stdout hello"])
    assert world.lines(world.log("b")) == []


def test_output_before_anybody_followed_the_console_is_not_lost(world: World) -> None:
    world.says(A, "early")
    world.console.open(A, world.log())
    eventually(lambda: world.lines(world.log()) == ["stdout early"])


def test_a_finished_log_has_all_output_of_the_guest(world: World) -> None:
    world.console.open(A, world.log())
    world.says(A, "last words")
    world.console.finish(A)
    assert world.lines(world.log()) == ["stdout last words"]


def test_a_renamed_log_gets_output_until_it_is_reopened(world: World) -> None:
    world.console.open(A, world.log())
    world.rename(world.log(), world.log("old"))
    world.says(A, "before")
    eventually(lambda: world.lines(world.log("old")) == ["stdout before"])
    world.console.reopen(A)
    world.says(A, "after")
    eventually(lambda: world.lines(world.log()) == ["stdout after"])
    assert world.lines(world.log("old")) == ["stdout before"]


def test_virtshims_own_lines_do_not_damage_the_guests_output(world: World) -> None:
    world.console.open(A, world.log())
    world.says(A, "before")
    eventually(lambda: world.lines(world.log()) == ["stdout before"])
    world.console.note(A, "virtshim: paused")
    world.says(A, "after")
    eventually(lambda: len(world.lines(world.log())) == 3)
    assert world.lines(world.log()) == ["stdout before", "stderr virtshim: paused", "stdout after"]


def test_the_next_process_continues_where_this_one_stopped(world: World) -> None:
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


def test_a_reopened_command_log_continues_in_the_new_file(world: World) -> None:
    world.command.open(A, world.log())
    world.rename(world.log(), world.log("old"))
    world.command.write(A, [out("before")], OutputPosition())
    world.command.reopen(A)
    world.command.write(A, [out("after")], OutputPosition())
    assert (world.lines(world.log("old")), world.lines(world.log())) == (["stdout before"], ["stdout after"])


@pytest.mark.parametrize("discarded", [False, True])
def test_the_read_position_of_a_command_survives_the_process(world: World, discarded: bool) -> None:
    there = OutputPosition(StreamPosition(2, 17), StreamPosition(1, 0, over=True))
    world.command.open(A, "" if discarded else world.log())
    assert world.command.read_to(A) == OutputPosition()
    world.command.write(A, [out("some")], there)
    world.restart()
    assert world.command.read_to(A) == there
    assert world.command.read_to(B) == OutputPosition()


def test_the_byte_count_of_a_log_grows_even_if_output_is_discarded(world: World) -> None:
    world.command.open(A, world.log())
    world.command.open(B, "")
    kept, discarded = (world.command.write(one, [out("some")], OutputPosition()) for one in (A, B))
    assert kept == discarded >= len("some\n")
    assert world.command.write(A, [], OutputPosition()) == 0


def test_a_log_that_is_not_open_is_not_written_to(world: World) -> None:
    with pytest.raises(WrongState):
        world.command.write(A, [out("lost")], OutputPosition(StreamPosition(1)))
    assert world.command.read_to(A) == OutputPosition()
