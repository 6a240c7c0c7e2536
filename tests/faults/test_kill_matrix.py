"""SIGKILL of any daemon at the steps of each life-cycle call, on real parts. Afterwards statuses are true, the VM beside it
has noticed nothing, the repeated call finishes the work, and after removal nothing is left.

A first run counts the steps: they are whatever the code calls. Runs with `--all-faults` take each of them, before and after
it has its effect; others a spread-out sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from fakes.loop import no_loop_devices
from mortal_node import MortalNode
from podclient import wait_until
from work import Work, working

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Call:
    prepare: tuple[Callable[[Work], None], ...]
    make: Callable[[Work], None]
    done: Callable[[Work], bool]


_ON_VOLUME = "CreateContainer on a volume"
_RUNNING = (Work.pull, Work.run, Work.create, Work.start)

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
}
MATRIX: list[Any] = [
    pytest.param(name, "virtshim", marks=pytest.mark.skipif(**no_loop_devices()))
    if name == _ON_VOLUME
    else (name, "virtshim")
    for name in CALLS
]
MATRIX += [(name, "tapmanager") for name in ("RunPodSandbox", "StartContainer", "StopPodSandbox", "RemovePodSandbox")]
MATRIX += [(name, "shares") for name in ("CreateContainer", "StartContainer", "StopContainer", "RemovePodSandbox")]
_SAMPLE = 3


def steps_of(node: MortalNode, call: Call, daemon: str) -> list[str]:
    with working(node, *call.prepare) as work, node.armed(daemon, 0, "before"):
        call.make(work)
        assert call.done(work)
        return node.killers[daemon].steps()


def sample(points: list[Any], wanted: int) -> list[Any]:
    """Spread over the list, its ends included."""
    if len(points) <= wanted:
        return points
    return [points[round(at * (len(points) - 1) / (wanted - 1))] for at in range(wanted)]


@pytest.mark.parametrize(("name", "daemon"), MATRIX)
def test_a_kill_at_any_step_is_made_good(
    mortal: MortalNode, name: str, daemon: str, request: pytest.FixtureRequest
) -> None:
    call = CALLS[name]
    steps = steps_of(mortal, call, daemon)
    assert steps, f"{name} does nothing that {daemon} could die of"
    points = [(number, when) for number in range(1, len(steps) + 1) for when in ("before", "after")]
    if not request.config.getoption("--all-faults"):
        points = sample(points, _SAMPLE)
    killed = 0
    for number, when in points:
        with working(mortal, *call.prepare) as work:
            killed += dies_and_recovers(mortal, work, call, daemon, number, when, steps)
    print(f"KILLS {name} {daemon}: {killed} of {len(points)} points taken, {2 * len(steps)} there are")
    assert killed >= len(points) // 2, f"only {killed} of {len(points)} points were reached"


def dies_and_recovers(
    node: MortalNode, work: Work, call: Call, daemon: str, number: int, when: str, steps: list[str]
) -> bool:
    where = f"killed {when} step {number} ({steps[number - 1]})"
    with node.armed(daemon, number, when):
        failure = attempt(call, work)
        died = node.died(daemon, within=5.0 if failure is None and number <= len(steps) - 1 else 1.0)
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
    """kubelet repeats every few seconds; at most thrice here."""
    for _ in range(2):
        error = attempt(call, work)
        if error is None:
            return
    error = attempt(call, work)
    assert error is None, f"{where}: repeated calls fail: {error}"
