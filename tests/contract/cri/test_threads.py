"""Calls that wait leave threads for the calls that kubelet repeats, because a node whose Status is late counts as
dead."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fakes.cri import pod, served
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.guest.command import CommandResult

PODS, STOPS, HOOKS = 10, 20, 10


def busy() -> int:
    """The number of threads with calls in progress; threads are created on demand."""
    return sum(thread.name.startswith("cri_") for thread in threading.enumerate())


def test_200_waiting_stops_and_100_waiting_hooks_do_not_block_status_and_lists(tmp_path: Path) -> None:
    with served(tmp_path) as (world, client, _):
        world.outside.clock.held = True
        world.outside.vms.shuts_down_after = None
        made = [world.running(f"pod-{number}")[1].value for number in range(PODS)]
        begun, over = threading.Semaphore(0), threading.Event()

        def hook(*_: object) -> CommandResult:
            begun.release()
            over.wait(120)
            return CommandResult(0, b"drained", b"")

        world.outside.guests.do = hook
        hooks = [
            client.runtime.ExecSync.future(pb.ExecSyncRequest(container_id=one, cmd=["drain"]))
            for one in made
            for _ in range(HOOKS)
        ]
        for _ in hooks:
            assert begun.acquire(timeout=60), "a preStop hook waits for others"
        stops = [
            client.runtime.StopContainer.future(pb.StopContainerRequest(container_id=one, timeout=3600))
            for one in made
            for _ in range(STOPS)
        ]
        wait_until(lambda: busy() >= len(hooks) + len(stops), 60, "all of them wait")

        assert client.Status(pb.StatusRequest()).status.conditions
        assert len(client.containers()) == len(client.pods()) == PODS
        assert client.status(made[0]).state == pb.CONTAINER_RUNNING
        assert client.run("one-more"), "and pods come up beside them"

        over.set()
        assert {call.result(60).stdout for call in hooks} == {b"drained"}
        for one in made:
            client.stop(one, 0)
        for call in stops:
            call.result(60)


def test_a_call_without_a_free_thread_is_answered_and_so_are_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(("cri_", "cri-frequent_")):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with served(tmp_path) as (world, client, _):
        world.outside.clock.held = True
        world.outside.vms.shuts_down_after = None
        made = world.running()[1].value
        stop = client.runtime.StopContainer.future(pb.StopContainerRequest(container_id=made, timeout=3600))
        wait_until(lambda: world.outside.vms.pressed, 20, "the one thread of calls that wait is busy")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            late = client.runtime.RunPodSandbox.future(pb.RunPodSandboxRequest(config=pod("late")), timeout=60)
            wait_until(lambda: refused, 20, "no thread was to be had")
            assert client.Status(pb.StatusRequest()).status.conditions
            assert len(client.pods()) == 1
        client.stop(made, 0)
        stop.result(60)
        assert late.result(60).pod_sandbox_id
