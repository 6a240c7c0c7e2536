"""After SIGKILL of a pod's QEMU at any step of a call, the status is true, repeated calls finish the work, and removal
leaves nothing. The call itself may fail or succeed.

As in the kill matrix, `--all` takes each point, before and after a step; other runs take one of each call."""

from __future__ import annotations

import pytest
from kill_points import one_in_turn, strike
from mortal_node import MortalNode
from podclient import wait_until
from test_kill_matrix import CALLS, FIRST, RESTORE, SAVE, WARM, Point, attempt, attempt_again, points_of
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(3600)]

_SOON = 20.0
# The container's exit code: QEMU was killed, virtshim ended it, or it ended during the start.
_TRUE_CODES = {128, 137}
# The step of a start that starts QEMU.
_BEGINS = {
    "StartContainer": "vm.hypervisor.start",
    RESTORE: "vm.hypervisor.restore",
    FIRST: "vm.templates.boot",
    WARM: "vm.templates.await_devices",
}
# A guest from a template that loses its QEMU boots in the same call, and the kill may meet only a template's QEMU.
_MAY_RUN_ON = {FIRST, WARM}
# A VM whose QEMU was killed has not been saved, and the next one boots.
_DONE = {SAVE: Work.is_stopped_or_saved, RESTORE: Work.is_running_without_state}


def points_with_a_qemu(node: MortalNode, name: str) -> list[Point]:
    """The points at which a QEMU runs: in a start from `start` on, in other calls until `destroy`."""
    points = points_of(node, name, "virtshim")
    steps = [(point.when, point.step) for point in points]
    if name in _BEGINS:
        return points[steps.index(("after", _BEGINS[name])) :]
    return points[: steps.index(("after", "vm.hypervisor.destroy"))]


@pytest.mark.parametrize(
    "name",
    [
        "StartContainer", "StopContainer", "StopPodSandbox", "RemoveContainer", "RemovePodSandbox", SAVE, RESTORE,
        *one_in_turn((FIRST, WARM), "QEMU"),
    ],
)  # fmt: skip
def test_a_qemu_killed_at_any_step_is_reported_correctly(mortal: MortalNode, name: str, every_point: bool) -> None:
    strike(
        f"{name} QEMU",
        points_with_a_qemu(mortal, name),
        lambda point: struck_and_true(mortal, name, point),
        every=every_point,
        at_least=lambda taken: 1,
    )


def struck_and_true(node: MortalNode, name: str, point: Point) -> bool:
    """Kills and checks the status; returns whether there was a QEMU to kill."""
    call, where = CALLS[name], f"QEMU {point}"
    assert node.bystander is not None
    spared = node.bystander.pids
    with working(node, *call.prepare) as work:
        with node.armed("virtshim", point.number, point.when, "qemu-system", spared):
            failure = attempt(call, work)
        struck = node.killers["virtshim"].killed()
        assert node.died("virtshim", within=0.0) is False
        wait_until(lambda: not node.qemu_pids() & set(struck), _SOON, f"{where}: it is gone")
        node.check_bystander(work.cri)
        if name in _BEGINS:
            if struck and not (name in _MAY_RUN_ON and work.is_one_of_its_own()):
                ended_truly(work, where)
            attempt_again(call, work, where)
        elif failure is not None:
            attempt_again(call, work, where)
        wait_until(lambda: _DONE.get(name, call.done)(work), _SOON, f"{where}: the call's work is done")
    return bool(struck)


def ended_truly(work: Work, where: str) -> None:
    def has_ended() -> bool:
        return work.cri.status(work.container).state == pb.CONTAINER_EXITED

    wait_until(has_ended, _SOON, f"{where}: the container is EXITED")
    status = work.cri.status(work.container)
    assert status.exit_code in _TRUE_CODES, f"{where}: {status.exit_code} {status.reason} {status.message}"
    assert status.message, where
