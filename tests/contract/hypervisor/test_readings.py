"""Every hypervisor reports statistics of running VMs, and of no others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from pathlib import Path

import pytest
from contract.hypervisor.worlds import WAIT_LIMIT, World
from fakes.processes import hanging
from podclient import wait_until


def test_statistics_have_only_running_vms_that_were_requested(world: World) -> None:
    running, off = world.spec("a"), world.spec("b")
    world.running("a")
    world.hypervisor.define(off)
    (world.directory / "disk.raw").rename(world.directory / "busy.raw")
    unasked = world.spec("c")
    world.running("c")
    before = time.time_ns()
    found = world.usage_of(running, off)
    assert list(found) == [running.uuid]
    counters = found[running.uuid].counters
    assert counters is not None
    assert before <= counters.taken_at <= time.time_ns()
    assert unasked.uuid in world.usage_of(unasked)


def test_an_ended_vm_has_no_statistics(world: World) -> None:
    spec = world.spec()
    world.running()
    assert spec.uuid in world.usage_of(spec)
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert world.usage_of(spec) == {}


def test_each_reading_has_new_cpu_time_memory_and_disk_numbers(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it knows states only
    spec = world.spec()
    world.running()
    first, second = (world.usage_of(spec)[spec.uuid] for _ in range(2))
    assert first.counters is not None
    assert second.counters is not None
    assert second.counters.taken_at > first.counters.taken_at
    assert first.counters.cpu is not None
    assert second.counters.cpu is not None
    assert 0 < first.counters.cpu <= second.counters.cpu
    assert first.counters.memory is not None
    assert first.counters.memory.maximum >= spec.size.memory_bytes
    assert [block.device for block in first.counters.blocks] == ["vda"]
    assert [vcpu.number for vcpu in first.counters.vcpus] == [0]
    assert first.process is not None
    assert first.process.resident > 1 << 20
    assert first.process.threads > 1
    assert first.process.descriptors > first.process.sockets > 0


def test_statistics_do_not_wait_for_a_vm_that_is_starting(world: World, request: pytest.FixtureRequest) -> None:
    if "qemu" not in request.node.name:
        return  # only a real start opens the console's log
    healthy = world.spec("a")
    world.running("a")
    (world.directory / "disk.raw").rename(world.directory / "busy.raw")
    starting = world.spec("b")
    os.mkfifo(starting.console_log)
    world.hypervisor.define(starting)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as reading:
        start = pool.submit(world.hypervisor.start, starting.uuid)
        try:
            # libvirt opens it for writing, and has the VM locked.
            wait_until(_somebody_waits_for_a_reader, WAIT_LIMIT, "the console's log is opened")
            found = world.usage_of(starting, healthy)
            assert not start.done()
        finally:
            reading.callback(os.close, os.open(starting.console_log, os.O_RDONLY | os.O_NONBLOCK))
            start.result(WAIT_LIMIT)
    assert list(found) == [healthy.uuid]
    assert found[healthy.uuid].counters is not None


def _somebody_waits_for_a_reader() -> bool:
    """Whether a thread of this process waits for the reader of a named pipe."""
    return any(task.read_text() == "wait_for_partner" for task in Path("/proc/self/task").glob("*/wchan"))


def test_a_hung_vm_does_not_fail_the_statistics_of_others(world: World, request: pytest.FixtureRequest) -> None:
    if "qemu" not in request.node.name:
        return  # only a real process can be stopped
    broken = world.spec("a")
    world.running("a")
    (world.directory / "disk.raw").rename(world.directory / "busy.raw")
    healthy = world.spec("b")
    world.running("b")
    process = world.usage_of(broken)[broken.uuid].process
    assert process is not None
    with hanging(process.pid):
        for _ in range(2):
            before = len(world.questions)
            found = world.usage_of(broken, healthy)
            whole = found[healthy.uuid].counters
            assert whole is not None
            assert whole.memory is not None
            assert whole.blocks
            # libvirt still knows those numbers of the hung VM that do not need QEMU.
            rest = found[broken.uuid]
            assert rest.process is not None
            assert rest.counters is not None
            assert rest.counters.cpu is not None
        assert len(world.questions) == before + 1, "the second list need not wait again"
