"""`virtshim up` restarts a daemon that dies, with growing pauses, and gives up on one that never starts."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field

import pytest
from fakes.clock import FakeClock

from virtshim.cli.daemons import Daemon, LastLines
from virtshim.cli.keep_running import keep
from virtshim.model.errors import Unavailable

pytestmark = pytest.mark.operator


@dataclass
class FakeDaemon:
    """`lives`: how many seconds each start lasts; -1: it ends before it is ready. It stays up after them."""

    clock: FakeClock
    name: str = "thing"
    lives: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: float | None = None
    code: int | None = -9

    def launch(self) -> None:
        self.starts.append(self.clock.monotonic())
        life = self.lives.pop(0) if self.lives else float("inf")
        self.ends = self.clock.monotonic() + life

    def is_ready(self) -> bool:
        assert self.ends is not None
        if self.ends < self.starts[-1]:
            raise Unavailable(f"{self.name} ended with code 1 before it was ready")
        return True

    @property
    def is_running(self) -> bool:
        return self.ends is None or self.clock.monotonic() < self.ends

    def last_lines(self) -> list[str]:
        return ["tapmanager: no such bridge"]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def kept(clock: FakeClock, seconds: float, *daemons: FakeDaemon) -> list[str]:
    """What it tells in that time."""
    stopping, said = threading.Event(), []
    clock.at(seconds, stopping.set)
    keep(daemons, stopping, clock, said.append)  # type: ignore[arg-type]
    return said


def pauses(daemon: FakeDaemon) -> list[float]:
    return [round(later - before, 1) for before, later in zip(daemon.starts, daemon.starts[1:], strict=False)]


def test_a_killed_daemon_is_restarted_at_once(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock, ends=clock.monotonic() + 100)
    said = kept(clock, 300, daemon)
    assert said == ["thing was killed by SIGKILL; starting it again", "thing runs again"]
    assert 1100 <= daemon.starts[0] <= 1101


def test_a_daemon_that_keeps_dying_gets_longer_pauses_but_is_never_given_up(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock, lives=[1.0] * 20, ends=clock.monotonic())
    kept(clock, 3600, daemon)
    assert len(daemon.starts) == 21
    found = pauses(daemon)
    assert found == sorted(found)
    assert 1.5 <= found[0] <= 2.5
    assert 31 <= found[-1] <= 32


def test_the_pause_is_short_again_after_a_long_run(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock, lives=[1.0, 1.0, 1.0, 1.0, 61.0], ends=clock.monotonic())
    kept(clock, 600, daemon)
    assert pauses(daemon)[-1] < 63


def test_a_daemon_that_never_starts_is_given_up_with_its_last_lines(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock, lives=[-1.0] * 100, ends=clock.monotonic())
    with pytest.raises(Unavailable) as given_up:
        kept(clock, 3600, daemon)
    assert str(given_up.value) == (
        "thing ended with code 1 before it was ready, 6 times in a row; giving up. The VMs keep running. Correct the fault, "
        "and run `virtshim up` again. Its last lines:\n  tapmanager: no such bridge"
    )
    assert len(daemon.starts) == 6
    assert clock.monotonic() - 1000 < 60


def test_failed_starts_with_good_starts_between_them_do_not_give_up(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock, lives=[-1.0] * 4 + [1.0] + [-1.0] * 4, ends=clock.monotonic())
    assert kept(clock, 600, daemon)[-1] == "thing runs again"


def test_a_daemon_in_its_pause_does_not_hold_up_others(clock: FakeClock) -> None:
    bad = FakeDaemon(clock, "bad", lives=[1.0] * 9, ends=clock.monotonic())
    good = FakeDaemon(clock, "good", ends=clock.monotonic() + 40)
    said = kept(clock, 45, bad, good)
    assert said[-2:] == ["good was killed by SIGKILL; starting it again", "good runs again"]


def test_a_stop_during_a_pause_takes_effect_at_once(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock, lives=[0.0] * 8, ends=clock.monotonic())
    kept(clock, 40, daemon)
    assert clock.monotonic() - 1000 < 41


def test_a_daemons_output_is_passed_on_and_its_last_lines_are_kept() -> None:
    read, write = os.pipe()
    child = Daemon(
        "child", (sys.executable, "-ISc", "import sys; [print(n, file=sys.stderr) for n in range(100)]; sys.exit(3)")
    )
    child.said = LastLines(write)
    with pytest.raises(Unavailable, match="ended with code 3"):
        child.start()
    assert child.last_lines() == [str(number) for number in range(88, 100)]
    os.close(write)
    with open(read) as passed_on:
        assert passed_on.read().split() == [str(number) for number in range(100)]
