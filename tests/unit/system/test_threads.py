"""If the system refuses a thread for a moment, the work can be requested again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.guest.command import CommandResult
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason
from virtshim.system.threads import ContainerThreads, Workers, lasting, lasting_threads
from virtshim.vm.bounded import EarlyCalls

CONTAINER = ContainerId("c" * 64)


@pytest.fixture
def no_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)


@pytest.mark.usefixtures("no_thread_once")
def test_work_for_a_container_begins_with_the_next_request_after_a_refused_thread() -> None:
    threads, ran = ContainerThreads("test"), threading.Event()
    with pytest.raises(RuntimeError):
        threads.start(CONTAINER, ran.set)
    threads.start(CONTAINER, ran.set)
    assert ran.wait(10)
    threads.close()


def test_work_requested_meanwhile_runs_even_if_the_running_work_crashes() -> None:
    threads, begun, go, ran = ContainerThreads("test"), threading.Event(), threading.Event(), threading.Event()

    def crash() -> None:
        begun.set()
        go.wait(10)
        raise OSError(24, "Too many open files")

    threads.start(CONTAINER, crash)
    assert begun.wait(10)
    threads.start(CONTAINER, ran.set, again=True)
    go.set()
    assert ran.wait(10)
    threads.close()


@pytest.mark.usefixtures("no_thread_once")
def test_a_call_that_never_began_is_not_waited_for() -> None:
    calls, domain = EarlyCalls(), uuid.uuid4()
    with pytest.raises(RuntimeError):
        calls.call(domain, lambda: None, lambda: False, threading.Event())
    calls.wait(domain)


def test_devices_are_released_by_the_next_look(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.outside.devices.add_function("/dev/vfio/7", "0000:3b:00.0")
    container = world.create(world.run(), config=container_config(devices=(CriDevice("/dev/vfio/7", "/dev/vfio/7"),)))
    world.start(container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        world.outside.vms.deliver()
    assert world.container(container).claims != ()
    world.app.devices.releases.begin_all()
    eventually(lambda: world.container(container).claims == ())


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2, "test-worker")
    yield workers
    workers.shutdown()


def test_work_waits_for_a_worker_when_the_system_has_no_thread_to_give(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, go = threading.Event(), threading.Event()

    def work() -> str:
        busy.set()
        go.wait(10)
        return "done"

    first = workers.submit(work)
    assert busy.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        second = workers.submit(work)
    assert not second.done()
    go.set()
    assert (first.result(10), second.result(10)) == ("done", "done")


def test_a_refused_thread_does_not_reduce_the_number_of_workers(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        for _ in range(3):
            workers.submit(str).result(10)
    met = threading.Barrier(2)
    both = [workers.submit(met.wait, 10) for _ in range(2)]
    assert sorted(one.result(10) for one in both) == [0, 1]


def test_workers_are_limited_in_number_and_reused(workers: Workers) -> None:
    names = {workers.submit(lambda: threading.current_thread().name).result(10) for _ in range(20)}
    many = [workers.submit(threading.Event().wait, 0.01) for _ in range(20)]
    assert [one.result(10) for one in many] == [False] * 20
    assert len(names) <= 2
    assert sum(thread.name.startswith("test-worker") for thread in threading.enumerate()) <= 2


def test_exceptions_of_work_are_raised_and_closed_workers_refuse_work() -> None:
    workers, busy, go = Workers(1, "test-worker"), threading.Event(), threading.Event()
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result(10)
    workers.submit(lambda: (busy.set(), go.wait(10)))
    assert busy.wait(10)
    waiting = workers.submit(str)
    workers.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit(str)


def test_a_missing_thread_is_reported_until_it_runs_again() -> None:
    died, over = threading.Event(), threading.Event()

    def die() -> None:
        died.set()
        raise OSError(24, "Too many open files")

    lasting(die, "test-lasting").join(10)
    assert died.is_set()
    assert lasting_threads()["test-lasting"] is False
    again = lasting(lambda: over.wait(10), "test-lasting")
    assert lasting_threads()["test-lasting"] is True
    over.set()
    again.join(10)
    assert "test-lasting" not in lasting_threads()


def _refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_guest_that_restarts_without_a_free_thread_is_set_up_by_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = threading.Semaphore(0)

    def run(*_: object) -> CommandResult:
        set_up.release()
        return CommandResult(0, b"", b"")

    world.outside.guests.do = run
    container = world.create(world.run(config=sandbox_config(sysctls={"net.core.somaxconn": "321"})))
    world.start(container)
    assert set_up.acquire(timeout=10)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        world.app.guest_set_up.changed(world.domain(container))
    world.app.watch.look()
    assert set_up.acquire(timeout=10)


def test_a_guest_is_not_left_frozen_if_no_thread_can_thaw_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, container = world.running()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("freeze-limit"):
            _refuse(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        world.app.watch.freezer.hold(world.container(container), 60.0)
    eventually(lambda: not world.outside.guests.frozen)
    assert not world.app.watch.freezer.is_held(container)
