"""A console's log is complete step by step, and a kill between two steps neither loses nor repeats a line."""

import errno
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virtshim.logs.files import LogFile, PositionFile, RawLog
from virtshim.logs.lines import MAX_CONTENT
from virtshim.logs.tail import Pace, Tail
from virtshim.model.errors import ResourceExhausted

PACE = Pace(turn_bytes=200_000, flush_after=0.5, retry_after=2.0)


@pytest.fixture
def opened(machine: Any, hand_clock: Any, request: pytest.FixtureRequest) -> Any:
    def open_tail(pace: Pace = PACE) -> Tail:
        container = machine.container()
        tail = Tail.open(container, LogFile.open(str(machine.log_path(container))), machine.layout, hand_clock, pace)
        request.addfinalizer(tail.close)
        return tail

    return open_tail


@pytest.fixture
def vm(machine: Any) -> Any:
    return machine.container()


def test_the_log_is_there_before_the_console_says_anything(machine: Any, opened: Any, vm: Any) -> None:
    tail = opened()
    assert machine.log_path(vm).read_bytes() == b""
    assert tail.turn().more is False
    machine.says(vm, b"SeaBIOS\r\n")
    tail.turn()
    assert machine.pieces(vm) == [("F", b"SeaBIOS")]


def test_an_unfinished_line_waits_and_is_then_written(machine: Any, opened: Any, vm: Any, hand_clock: Any) -> None:
    tail = opened()
    machine.says(vm, b"a\nlogin: ")
    turn = tail.turn()
    assert turn.due == hand_clock.at + PACE.flush_after
    hand_clock.at += PACE.flush_after / 2
    machine.says(vm, b"\x1b[0m")
    assert tail.turn().due == turn.due
    assert machine.pieces(vm) == [("F", b"a")]
    hand_clock.at = turn.due
    assert tail.turn().due is None
    assert machine.pieces(vm) == [("F", b"a"), ("P", b"login: \x1b[0m")]
    machine.says(vm, b"root\r\n")
    assert tail.turn().due is None
    assert machine.pieces(vm)[2:] == [("F", b"root")]


def test_a_turn_reads_a_limited_amount(machine: Any, opened: Any, vm: Any) -> None:
    tail = opened()
    machine.says(vm, b"x" * 99 + b"\n")
    machine.says(vm, (b"y" * 99 + b"\n") * 5000)
    assert tail.turn().more
    assert PACE.turn_bytes * 0.6 < len(machine.text(vm)) <= PACE.turn_bytes
    assert tail.turn().more
    while tail.turn().more:
        pass
    assert len(machine.text(vm)) == 500_100


def test_finish_writes_everything_and_an_unfinished_line_as_partial(machine: Any, opened: Any, vm: Any) -> None:
    tail = opened()
    machine.says(vm, b"z" * 1000 + b"\n" + b"y" * 500_000 + b"\nthe end\r")
    tail.finish()
    assert machine.text(vm) == b"z" * 1000 + b"\n" + b"y" * 500_000 + b"\nthe end\r"
    assert machine.pieces(vm)[-1] == ("P", b"the end\r")
    assert tail.is_closed
    tail.finish()
    assert tail.turn().more is False


def test_finish_without_a_raw_log_is_no_error(machine: Any, opened: Any, vm: Any) -> None:
    opened().finish()
    assert machine.text(vm) == b""


def test_opening_again_after_a_close_continues(machine: Any, opened: Any, vm: Any) -> None:
    for part in (b"one\ntw", b"o\nthr", b"ee\n"):
        machine.says(vm, part)
        tail = opened()
        tail.turn()
        tail.close()
    assert machine.pieces(vm) == [("F", b"one"), ("F", b"two"), ("F", b"three")]


def test_a_record_older_than_the_log_cuts_the_log_back(machine: Any, opened: Any, vm: Any) -> None:
    machine.says(vm, b"one\n")
    tail = opened()
    tail.turn()
    stale = machine.position_path(vm).read_bytes()
    machine.says(vm, b"two\nthr")
    tail.turn()
    tail.close()
    machine.position_path(vm).write_bytes(stale)
    with machine.log_path(vm).open("ab") as log:
        log.write(b"2024-01-01T00:00:00.00000")  # the write was cut short as well
    machine.says(vm, b"ee\n")
    opened().turn()
    assert machine.text(vm) == b"one\ntwo\nthree\n"


def test_after_a_flush_the_saved_position_is_inside_the_line(
    machine: Any, opened: Any, vm: Any, hand_clock: Any
) -> None:
    machine.says(vm, b"login: ")
    tail = opened()
    hand_clock.at = tail.turn().due
    tail.turn()
    tail.close()
    machine.says(vm, b"root\n")
    opened().finish()
    assert machine.pieces(vm) == [("P", b"login: "), ("F", b"root")]


