"""One call reads all VMs, and a call that does not return delays little."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping

import pytest
from structlog.testing import capture_logs

from virtshim.model.errors import Unavailable
from virtshim.vm.statistics import BulkStats, Stats

A, B = uuid.UUID(int=1), uuid.UUID(int=2)
WAIT_LIMIT = 0.3


class Libvirt:
    """Each VM in `hung` keeps the first call that asks it, for ever; later ones pass it by, as with NOWAIT."""

    def __init__(self) -> None:
        self.hung: set[uuid.UUID] = set()
        self.held: set[uuid.UUID] = set()
        self.dead = False
        self.released = threading.Event()
        self.calls = 0

    def read(self, _wanted: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Stats]:
        self.calls += 1
        if self.dead:
            self.released.wait()
        for domain in sorted(self.hung - self.held):
            self.held.add(domain)
            self.released.wait()
        return {A: {"cpu.time": 1}, B: {"cpu.time": 2}}


@pytest.fixture
def libvirt() -> Iterator[Libvirt]:
    made = Libvirt()
    yield made
    made.released.set()


def latest(stats: BulkStats) -> Mapping[uuid.UUID, Stats]:
    return stats.latest([A, B])[1]


def test_one_call_reads_all_vms(libvirt: Libvirt) -> None:
    before = time.time_ns()
    taken_at, rows = BulkStats(libvirt.read).latest([A, B])
    assert set(rows) == {A, B}
    assert before <= taken_at <= time.time_ns()
    assert libvirt.calls == 1


def test_a_hanging_vm_costs_one_late_call_and_no_numbers_of_others(libvirt: Libvirt) -> None:
    libvirt.hung = {A}
    stats = BulkStats(libvirt.read, WAIT_LIMIT)
    assert set(latest(stats)) == {A, B}
    assert libvirt.calls == 2
    assert set(latest(stats)) == {A, B}
    assert libvirt.calls == 3, "the call that hangs is not waited for again"


def test_two_hanging_vms_cost_two_late_calls(libvirt: Libvirt) -> None:
    libvirt.hung = {A, B}
    stats = BulkStats(libvirt.read, WAIT_LIMIT)
    assert set(latest(stats)) == {A, B}
    assert libvirt.calls == 3


def test_a_call_that_is_only_slow_is_still_the_answer(libvirt: Libvirt) -> None:
    first = threading.Event()

    def read(_wanted: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Stats]:
        if first.is_set():
            libvirt.released.wait()  # later calls are slower
            return {}
        first.set()
        threading.Event().wait(1.5 * WAIT_LIMIT)
        return {A: {"cpu.time": 1}}

    assert set(latest(BulkStats(read, WAIT_LIMIT))) == {A}


def test_many_callers_at_once_all_get_numbers(libvirt: Libvirt) -> None:
    together = threading.Barrier(8)

    def ask() -> set[uuid.UUID]:
        together.wait()
        return set(latest(stats))

    stats = BulkStats(libvirt.read)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [future.result() for future in [pool.submit(ask) for _ in range(8)]]
    assert answers == [{A, B}] * 8


def test_when_libvirt_hangs_the_answer_comes_without_numbers_and_calls_do_not_pile_up(libvirt: Libvirt) -> None:
    libvirt.dead = True
    stats = BulkStats(libvirt.read, WAIT_LIMIT)
    for _ in range(3):
        assert latest(stats) == {}
    assert libvirt.calls == 3
    for _ in range(1000):  # the time of a test is over if each waits
        assert latest(stats) == {}
    assert libvirt.calls == 3


def test_a_hanging_libvirt_is_logged_once_and_not_at_each_call(libvirt: Libvirt) -> None:
    libvirt.dead = True
    stats = BulkStats(libvirt.read, WAIT_LIMIT)
    with capture_logs() as logs:
        for _ in range(5):
            assert latest(stats) == {}
    assert [one["event"] for one in logs] == ["libvirt.statistics.late"]


def hang_then_answer(libvirt: Libvirt, stats: BulkStats, vms: int) -> list[str]:
    """One VM after another boots, each of which keeps one call and lets the next pass by; the events that are logged."""
    with capture_logs() as logs:
        for number in range(vms):
            libvirt.hung.add(uuid.UUID(int=10 + number))
            for _ in range(2):
                assert set(latest(stats)) == {A, B}
            libvirt.released.set()
            for thread in threading.enumerate():
                if thread.name == "vm-statistics":
                    thread.join(10)
            libvirt.released.clear()
    return [one["event"] for one in logs]


def test_calls_that_are_late_while_many_guests_boot_are_logged_once(libvirt: Libvirt) -> None:
    events = hang_then_answer(libvirt, BulkStats(libvirt.read, WAIT_LIMIT), 4)
    assert events == ["libvirt.statistics.late"]


def test_the_end_is_logged_when_no_call_was_late_for_a_while(libvirt: Libvirt) -> None:
    stats = BulkStats(libvirt.read, WAIT_LIMIT, calm=0.0)
    assert hang_then_answer(libvirt, stats, 1)[:2] == ["libvirt.statistics.late", "libvirt.statistics.back"]


def test_statistics_return_when_libvirt_answers_again(libvirt: Libvirt) -> None:
    libvirt.dead = True
    stats = BulkStats(libvirt.read, WAIT_LIMIT)
    assert latest(stats) == {}
    libvirt.dead = False
    libvirt.released.set()
    for thread in threading.enumerate():
        if thread.name == "vm-statistics":
            thread.join(10)
    assert set(latest(stats)) == {A, B}


def test_an_error_is_an_answer_without_numbers_at_once() -> None:
    def fail(_wanted: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Stats]:
        raise Unavailable("libvirt is gone")

    stats = BulkStats(fail, timeout=60)
    for _ in range(5):
        assert latest(stats) == {}
