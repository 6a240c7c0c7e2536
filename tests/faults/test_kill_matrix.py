"""After SIGKILL of any daemon at any step of a life-cycle call, statuses are true and the bystander VM is unaffected.
The repeated call finishes the work, and removal leaves nothing.

A first call counts the steps of all daemons. A run with `--all` kills at each of them, before and after the step has its
effect; other runs kill at one point of each row (`kill_points.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from fakes.loop import no_loop_devices
from kill_points import strike
from mortal_node import MortalNode
from podclient import wait_until
from work import Work, working

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Call:
    prepare: tuple[Callable[[Work], None], ...]
    make: Callable[[Work], None]
    done: Callable[[Work], bool]


_ON_VOLUME = "CreateContainer on a volume"
SAVE, RESTORE = "StopContainer that saves", "StartContainer that restores"
PUBLISH, FETCH = "StopPodSandbox with a state volume", "CreateContainer with a VM on a volume"
CONTINUE = "StartContainer that restores from a volume"
FIRST, WARM = "StartContainer whose template is made", "StartContainer from a template"
# These calls run in the sandbox of a pod that another runtime made, with passt.
ADOPT_CREATE, ADOPTED_START = "CreateContainer beside containers", "StartContainer beside containers"
ADOPTED_STOP, ADOPTED_REMOVE = "StopPodSandbox beside containers", "RemovePodSandbox beside containers"
_RUNNING = (Work.pull, Work.run, Work.create, Work.start)
_LASTING = (Work.pull, Work.run_lasting, Work.create, Work.start, Work.boot)
_COPIED = (Work.run_warm, Work.pull)
_MOVABLE = (Work.pull, Work.run_with_state_volume, Work.create, Work.start, Work.boot)

CALLS = {
    "RunPodSandbox": Call((), Work.run, Work.is_ready),
    "PullImage": Call((), Work.pull, Work.is_pulled),
    "RemoveImage": Call((Work.pull,), Work.remove_image, Work.is_image_removed),
    "CreateContainer": Call((Work.pull, Work.run), Work.create, Work.is_created),
    _ON_VOLUME: Call((Work.pull, Work.blank_volume, Work.run), Work.create_on_volume, Work.is_on_volume),
    "StartContainer": Call((Work.pull, Work.run, Work.create), Work.start, Work.is_running),
    "StopContainer": Call(_RUNNING, Work.stop, Work.is_stopped),
    "RemoveContainer": Call(_RUNNING, Work.remove, Work.is_removed),
    "StopPodSandbox": Call(_RUNNING, Work.stop_pod, Work.is_pod_stopped),
    "RemovePodSandbox": Call(_RUNNING, Work.remove_pod, Work.is_pod_removed),
    SAVE: Call(_LASTING, Work.save, Work.is_saved),
    RESTORE: Call((*_LASTING, Work.save, Work.next_pod, Work.create), Work.start, Work.is_restored),
    PUBLISH: Call((*_MOVABLE, Work.save), Work.stop_pod, Work.is_published),
    FETCH: Call((*_MOVABLE, Work.save, Work.lose_vm), Work.create, Work.is_fetched),
    CONTINUE: Call((*_MOVABLE, Work.save, Work.lose_vm, Work.create), Work.start, Work.is_restored_from_volume),
    FIRST: Call((*_COPIED, Work.forget_templates, Work.create), Work.start_first, Work.is_started_first),
    WARM: Call((*_COPIED, Work.make_template, Work.create), Work.start, Work.is_one_of_its_own),
}
# Each call must pass these steps, or it is not the call that its row means.
_PASSES = {
    (FIRST, "virtshim"): ("vm.templates.boot", "files.templates.seal"),
    (WARM, "virtshim"): ("vm.templates.await_devices", "files.templates.keep_disk"),
}
# A row takes only the steps that the other row's call does not have, because each of its points boots two guests.
_BEYOND = {FIRST: "StartContainer"}
_ADOPTED = (Work.pull, Work.others_pod, Work.create)
CALLS |= {
    ADOPT_CREATE: Call((Work.pull, Work.others_pod), Work.create, Work.is_created),
    ADOPTED_START: Call(_ADOPTED, Work.start, Work.is_running),
    ADOPTED_STOP: Call((*_ADOPTED, Work.start), Work.stop_pod, Work.is_pod_stopped),
    ADOPTED_REMOVE: Call((*_ADOPTED, Work.start), Work.remove_pod, Work.is_pod_removed),
}
MATRIX: list[Any] = [
    pytest.param(name, "virtshim", marks=pytest.mark.skipif(**no_loop_devices()))
    if name == _ON_VOLUME
    else (name, "virtshim")
    for name in CALLS
]
MATRIX += [
    (name, "tapmanager") for name in ("RunPodSandbox", "StartContainer", "StopPodSandbox", "RemovePodSandbox", RESTORE)
]
MATRIX += [(name, "shares") for name in ("CreateContainer", "StartContainer", "StopContainer", "RemovePodSandbox")]
MATRIX += [(name, "tapmanager") for name in (ADOPT_CREATE, ADOPTED_START, ADOPTED_STOP, ADOPTED_REMOVE)]
MATRIX += [(name, "shares") for name in (ADOPTED_START, ADOPTED_STOP, ADOPTED_REMOVE)]
# A template outlives a kill of tapmanager, but not one of virtshim. In this order one template serves both rows.
MATRIX.insert(MATRIX.index((WARM, "virtshim")), (WARM, "tapmanager"))


@dataclass(frozen=True)
class Point:
    """A point before or after a step of a call."""

    number: int
    when: str
    step: str
    is_last: bool

    def __str__(self) -> str:
        return f"killed {self.when} step {self.number} ({self.step})"


def points_of(node: MortalNode, name: str, daemon: str) -> list[Point]:
    """The points in the order of the call. The count of one call serves all its rows on this node."""
    steps = steps_of(node, name, daemon)
    known = set(steps_of(node, _BEYOND[name], daemon)) if name in _BEYOND else set()
    assert set(_PASSES.get((name, daemon), ())) <= set(steps) - known, steps
    return [
        Point(number, when, step, is_last=number == len(steps))
        for number, step in enumerate(steps, start=1)
        if step not in known
        for when in ("before", "after")
    ]


def steps_of(node: MortalNode, name: str, daemon: str) -> list[str]:
    if name not in node.steps:
        node.steps[name] = counted(node, CALLS[name])
    return node.steps[name][daemon]


def counted(node: MortalNode, call: Call) -> dict[str, list[str]]:
    """The steps of each daemon in one call."""
    with working(node, *call.prepare) as work, contextlib.ExitStack() as counting:
        for daemon in node.killers:
            counting.enter_context(node.armed(daemon, 0, "before"))
        call.make(work)
        wait_until(lambda: call.done(work), 20, "the call has done its work")
        return {daemon: killer.steps() for daemon, killer in node.killers.items()}


def kill_along(node: MortalNode, name: str, daemon: str, *, every: bool) -> None:
    """One row of the matrix."""
    call, points = CALLS[name], points_of(node, name, daemon)
    assert points, f"{name} does nothing that {daemon} could die of"

    def kill(point: Point) -> bool:
        with working(node, *call.prepare) as work:
            return dies_and_recovers(node, work, call, daemon, point)

    strike(f"{name} {daemon}", points, kill, every=every, at_least=lambda taken: taken // 2)


@pytest.mark.parametrize(("name", "daemon"), MATRIX)
def test_the_node_recovers_from_a_kill_at_any_step(
    mortal: MortalNode, name: str, daemon: str, every_point: bool
) -> None:
    kill_along(mortal, name, daemon, every=every_point)


def dies_and_recovers(node: MortalNode, work: Work, call: Call, daemon: str, point: Point) -> bool:
    where = str(point)
    with node.armed(daemon, point.number, point.when):
        failure = attempt(call, work)
        # The step may belong to a thread that has outlived the call.
        node.died(daemon, within=5.0 if failure is None and not point.is_last else 1.0)
    died = node.died(daemon, within=0.0)
    node.up()
    node.check_bystander(work.cri)
    if failure is not None or died:
        attempt_again(call, work, where)
    try:
        wait_until(lambda: call.done(work), 10, f"{where}: the repeated call has done its work")
    except TimeoutError:
        # A start that was cut off inside libvirt counts as running until libvirt has looked, and ends then.
        attempt_again(call, work, where)
        wait_until(lambda: call.done(work), 20, f"{where}: the call repeated later has done its work")
    return died


def attempt(call: Call, work: Work) -> grpc.RpcError | None:
    try:
        call.make(work)
    except grpc.RpcError as error:
        return error
    return None


def attempt_again(call: Call, work: Work, where: str) -> None:
    """Repeats the call as kubelet does every few seconds, here at most three times."""
    for _ in range(2):
        error = attempt(call, work)
        if error is None:
            return
    error = attempt(call, work)
    assert error is None, f"{where}: repeated calls fail: {error}"