def test_another_log_file_is_continued_at_its_end(machine: Any, opened: Any, vm: Any) -> None:
    machine.says(vm, b"one\n")
    tail = opened()
    tail.turn()
    tail.close()
    log = machine.log_path(vm)
    log.rename(log.with_suffix(".rotated"))
    log.write_bytes(b"2024-05-06T07:08:09.000000010Z stdout F other\n" * 9)
    machine.says(vm, b"two\n")
    opened().turn()
    assert machine.text(vm) == b"other\n" * 9 + b"two\n"
    assert log.with_suffix(".rotated").stat().st_size < 60


def test_a_missing_log_is_created_again(machine: Any, opened: Any, vm: Any) -> None:
    machine.says(vm, b"one\n")
    tail = opened()
    tail.turn()
    tail.close()
    machine.log_path(vm).unlink()
    machine.log_path(vm).parent.rmdir()
    machine.says(vm, b"two\n")
    opened().turn()
    assert machine.text(vm) == b"two\n"


def test_a_log_that_became_shorter_is_continued_at_its_end(machine: Any, opened: Any, vm: Any) -> None:
    machine.says(vm, b"one\n")
    tail = opened()
    tail.turn()
    tail.close()
    os.truncate(machine.log_path(vm), 0)
    machine.says(vm, b"two\n")
    opened().turn()
    assert machine.text(vm) == b"two\n"


@pytest.mark.parametrize("record", [b"", b"junk", b"\0" * 256])
def test_without_a_readable_record_everything_is_written(machine: Any, opened: Any, vm: Any, record: bytes) -> None:
    machine.says(vm, b"one\n")
    machine.position_path(vm).write_bytes(record)
    opened().turn()
    assert machine.text(vm) == b"one\n"
    assert json.loads(machine.position_path(vm).read_bytes())["offset"] == 4


@pytest.mark.parametrize("replace", ["unlink", "truncate"])
def test_a_replaced_raw_log_is_read_from_its_start(machine: Any, opened: Any, vm: Any, replace: str) -> None:
    raw = machine.layout.console_log(vm)
    tail = opened()
    machine.says(vm, b"first life\nunfinished")
    tail.turn()
    if replace == "unlink":
        os.unlink(raw)
    else:
        os.truncate(raw, 0)
    tail.turn()
    machine.says(vm, b"second life, which is longer than the first\n")
    tail.turn()
    assert machine.text(vm) == b"first life\nunfinishedsecond life, which is longer than the first\n"


def rotate(raw: str, most: int = 3) -> None:
    """As virtlogd does it, which writes to a renamed file no more."""
    for number in range(most - 1, 0, -1):
        if os.path.exists(f"{raw}.{number - 1}"):
            os.rename(f"{raw}.{number - 1}", f"{raw}.{number}")
    os.rename(raw, f"{raw}.0")


def test_a_rotated_raw_log_is_read_to_its_end_before_the_next_file(machine: Any, opened: Any, vm: Any) -> None:
    raw = machine.layout.console_log(vm)
    tail = opened()
    machine.says(vm, b"one\n")
    tail.turn()
    machine.says(vm, b"two\nthr")
    rotate(raw)
    tail.turn()  # virtlogd has not made the new one yet
    machine.says(vm, b"ee\nfour\n")
    tail.turn()
    assert machine.text(vm) == b"one\ntwo\nthree\nfour\n"
    for number in range(5, 8):
        machine.says(vm, b"%d" % number * 30)
        rotate(raw)
    machine.says(vm, b"8\n")
    tail.finish()
    assert machine.text(vm) == b"one\ntwo\nthree\nfour\n" + b"5" * 30 + b"6" * 30 + b"7" * 30 + b"8\n"


def test_unseen_rotations_lose_nothing_that_is_still_on_disk(machine: Any, opened: Any, vm: Any) -> None:
    raw = machine.layout.console_log(vm)
    first = opened()
    machine.says(vm, b"one\n")
    first.turn()
    first.close()
    for number in range(2, 4):
        machine.says(vm, b"%d\n" % number)
        rotate(raw)
    machine.says(vm, b"4\n")
    opened().turn()
    assert machine.text(vm) == b"one\n2\n3\n4\n"


def test_a_line_whose_end_is_cut_by_a_rotation_has_no_carriage_return(machine: Any, opened: Any, vm: Any) -> None:
    tail = opened()
    machine.says(vm, b"one\r")
    rotate(machine.layout.console_log(vm))
    machine.says(vm, b"\ntwo\r\n")
    tail.turn()
    assert machine.text(vm) == b"one\ntwo\n"


