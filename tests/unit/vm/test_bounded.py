"""A call that a hung VM keeps is left behind, and other calls do not notice."""

import threading
import uuid
from collections.abc import Iterator

import pytest

from virtshim.model.errors import DeadlineExceeded, WrongState
from virtshim.vm.bounded import BoundedCalls, EarlyCalls

VM, OTHER = uuid.uuid4(), uuid.uuid4()
SHORT, LONG = 0.02, 20.0


@pytest.fixture
def wakes() -> Iterator[threading.Event]:
    """Hung calls wait for it."""
    event = threading.Event()
    yield event
    event.set()


def test_a_bounded_call_returns_the_calls_result() -> None:
    assert BoundedCalls("ask").call(VM, lambda: 7, LONG) == 7


def test_a_bounded_call_raises_the_calls_error() -> None:
    def refuse() -> None:
        raise WrongState("off")

    with pytest.raises(WrongState, match="off"):
        BoundedCalls("ask").call(VM, refuse, LONG)


def test_a_hanging_call_is_abandoned_and_the_next_call_for_the_vm_fails_at_once(wakes: threading.Event) -> None:
    calls = BoundedCalls("ask")
    with pytest.raises(DeadlineExceeded, match=f"ask VM {VM}: its QEMU does not answer"):
        calls.call(VM, wakes.wait, SHORT)
    with pytest.raises(DeadlineExceeded):
        calls.call(VM, lambda: 7, LONG)
    assert calls.call(OTHER, lambda: 7, LONG) == 7


def test_a_vm_that_answers_again_is_asked_again(wakes: threading.Event) -> None:
    calls, over = BoundedCalls("ask"), threading.Event()

    def hang() -> None:
        wakes.wait()
        over.set()

    with pytest.raises(DeadlineExceeded):
        calls.call(VM, hang, SHORT)
    wakes.set()
    assert over.wait(LONG)
    for thread in threading.enumerate():
        if thread.name == "bounded-call":
            thread.join(LONG)
    assert calls.call(VM, lambda: 7, LONG) == 7


class Slow:
    """A call that ends when it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.let_go.wait(LONG)


def test_a_call_that_has_taken_effect_is_left_behind_and_can_be_waited_for() -> None:
    calls, act, news, done = EarlyCalls(), Slow(), threading.Event(), threading.Event()
    leader = threading.Thread(target=lambda: calls.call(VM, act, done.is_set, news))
    leader.start()
    assert act.begun.wait(LONG)
    done.set()
    news.set()
    leader.join(LONG)
    assert not leader.is_alive(), "it returns although the call is under way"
    calls.wait(uuid.uuid4())  # that of another VM is not waited for
    waiting = threading.Thread(target=lambda: calls.wait(VM))
    waiting.start()
    act.let_go.set()
    waiting.join(LONG)
    assert not waiting.is_alive()
    calls.close(LONG)


def test_a_call_that_others_depend_on_is_waited_for_after_it_has_taken_effect() -> None:
    calls, act, news, done = EarlyCalls(), Slow(), threading.Event(), threading.Event()
    done.set()
    news.set()
    leader = threading.Thread(target=lambda: calls.call(VM, act, done.is_set, news, LONG))
    leader.start()
    assert act.begun.wait(LONG)
    assert leader.is_alive()
    act.let_go.set()
    leader.join(LONG)
    assert not leader.is_alive()


def test_a_hanging_call_is_waited_for_only_up_to_the_limit() -> None:
    calls, act, news = EarlyCalls(), Slow(), threading.Event()
    calls.call(VM, act, lambda: True, news, SHORT)
    act.let_go.set()
    calls.wait(VM)


def test_a_call_without_news_returns_at_its_own_end_with_what_it_raised() -> None:
    calls = EarlyCalls()
    calls.call(VM, lambda: None, lambda: False, threading.Event())
    with pytest.raises(ZeroDivisionError):
        calls.call(VM, lambda: 1 // 0, lambda: False, threading.Event())
    calls.wait(VM)
