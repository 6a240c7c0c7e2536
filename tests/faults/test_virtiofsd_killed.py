"""SIGKILL of a VM's virtiofsd at any step is reported as the container's trouble. The container's restart recovers, and
removal leaves nothing.

As in the kill matrix, `--all` takes each point, before and after a step; other runs take one of each call."""

from __future__ import annotations

import pytest
from kill_points import strike
from mortal_node import MortalNode
from podclient import wait_until
from test_kill_matrix import CALLS, Point, attempt, attempt_again, points_of
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.volumes, pytest.mark.timeout(1800)]

# Seconds; virtshim looks every ten.
_SOON = 60.0


@pytest.mark.parametrize("name", ["StartContainer", "StopContainer", "RemovePodSandbox"])
def test_a_virtiofsd_killed_at_any_step_is_reported_and_a_restart_recovers(
    mortal: MortalNode, name: str, every_point: bool
) -> None:
    points = [(point.when, point.step) for point in points_of(mortal, name, "virtshim")]
    # There is nothing to kill before it starts and after it ends.
    if name == "StartContainer":
        meeting = slice(points.index(("after", "volumes.shares.start")), None)
    else:
        meeting = slice(points.index(("after", "volumes.shares.end")))
    strike(
        f"{name} virtiofsd",
        points_of(mortal, name, "virtshim")[meeting],
        lambda point: struck_and_true(mortal, name, point),
        every=every_point,
        at_least=lambda taken: 1,
    )


def struck_and_true(node: MortalNode, name: str, point: Point) -> bool:
    """Kills and checks the status; returns whether there was a virtiofsd to kill."""
    call, where = CALLS[name], f"virtiofsd {point}"
    with working(node, *call.prepare) as work:
        with node.armed("virtshim", point.number, point.when, "virtiofsd"):
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
    """The trouble of a container that runs, or whose QEMU ended too."""

    def says_so() -> bool:
        status = work.cri.status(work.container)
        return "virtiofsd" in status.message or status.state == pb.CONTAINER_EXITED

    wait_until(says_so, _SOON, f"{where}: the container says so")
    assert work.cri.status(work.container).message, where