def test_a_turn_in_the_middle_of_a_rotation_skips_no_file(machine: Any, opened: Any, vm: Any) -> None:
    raw = machine.layout.console_log(vm)
    tail = opened()
    machine.says(vm, b"one\n")
    tail.turn()
    rotate(raw)
    machine.says(vm, b"two\n")
    rotate(raw)
    machine.says(vm, b"three\n")
    os.rename(f"{raw}.1", f"{raw}.2")
    os.rename(f"{raw}.0", f"{raw}.1")
    tail.turn()
    os.rename(raw, f"{raw}.0")
    machine.says(vm, b"four\n")
    tail.turn()
    assert machine.text(vm) == b"one\ntwo\nthree\nfour\n"


def test_after_too_many_rotations_reading_continues_with_the_oldest_file(machine: Any, opened: Any, vm: Any) -> None:
    raw = machine.layout.console_log(vm)
    tail = opened()
    machine.says(vm, b"one\n")
    tail.turn()
    for number in range(2, 9):
        machine.says(vm, b"%d\n" % number)
        rotate(raw)
    machine.says(vm, b"9\n")
    tail.turn()
    assert machine.text(vm) == b"one\n2\n6\n7\n8\n9\n", "the second was in the file that was open"


class FailingLog(LogFile):
    """Fails each write that would go over `room` bytes, after writing what fits."""

    room = 0

    def append(self, text: bytes) -> None:
        fits = max(0, self.room - self.status().st_size)
        super().append(text[:fits])
        if fits < len(text):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_the_raw_logs_space_is_freed_once_its_content_is_in_the_log(machine: Any, opened: Any, vm: Any) -> None:
    tail = opened(Pace(turn_bytes=8 << 20))
    machine.says(vm, b"x" * 999 + b"\n" + b"0123456789abcde\n" * (4 << 16))
    tail.turn()
    machine.says(vm, b"last\n")
    tail.turn()
    raw = os.stat(tail.raw_path)
    assert raw.st_size == 1000 + (4 << 20) + 5, "positions stay as they are"
    assert raw.st_blocks * 512 <= 1 << 20
    assert machine.pieces(vm)[-2:] == [("F", b"0123456789abcde"), ("F", b"last")]


def test_freed_space_is_not_taken_for_output_if_the_record_is_lost(machine: Any, opened: Any, vm: Any) -> None:
    tail = opened(Pace(turn_bytes=8 << 20))
    machine.says(vm, b"0123456789abcde\n" * (2 << 16))
    tail.turn()
    tail.close()
    os.truncate(machine.layout.console_position(vm), 0)
    machine.says(vm, b"after\n")
    opened().turn()
    assert machine.pieces(vm)[-1] == ("F", b"after")
    assert b"\0" not in machine.log_path(vm).read_bytes()


@pytest.fixture
def failing(machine: Any, hand_clock: Any, vm: Any) -> Iterator[tuple[FailingLog, Tail]]:
    log = FailingLog.open(str(machine.log_path(vm)))
    position = PositionFile.open(machine.layout.console_position(vm))
    tail = Tail(vm, RawLog(machine.layout.console_log(vm)), log, position, hand_clock, PACE)
    yield log, tail
    tail.close()


def test_after_a_rotation_a_kill_neither_loses_nor_repeats_a_line(machine: Any, opened: Any, vm: Any) -> None:
    first = opened()
    machine.says(vm, b"one\ntwo\nunfinished")
    first.turn()
    machine.log_path(vm).rename(machine.log_path(vm).with_suffix(".log.1"))
    first.reopen()
    second = opened()  # the first process was killed here
    machine.says(vm, b" line\n")
    second.turn()
    assert machine.pieces(vm) == [("F", b"unfinished line")]


