"""The fake clock that a test moves and the machine's clock fulfil the contract of Clock."""

from __future__ import annotations

import threading

import pytest
from fakes.clock import FakeClock

from virtshim.system.clock import Clock, SystemClock

A_WHILE = 1 / 64  # seconds
IN_2020_NS = 1_577_836_800 * 10**9


@pytest.fixture(params=[FakeClock, SystemClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


def test_waiting_for_an_event_that_is_not_set_takes_the_full_time_and_returns_false(clock: Clock) -> None:
    before = clock.monotonic()
    assert not clock.wait(threading.Event(), A_WHILE)
    assert clock.monotonic() - before >= A_WHILE


def test_waiting_for_an_event_that_is_set_returns_true_at_once(clock: Clock) -> None:
    event = threading.Event()
    event.set()
    before = clock.monotonic()
    assert clock.wait(event, 3600.0)
    assert clock.monotonic() - before < 3600.0


def test_waiting_for_zero_seconds_only_checks(clock: Clock) -> None:
    assert not clock.wait(threading.Event(), 0.0)


def test_the_wall_clock_returns_nanoseconds_since_the_epoch(clock: Clock) -> None:
    first = clock.now_ns()
    clock.wait(threading.Event(), A_WHILE)
    assert IN_2020_NS < first < clock.now_ns()
