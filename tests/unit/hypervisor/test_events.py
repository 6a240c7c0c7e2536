"""Waiters and callbacks, without libvirt."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from virtshim.domain.errors import Unavailable
from virtshim.hypervisor.events import Lifecycle

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


def test_a_waiter_is_forgotten_when_its_block_is_left(lifecycle: Lifecycle) -> None:
    with lifecycle.watching(A) as event:
        lifecycle.happened(B)
        assert not event.is_set()
        lifecycle.happened(A)
        assert event.is_set()
    event.clear()
    lifecycle.happened(A)
    assert not event.is_set()


def test_events_that_pile_up_are_told_once_each(lifecycle: Lifecycle) -> None:
    heard = Heard()
    lifecycle.add_callback(heard)
    lifecycle.happened(A)
    assert heard.inside.wait(WAIT_LIMIT)
    for _ in range(100):
        lifecycle.happened(B)
        lifecycle.happened(A)
    heard.gate.set()
    heard.wait_for(3)
    lifecycle.close()
    assert heard.domains == [A, B, A]


def test_a_slow_callback_does_not_hold_up_waiters(lifecycle: Lifecycle) -> None:
    heard = Heard()
    lifecycle.add_callback(heard)
    lifecycle.happened(A)
    assert heard.inside.wait(WAIT_LIMIT)
    with lifecycle.watching(B) as event:
        lifecycle.happened(B)
        assert event.is_set()
    heard.gate.set()


def test_after_a_reconnect_every_waiter_wakes_and_every_vm_is_told(lifecycle: Lifecycle) -> None:
    heard = Heard()
    heard.gate.set()
    lifecycle.add_callback(heard)
    with lifecycle.watching(C) as event:
        lifecycle.events_were_lost()
        assert event.is_set()
    heard.wait_for(2)
    assert heard.domains == [A, B]


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