def test_a_rotation_while_the_disk_is_full_loses_nothing(
    machine: Any, failing: Any, vm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, tail = failing
    log.room = 50
    machine.says(vm, b"one\ntwo\n")
    tail.turn()
    rotated = machine.log_path(vm).with_suffix(".log.1")
    machine.log_path(vm).rename(rotated)
    monkeypatch.setattr(FailingLog, "room", 10_000)  # of the next one
    tail.reopen()
    tail.turn()
    assert (rotated.read_bytes(), machine.text(vm)) == (b"", b"one\ntwo\n")


def test_writing_is_retried_on_a_full_disk_and_nothing_is_lost(
    machine: Any, failing: Any, vm: Any, hand_clock: Any
) -> None:
    log, tail = failing
    log.room = 50
    machine.says(vm, b"one\ntwo\nthr")
    turn = tail.turn()
    assert turn.due == hand_clock.at + PACE.retry_after
    assert machine.log_path(vm).stat().st_size == 0, "no half lines for readers"
    log.room = 10_000
    assert tail.turn() == turn, "not before its time"
    machine.says(vm, b"ee\n")
    hand_clock.at = turn.due
    assert tail.turn().due is None
    assert machine.text(vm) == b"one\ntwo\nthree\n"


def test_a_full_disk_is_reported_once(machine: Any, failing: Any, vm: Any, hand_clock: Any, capsys: Any) -> None:
    log, tail = failing
    machine.says(vm, b"one\n")
    for _ in range(5):
        hand_clock.at = tail.turn().due
    assert capsys.readouterr().out.count("console.log.failed") == 1
    log.room = 1000
    tail.turn()
    log.room = 0
    machine.says(vm, b"two\n")
    tail.turn()
    assert capsys.readouterr().out.count("console.log.failed") == 1


def test_finish_on_a_full_disk_leaves_the_rest_to_a_later_open(
    machine: Any, failing: Any, opened: Any, vm: Any, capsys: Any
) -> None:
    _, tail = failing
    machine.says(vm, b"one\n")
    tail.finish()
    assert "console.log.incomplete" in capsys.readouterr().out
    assert tail.is_closed
    opened().finish()
    assert machine.text(vm) == b"one\n"


class Killed(BaseException):
    """Nobody catches it."""


class MortalLog(LogFile):
    """Dies during or after a write."""

    writes_left = 0
    share = 1.0

    def append(self, text: bytes) -> None:
        if self.writes_left == 0:
            super().append(text[: int(len(text) * self.share)])
            raise Killed
        self.writes_left -= 1
        super().append(text)


chunks = st.lists(
    st.sampled_from([b"line\n", b"part", b"\r\n", b"\r", b"x" * (MAX_CONTENT + 3), b"y\n" * 2000])
    | st.binary(max_size=6),
    min_size=1,
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=chunks, writes=st.integers(0, 5), share=st.sampled_from([0.0, 0.3, 1.0]), pause=st.booleans())
def test_a_kill_at_any_write_neither_loses_nor_repeats_output(
    tmp_path_factory: pytest.TempPathFactory,
    machine: Any,
    hand_clock: Any,
    data: list[bytes],
    writes: int,
    share: float,
    pause: bool,
) -> None:
    here = type(machine)(tmp_path_factory.mktemp("kill"))
    vm = here.container()
    log = MortalLog.open(str(here.log_path(vm)))
    log.writes_left, log.share = writes, share
    position = PositionFile.open(here.layout.console_position(vm))
    tail = Tail(vm, RawLog(here.layout.console_log(vm)), log, position, hand_clock, PACE)
    try:
        for chunk in data:
            here.says(vm, chunk)
            tail.turn()
            if pause:
                hand_clock.at += 1
                tail.turn()
    except Killed:
        pass
    finally:
        tail.close()
    for chunk in data:
        here.says(vm, chunk)
    with open(here.layout.console_log(vm), "rb") as raw:
        said = raw.read()
    again = Tail.open(vm, LogFile.open(str(here.log_path(vm))), here.layout, hand_clock, PACE)
    again.turn()
    again.finish()
    assert here.text(vm) == said.replace(b"\r\n", b"\n")


def whole_lines(machine: Any, vm: Any) -> list[tuple[str, str, str]]:
    """Stream, tag and content of each."""
    lines = machine.log_path(vm).read_text().splitlines()
    return [(stream, tag, content) for _stamp, stream, tag, content in (line.split(" ", 3) for line in lines)]


def test_a_note_of_virtshim_is_not_appended_to_a_prompt(machine: Any, opened: Any, vm: Any, hand_clock: Any) -> None:
    """Readers put the contents together, and the prompt has no end of its line."""
    tail = opened()
    machine.says(vm, b"a\nlogin: ")
    tail.turn()
    hand_clock.at += PACE.flush_after
    tail.turn()
    tail.note("virtshim: paused")
    tail.note("virtshim: paused is over")
    machine.says(vm, b"root\n")
    tail.turn()
    assert whole_lines(machine, vm) == [
        ("stdout", "F", "a"),
        ("stdout", "P", "login: "),
        ("stderr", "F", ""),
        ("stderr", "F", "virtshim: paused"),
        ("stderr", "F", "virtshim: paused is over"),
        ("stdout", "F", "root"),
    ]


def test_a_failed_write_of_a_note_leaves_no_partial_line_and_loses_no_output(
    machine: Any, opened: Any, vm: Any, hand_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = opened()
    machine.says(vm, b"one\ntwo")
    tail.turn()

    append = LogFile.append

    def is_full(log: LogFile, text: bytes) -> None:
        append(log, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "append", is_full)
        with pytest.raises(ResourceExhausted, match="No space left on device; free space"):
            tail.note("virtshim: disk_full: no room")
    tail.note("virtshim: disk_full is over")
    hand_clock.at += PACE.retry_after
    machine.says(vm, b" more\n")
    tail.turn()
    assert whole_lines(machine, vm) == [
        ("stdout", "F", "one"),
        ("stderr", "F", "virtshim: disk_full is over"),
        ("stdout", "F", "two more"),
    ]
