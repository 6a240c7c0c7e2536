"""A repeated call joins the first, and calls on one pod take turns."""

import threading
from collections.abc import Callable

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.model.container import ContainerName
from virtshim.model.errors import AlreadyExists, DeadlineExceeded, InternalError
from virtshim.model.ids import SandboxId
from virtshim.system.locks import Inflight, LeaveOff, PodLocks


class Slow:
    """A call that waits for its test."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.times = 0
        self._answer = answer

    def __call__(self) -> str:
        self.times += 1
        self.begun.set()
        assert self.go_on.wait(WAIT_LIMIT)
        return self._answer()


def never() -> str:
    pytest.fail("the repeat must not run")


class Config:
    """The same as any other, and noticed when it is compared: a repeat has come."""

    def __init__(self) -> None:
        self.compared = threading.Event()

    def __eq__(self, other: object) -> bool:
        self.compared.set()
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_repeat_gets_the_result_of_the_first() -> None:
    inflight, slow, config = Inflight[str](), Slow(lambda: "made"), Config()
    first = Background(lambda: inflight.run("key", config, slow, timeout=WAIT_LIMIT))
    slow.begun.wait(WAIT_LIMIT)
    repeat = Background(lambda: inflight.run("key", config, never, timeout=WAIT_LIMIT))
    assert config.compared.wait(WAIT_LIMIT)
    slow.go_on.set()
    assert (first.done(), repeat.done(), slow.times) == ("made", "made", 1)


def test_a_repeat_gets_the_error_of_the_first() -> None:
    def fails() -> str:
        raise InternalError("CNI said no")

    inflight, slow, config = Inflight[str](), Slow(fails), Config()
    first = Background(lambda: inflight.run("key", config, slow, timeout=WAIT_LIMIT))
    slow.begun.wait(WAIT_LIMIT)
    repeat = Background(lambda: inflight.run("key", config, never, timeout=WAIT_LIMIT))
    assert config.compared.wait(WAIT_LIMIT)
    slow.go_on.set()
    for caller in (first, repeat):
        with pytest.raises(InternalError, match="CNI said no"):
            caller.done()


def test_a_repeat_waits_no_longer_than_its_own_deadline() -> None:
    inflight, slow = Inflight[str](), Slow(lambda: "made")
    first = Background(lambda: inflight.run("key", "config", slow, timeout=WAIT_LIMIT))
    slow.begun.wait(WAIT_LIMIT)
    with pytest.raises(DeadlineExceeded, match="still being made by an earlier call"):
        inflight.run("key", "config", never, timeout=0)
    slow.go_on.set()
    assert first.done() == "made"


def test_the_same_key_with_something_different_is_refused_at_once() -> None:
    inflight, slow = Inflight[str](), Slow(lambda: "made")
    first = Background(lambda: inflight.run("key", "config", slow, timeout=WAIT_LIMIT))
    slow.begun.wait(WAIT_LIMIT)
    with pytest.raises(AlreadyExists, match="different configuration"):
        inflight.run("key", "other", never, timeout=WAIT_LIMIT)
    slow.go_on.set()
    first.done()


def test_calls_with_other_keys_do_not_wait() -> None:
    inflight, slow = Inflight[str](), Slow(lambda: "made")
    first = Background(lambda: inflight.run("key", "config", slow, timeout=WAIT_LIMIT))
    slow.begun.wait(WAIT_LIMIT)
    assert inflight.run("other", "config", lambda: "quick", timeout=0) == "quick"
    slow.go_on.set()
    first.done()


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_after_the_first_has_ended_runs_again(fails: bool) -> None:
    def answer() -> str:
        if fails:
            raise InternalError("no")
        return "first"

    inflight = Inflight[str]()
    if fails:
        with pytest.raises(InternalError):
            inflight.run("key", "config", answer, timeout=0)
    else:
        assert inflight.run("key", "config", answer, timeout=0) == "first"
    assert inflight.run("key", "other", lambda: "second", timeout=0) == "second"


def test_a_repeated_run_pod_sandbox_joins_the_first(world: World) -> None:
    gate = world.journal.hold("networks.attach")
    first = Background(world.run)
    gate.wait()
    repeat = Background(world.run)
    gate.open()
    assert first.done() == repeat.done()
    assert len(world.records.sandboxes.all()) == 1


def test_a_run_pod_sandbox_with_another_config_does_not_join(world: World) -> None:
    gate = world.journal.hold("networks.attach")
    first = Background(world.run)
    gate.wait()
    with pytest.raises(AlreadyExists, match=r"default/web \(uid uid-of-web, attempt 0\) is being made"):
        world.run(config=sandbox_config(hostname="other"))
    gate.open()
    first.done()


def test_a_caller_that_gave_up_finds_the_result_later(world: World) -> None:
    gate = world.journal.hold("networks.attach")
    first = Background(world.run)
    gate.wait()
    with pytest.raises(DeadlineExceeded):
        world.do.run_sandbox.run(pod_key(), sandbox_config(), world.deadline(0))
    gate.open()
    assert first.done() == world.run()


def test_a_repeated_create_container_joins_the_first_and_the_message_names_it(world: World) -> None:
    sandbox = world.run()
    gate = world.journal.hold("disks.create")
    first = Background(lambda: world.create(sandbox))
    gate.wait()
    repeat = Background(lambda: world.create(sandbox))
    with pytest.raises(DeadlineExceeded) as late:
        world.do.create_container.create(sandbox, ContainerName("vm", 0), container_config(), world.deadline(0))
    assert f"container vm (attempt 0) in sandbox {sandbox}" in str(late.value)
    gate.open()
    assert first.done() == repeat.done()


def test_a_slow_pod_does_not_hold_up_another(world: World) -> None:
    gate = world.journal.hold("networks.attach")
    first = Background(lambda: world.run("slow"))
    gate.wait()
    quick = world.run("quick")
    world.remove_sandbox(quick)
    gate.open()
    first.done()


# --- one lock a pod

POD, OTHER = SandboxId("a" * 64), SandboxId("b" * 64)


def test_calls_on_one_pod_take_turns() -> None:
    locks, order = PodLocks(), []
    with locks.held(POD):
        waiting = threading.Event()

        def second() -> None:
            waiting.set()
            with locks.held(POD):
                order.append("second")

        caller = Background(second)
        waiting.wait(WAIT_LIMIT)
        order.append("first")
    caller.done()
    assert order == ["first", "second"]


def test_a_thread_may_take_its_pods_lock_again() -> None:
    locks = PodLocks()
    with locks.held(POD), locks.held(POD):
        pass


def test_pods_do_not_wait_for_each_other() -> None:
    locks = PodLocks()

    def other() -> None:
        with locks.held(OTHER):
            pass

    with locks.held(POD):
        Background(other).done()


def test_a_caller_that_waits_for_a_guest_yields_to_one_that_ends_the_vm() -> None:
    locks = PodLocks()

    def end() -> None:
        with locks.held_to_end(POD):
            pass

    with locks.held_while_waiting(POD) as leave_off:
        ending = Background(end)
        assert leave_off.wait(WAIT_LIMIT)
    ending.done()
    with locks.held_while_waiting(POD) as leave_off:
        assert not leave_off.is_set(), "that is over"


def test_a_caller_does_not_wait_for_a_guest_while_its_vm_is_being_ended() -> None:
    locks = PodLocks()
    with locks.held_to_end(POD):
        with locks.held_while_waiting(POD) as leave_off:
            assert leave_off.is_set()
        with locks.held_while_waiting(OTHER) as leave_off:
            assert not leave_off.is_set()


def test_what_wakes_a_caller_is_called_when_it_should_give_up_and_never_later() -> None:
    leave_off, calls = LeaveOff(), []
    with leave_off.calling(lambda: calls.append("gone")):
        pass
    with leave_off.calling(lambda: calls.append("wakes")):
        leave_off.set()
    with leave_off.calling(lambda: calls.append("too late")):
        assert calls == ["wakes", "too late"]


def test_unused_locks_are_forgotten() -> None:
    locks = PodLocks()
    with pytest.raises(InternalError), locks.held(POD):
        raise InternalError("no")
    assert not locks.is_busy(POD)
