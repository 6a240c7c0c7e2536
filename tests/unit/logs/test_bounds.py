"""If a guest writes endlessly, the right part of its output is kept, in bounded disk space."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from virtshim.logs.files import LogFile
from virtshim.logs.follower import KEEP_BYTES, ConsoleLogs, RawTail
from virtshim.logs.tail import Pace, Tail
from virtshim.system.rate_limits import TokenBucket

MIB = 1 << 20
PACE = Pace(turn_bytes=256 * 1024, log_rate=MIB, log_burst=2 * MIB, backlog=4 * MIB)
LINE = b"%011d" + b"x" * 116 + b"\n"  # 128 bytes; 172 in the log
Eventually = Callable[..., None]


def lines(count: int, start: int = 0) -> bytes:
    return b"".join(LINE % number for number in range(start, start + count))


def allocated(path: str) -> int:
    return os.stat(path).st_blocks * 512


@pytest.fixture
def vm(machine: Any) -> Any:
    return machine.container()


@pytest.fixture
def raw(machine: Any, vm: Any) -> str:
    return str(machine.layout.console_log(vm))


@pytest.fixture
def tail(machine: Any, vm: Any, hand_clock: Any) -> Iterator[Tail]:
    log = LogFile.open(str(machine.log_path(vm)))
    tail = Tail.open(vm, log, machine.layout, hand_clock, PACE)
    yield tail
    tail.close()


def turns(tail: Tail) -> float | None:
    """As many as there may be now; when the next may be."""
    while (turn := tail.turn()).more:
        pass
    return turn.due


def test_a_log_grows_by_a_burst_and_then_at_a_steady_rate(machine: Any, tail: Tail, vm: Any, hand_clock: Any) -> None:
    machine.says(vm, lines(24_000))  # 3 MB, and 4 in the log
    due = turns(tail)
    size = machine.log_path(vm).stat().st_size
    assert 2 * MIB < size < 2.5 * MIB
    assert due is not None
    assert due == pytest.approx(hand_clock.at + (size - 2 * MIB) / MIB, abs=0.01), "the debt is waited off"
    hand_clock.at = due - 0.01
    turns(tail)
    assert machine.log_path(vm).stat().st_size == size
    for _ in range(20):
        hand_clock.at = turns(tail) or hand_clock.at
    assert machine.text(vm) == lines(24_000), "late, but all of it"


def test_empty_lines_count_with_their_size_in_the_log(machine: Any, tail: Tail, vm: Any) -> None:
    machine.says(vm, b"\n" * MIB)
    assert turns(tail) is not None
    assert machine.log_path(vm).stat().st_size < 5.5 * MIB


def test_a_backlog_loses_its_oldest_output_and_the_log_says_how_much(
    machine: Any, tail: Tail, vm: Any, raw: str, hand_clock: Any
) -> None:
    machine.says(vm, lines(8_192))
    turns(tail)
    before = machine.text(vm)
    machine.says(vm, lines(60_000, 8_192))
    turns(tail)
    assert allocated(raw) <= PACE.backlog // 2 + 2 * MIB
    for _ in range(40):
        hand_clock.at += 1.0
        turns(tail)
    text = machine.text(vm)
    assert text.startswith(before)
    told = re.search(rb"virtshim: (\d+) bytes of this console were dropped: [a-z ]*\n", text)
    assert told is not None
    kept = text[: told.start()] + text[told.end() :]
    assert len(kept) + int(told[1]) == 68_192 * len(LINE % 0), "what is not there was told, to the byte"
    assert text.endswith(lines(8_192, 60_000)), "the newest is there"


def test_the_note_about_lost_output_starts_on_its_own_line(machine: Any, tail: Tail, vm: Any, hand_clock: Any) -> None:
    machine.says(vm, b"half a li")
    turns(tail)
    machine.says(vm, b"ne\n" + lines(60_000))
    hand_clock.at += 100.0
    turns(tail)
    assert machine.text(vm).startswith(b"half a li\nvirtshim: ")


def test_the_raw_log_stays_limited_while_the_log_cannot_be_written(
    machine: Any, tail: Tail, vm: Any, raw: str, hand_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's file system is full; the raw log's may be the same one."""
    append = LogFile.append

    def full(log: LogFile, text: bytes) -> None:
        append(log, text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    machine.says(vm, b"before\n")
    turns(tail)
    monkeypatch.setattr(LogFile, "append", full)
    for start in range(0, 100_000, 10_000):
        machine.says(vm, lines(10_000, start))
        turns(tail)
        assert allocated(raw) <= PACE.backlog + 3 * MIB
        hand_clock.at += 0.5
    assert machine.text(vm) == b"before\n"
    monkeypatch.undo()
    for _ in range(20):
        hand_clock.at += 1.0
        turns(tail)
    text = machine.text(vm)
    assert text.startswith(b"before\nvirtshim: ")
    assert text.count(b"virtshim: ") == 1
    assert text.endswith(lines(8_192, 100_000 - 8_192))


def test_the_beginning_and_end_of_an_ended_guests_backlog_are_written(machine: Any, tail: Tail, vm: Any) -> None:
    machine.says(vm, lines(30_000) + b"Powering off.")
    tail.finish()
    assert machine.log_path(vm).stat().st_size < 5 * MIB
    text = machine.text(vm)
    assert text.startswith(lines(1_000))
    assert b"\nvirtshim: " in text
    assert text.endswith(lines(8_000, 22_000) + b"Powering off.")


def test_a_backlog_from_a_time_without_virtshim_is_cut_at_its_start(
    machine: Any, vm: Any, raw: str, make_logs: Any, eventually: Eventually
) -> None:
    machine.says(vm, lines(100_000))
    logs: ConsoleLogs = make_logs(PACE)
    logs.open(vm, str(machine.log_path(vm)))
    eventually(lambda: allocated(raw) <= PACE.backlog)
    logs.finish(vm)
    text = machine.text(vm)
    assert text.startswith(b"virtshim: ")
    assert text.endswith(lines(1, 99_999))


@pytest.mark.parametrize("log_file", ["", "a log"])
def test_a_console_without_a_log_keeps_its_last_part(
    machine: Any, vm: Any, raw: str, make_logs: Any, eventually: Eventually, log_file: str
) -> None:
    logs: ConsoleLogs = make_logs(Pace(log_rate=1e9, log_burst=1 << 30))
    logs.open(vm, str(machine.log_path(vm)) if log_file else "")
    for start in range(0, 400_000, 50_000):
        machine.says(vm, lines(50_000, start))
    most = MIB if log_file else KEEP_BYTES + MIB
    eventually(lambda: allocated(raw) <= most + 4096)
    if not log_file:
        data = Path(raw).read_bytes()
        assert data[-KEEP_BYTES:] == lines(400_000)[-KEEP_BYTES:]
        assert data[: KEEP_BYTES // 2] == bytes(KEEP_BYTES // 2)
    logs.reopen(vm)
    logs.finish(vm)


def test_the_last_part_is_kept_of_a_console_that_ended_unseen(machine: Any, vm: Any, raw: str) -> None:
    kept = RawTail(vm, raw)
    kept.finish()
    machine.says(vm, lines(400_000))
    later = RawTail(vm, raw)
    later.finish()
    assert later.is_closed
    assert KEEP_BYTES <= allocated(raw) <= KEEP_BYTES + MIB + 4096


def test_a_raw_log_that_cannot_be_trimmed_is_tried_again(
    machine: Any, vm: Any, raw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    machine.says(vm, lines(400_000))
    kept = RawTail(vm, raw)
    monkeypatch.setattr("virtshim.logs.files.punch_hole", refused)
    kept.turn()
    monkeypatch.undo()
    kept.turn()
    kept.close()
    assert allocated(raw) <= KEEP_BYTES + MIB + 4096


def test_an_allowance_accumulates_up_to_the_burst_and_debts_delay_writing() -> None:
    allowance = TokenBucket(rate=10, burst=100, now=0)
    allowance.spend(100, now=50)
    assert allowance.wait(50) == 0, "saved up: the burst, not more"
    allowance.spend(30, now=50)
    assert allowance.wait(50) == 3
    assert allowance.wait(53) == 0
    allowance.spend(1, now=54)
    assert allowance.wait(54) == 0
