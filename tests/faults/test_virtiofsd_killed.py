"""SIGKILL of the virtiofsd of a pod's VM at the steps of each call that has one, on real parts: it is told as the container's
trouble, the container's restart makes it good, and after removal nothing is left.

As in the kill matrix, `--all-faults` takes each step, before and after it; other runs a sample.
"""

from __future__ import annotations

import pytest
from mortal_node import MortalNode
from podclient import wait_until
from test_kill_matrix import CALLS, attempt, attempt_again, sample, steps_of
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.volumes, pytest.mark.timeout(1800)]

_SAMPLE = 3
# Seconds; virtshim looks every ten.
_SOON = 60.0


@pytest.mark.parametrize("name", ["StartContainer", "StopContainer", "RemovePodSandbox"])
def test_a_virtiofsd_killed_at_any_step_is_told_and_made_good(
    mortal: MortalNode, name: str, request: pytest.FixtureRequest
) -> None:
    steps = steps_of(mortal, CALLS[name], "virtshim")
    first = steps.index("shares.start") if name == "StartContainer" else 0
    last = len(steps) - 1 if name == "StartContainer" else steps.index("shares.end")
    points = [(number + 1, when) for number in range(first, last + 1) for when in ("before", "after")]
    # Before it is there, and after it has gone, there is nobody to kill.
    points = points[1:] if name == "StartContainer" else points[:-1]
    if not request.config.getoption("--all-faults"):
        points = sample(points, _SAMPLE)
    struck = sum(struck_and_true(mortal, name, number, when, steps) for number, when in points)
    print(f"VIRTIOFSD KILLS {name}: {struck} of {len(points)} points met one")
    assert struck > 0


def struck_and_true(node: MortalNode, name: str, number: int, when: str, steps: list[str]) -> bool:
    """Whether there was one to kill."""
    call, where = CALLS[name], f"virtiofsd killed {when} step {number} ({steps[number - 1]})"
    with working(node, *call.prepare) as work:
        with node.armed("virtshim", number, when, "virtiofsd"):
            failure = attempt(call, work)
        struck = node.killers["virtshim"].killed()
        assert node.died("virtshim", within=0.0) is False
        node.check_bystander(work.cri)
        if name == "StartContainer":
            if struck and failure is None:
                told(work, where)
                work.stop()
            attempt_again(call, work, where)
        elif failure is not None:
            attempt_again(call, work, where)
        wait_until(lambda: call.done(work), _SOON, f"{where}: the call's work is done")
        if name == "StartContainer":
            assert node.virtiofsd_pids(), f"{where}: the next attempt has its volumes"
    return bool(struck)


def told(work: Work, where: str) -> None:
    """Of one that runs, or that QEMU has ended with it."""

    def says_so() -> bool:
        status = work.cri.status(work.container)
        return "virtiofsd" in status.message or status.state == pb.CONTAINER_EXITED

    wait_until(says_so, _SOON, f"{where}: the container says so")
    assert work.cri.status(work.container).message, where
