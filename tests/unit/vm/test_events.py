"""Waiters and callbacks get libvirt's events in order, without a real libvirt."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from virtshim.model.errors import Unavailable
from virtshim.vm.events import Lifecycle

A, B, C = (uuid.UUID(int=n) for n in range(1, 4))
WAIT_LIMIT = 10.0


@pytest.fixture
def lifecycle() -> Iterator[Lifecycle]:
    lifecycle = Lifecycle(lambda: [A, B])
    yield lifecycle
    lifecycle.close()


class Heard:
    """A callback that can be held up."""

    def __init__(self) -> None:
        self.domains: list[uuid.UUID] = []
        self.gate = threading.Event()
        self.inside = threading.Event()
        self.changed = threading.Condition()

    def __call__(self, domain: uuid.UUID) -> None:
        self.inside.set()
        assert self.gate.wait(WAIT_LIMIT)
        with self.changed:
            self.domains.append(domain)
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.domains) >= count, WAIT_LIMIT), self.domains


def test_a_waiter_is_removed_when_its_block_is_left(lifecycle: Lifecycle) -> None:
    with lifecycle.watching(A) as event:
        lifecycle.happened(B)
        assert not event.is_set()
        lifecycle.happened(A)
        assert event.is_set()
    event.clear()
    lifecycle.happened(A)
    assert not event.is_set()


def test_events_that_pile_up_are_delivered_once(lifecycle: Lifecycle) -> None:
    heard = Heard()
    lifecycle.add_callback(heard)
    lifecycle.happened(A)
    assert heard.inside.wait(WAIT_LIMIT)
    for _ in range(100):
        lifecycle.happened(A)
    heard.gate.set()
    heard.wait_for(2)
    lifecycle.close()
    assert heard.domains == [A, A]


def test_a_listing_that_crashes_does_not_stop_later_events() -> None:
    crashed = threading.Event()

    def everything() -> list[uuid.UUID]:
        if crashed.is_set():
            return [C]
        crashed.set()
        raise RuntimeError("a defect")

    lifecycle, heard = Lifecycle(everything), Heard()
    heard.gate.set()
    lifecycle.add_callback(heard)
    lifecycle.events_were_lost()
    assert crashed.wait(WAIT_LIMIT)
    lifecycle.events_were_lost()
    heard.wait_for(1)
    lifecycle.close()
    assert heard.domains == [C]


def test_a_domain_whose_callback_hangs_holds_up_no_other(lifecycle: Lifecycle) -> None:
    hangs, heard = Heard(), Heard()
    heard.gate.set()

    def callback(domain: uuid.UUID) -> None:
        (hangs if domain == A else heard)(domain)

    lifecycle.add_callback(callback)
    lifecycle.happened(A)
    assert hangs.inside.wait(WAIT_LIMIT)
    others = [uuid.UUID(int=n) for n in range(100, 120)]
    for domain in others:
        lifecycle.happened(A)
        lifecycle.happened(domain)
    heard.wait_for(len(others))
    assert sorted(heard.domains) == others
    hangs.gate.set()
    hangs.wait_for(2)
    lifecycle.close()
    assert hangs.domains == [A, A]


def test_one_domains_events_are_delivered_in_order(lifecycle: Lifecycle) -> None:
    inside, most, told = 0, 0, threading.Semaphore(0)
    changed = threading.Lock()

    def callback(domain: uuid.UUID) -> None:
        nonlocal inside, most
        with changed:
            inside += 1
            most = max(most, inside)
        lifecycle.happened(B)  # another thread could begin it now
        with changed:
            inside -= 1
        told.release()

    lifecycle.add_callback(callback)
    lifecycle.happened(B)
    for _ in range(50):
        assert told.acquire(timeout=WAIT_LIMIT)
    lifecycle.close()
    assert most == 1


def test_threads_are_few_however_many_domains_hang(lifecycle: Lifecycle) -> None:
    heard = Heard()
    lifecycle.add_callback(heard)
    for n in range(100):
        lifecycle.happened(uuid.UUID(int=n))
    assert heard.inside.wait(WAIT_LIMIT)
    assert sum(thread.name == "power-events" for thread in threading.enumerate()) <= 16
    heard.gate.set()
    heard.wait_for(100)


def test_a_slow_callback_does_not_hold_up_waiters(lifecycle: Lifecycle) -> None:
    heard = Heard()
    lifecycle.add_callback(heard)
    lifecycle.happened(A)
    assert heard.inside.wait(WAIT_LIMIT)
    with lifecycle.watching(B) as event:
        lifecycle.happened(B)
        assert event.is_set()
    heard.gate.set()


def test_a_reconnect_wakes_every_waiter_and_gives_an_event_for_every_vm(lifecycle: Lifecycle) -> None:
    heard = Heard()
    heard.gate.set()
    lifecycle.add_callback(heard)
    with lifecycle.watching(C) as event:
        lifecycle.events_were_lost()
        assert event.is_set()
    heard.wait_for(2)
    assert sorted(heard.domains) == [A, B]


def test_the_worker_survives_callbacks_and_lists_that_fail() -> None:
    def unreachable() -> list[uuid.UUID]:
        raise Unavailable("gone again")

    lifecycle = Lifecycle(unreachable)
    heard = Heard()
    heard.gate.set()

    def bad(domain: uuid.UUID) -> None:
        raise RuntimeError(str(domain))

    lifecycle.add_callback(bad)
    lifecycle.add_callback(heard)
    lifecycle.events_were_lost()
    lifecycle.happened(A)
    heard.wait_for(1)
    lifecycle.close()
    assert heard.domains == [A]


def test_an_event_is_delivered_even_if_no_new_thread_can_start(
    lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    heard.gate.set()
    lifecycle.add_callback(heard)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lifecycle.happened(A)
    lifecycle.happened(B)
    lifecycle.events_were_lost()
    heard.wait_for(3)
