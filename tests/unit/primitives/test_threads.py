"""A system that has no thread to give for once: what asked for it may ask again."""

from __future__ import annotations

import threading
import uuid

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config

from virtshim.domain.devices.granted import CriDevice
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OffReason
from virtshim.hypervisor.bounded import EarlyCalls
from virtshim.primitives.container_threads import ContainerThreads

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
def test_what_is_done_for_a_container_is_begun_by_the_next_request() -> None:
    threads, ran = ContainerThreads("test"), threading.Event()
    with pytest.raises(RuntimeError):
        threads.start(CONTAINER, ran.set)
    threads.start(CONTAINER, ran.set)
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
