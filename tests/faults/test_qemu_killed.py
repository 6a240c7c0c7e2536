"""SIGKILL of a pod's QEMU at the steps of each call that has one, on real parts. The call may fail or succeed; what is told
afterwards is true, repeated calls finish the work, and after removal nothing is left.

As in the kill matrix, `--all-faults` takes each step, before and after it; other runs a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from mortal_node import MortalNode
from podclient import wait_until
from test_kill_matrix import CALLS, attempt, attempt_again, sample
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(1800)]

_SAMPLE = 3
_SOON = 20.0
# Killed, or ended by virtshim, or QEMU's end met the start.
_TRUE_CODES = {128, 137}


@dataclass(frozen=True)
class Strike:
    """Before or after which step."""

    number: int
    when: str
    name: str

    def __str__(self) -> str:
        return f"QEMU killed {self.when} step {self.number} ({self.name})"


def strikes(node: MortalNode, name: str) -> list[Strike]:
    """Those that can meet a QEMU: a start has one from `start` on, the others until `destroy`."""
    call = CALLS[name]
    with working(node, *call.prepare) as work, node.armed("virtshim", 0, "before"):
        call.make(work)
        wait_until(lambda: call.done(work), _SOON, f"{name} works")
        steps = node.killers["virtshim"].steps()
    points = [Strike(n, when, step) for n, step in enumerate(steps, start=1) for when in ("before", "after")]
    if name == "StartContainer":
        return points[points.index(Strike(steps.index("hypervisor.start") + 1, "after", "hypervisor.start")) :]
    return points[: points.index(Strike(steps.index("hypervisor.destroy") + 1, "after", "hypervisor.destroy"))]


@pytest.mark.parametrize(
    "name", ["StartContainer", "StopContainer", "StopPodSandbox", "RemoveContainer", "RemovePodSandbox"]
)
def test_a_qemu_killed_at_any_step_is_told_truly(mortal: MortalNode, name: str, request: pytest.FixtureRequest) -> None:
    points = strikes(mortal, name)
    chosen = points if request.config.getoption("--all-faults") else sample(points, _SAMPLE)
    struck = sum(struck_and_true(mortal, name, point) for point in chosen)
    print(f"QEMU KILLS {name}: {struck} of {len(chosen)} points met a QEMU, {len(points)} there are")
    assert struck > 0


def struck_and_true(node: MortalNode, name: str, point: Strike) -> bool:
    """Whether there was a QEMU to kill."""
    call = CALLS[name]
    assert node.bystander is not None
    spared = node.bystander.pids
    with working(node, *call.prepare) as work:
        with node.armed("virtshim", point.number, point.when, "qemu-system", spared):
            failure = attempt(call, work)
        struck = node.killers["virtshim"].killed()
        assert node.died("virtshim", within=0.0) is False
        wait_until(lambda: node.qemu_pids() <= spared or not struck, _SOON, f"{point}: it is gone")
        node.check_bystander(work.cri)
        if name == "StartContainer":
            if struck:
                ended_truly(work, point)
            attempt_again(call, work, str(point))
        elif failure is not None:
            attempt_again(call, work, str(point))
        wait_until(lambda: call.done(work), _SOON, f"{point}: the call's work is done")
    return bool(struck)


def ended_truly(work: Work, point: Strike) -> None:
    def has_ended() -> bool:
        return work.cri.status(work.container).state == pb.CONTAINER_EXITED

    wait_until(has_ended, _SOON, f"{point}: the container is EXITED")
    status = work.cri.status(work.container)
    assert status.exit_code in _TRUE_CODES, f"{point}: {status.exit_code} {status.reason} {status.message}"
    assert status.message, point
