"""A container may be stopped while its node does not know where the guest may run. The guest is not killed as long as
the answer may come in time, and never runs on both nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT
from fakes.lasting import logged
from fakes.moving import NAMED, Node, two_nodes
from fakes.waiting import eventually

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power

FROM_HERE = {**NAMED, "virtshim.io/restore-from": "here"}
DISK_BYTES = b"a guest's files" * 200_000


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def is_answer(way: str, told: Mapping[str, Any]) -> bool:
    return (way == "send" and told.get("outcome") == "yes") or told.get("do") == "outcome"


def is_arrival(way: str, told: Mapping[str, Any]) -> bool:
    return (way == "receive" and "arrived" in told) or told.get("do") == "outcome"


def undecided(
    here: Node, there: Node, lost: Callable[[str, Mapping[str, Any]], bool], **more: str
) -> tuple[ContainerId, ContainerId]:
    """All of the guest is there, and `lost` keeps the other node's word from it."""
    old = here.run(DISK_BYTES)
    new = there.create(1, {**FROM_HERE, **more}, content=b"")
    here.cut = lost
    there.world.start(new)
    eventually(lambda: there.vm is not None and there.vm.arrival is not None and there.vm.arrival.state is not None)
    if lost is is_answer:
        eventually(lambda: here.vm is not None and here.vm.departure is not None)
    else:
        eventually(lambda: not here.world.container(old).status.saving)
    return old, new


def reachable_in(here: Node, there: Node, seconds: float) -> None:
    there.world.outside.clock.at(seconds, lambda: setattr(here, "cut", lambda _way, _told: False))


def ended(node: Node, container: ContainerId) -> tuple[int, str, str]:
    found = node.world.container(container).exit
    assert found is not None
    return found.code, found.reason.value, found.message


def test_a_guest_that_turns_out_to_have_moved_shuts_down_in_the_rest_of_the_grace_period(nodes):
    here, there = nodes
    old, new = undecided(here, there, is_answer)
    there.restart()
    reachable_in(here, there, 5)
    there.world.stop(new, 30)
    code, _, message = ended(there, new)
    assert (code, message) == (143, "the guest shut down because the container was stopped")
    assert there.world.outside.vms.domains[there.world.domain(new)].boots == 0
    assert there.vm is not None
    assert there.vm.is_here
    assert here.power(old) is Power.OFF
    assert there.disk.read_bytes() == DISK_BYTES


def test_a_guest_that_turns_out_to_have_moved_is_saved_if_its_pod_wants_that(nodes):
    here, there = nodes
    _, new = undecided(here, there, is_answer, **{"virtshim.io/on-stop": "save"})
    there.restart()
    reachable_in(here, there, 5)
    there.world.stop(new, 30)
    assert ended(there, new)[:2] == (143, "Saved")
    assert there.vm is not None
    assert there.vm.saved is not None


def test_a_guest_that_turns_out_to_run_where_it_was_runs_on_there(nodes):
    here, there = nodes
    old, new = undecided(here, there, is_arrival)
    there.restart()
    reachable_in(here, there, 5)
    there.world.stop(new, 30)
    assert "node here has broken the move off" in ended(there, new)[2]
    assert here.power(old) is Power.RUNNING
    assert there.power(new) is not Power.RUNNING


def test_without_an_answer_the_guest_is_killed_at_the_end_and_the_next_pod_learns_where_it_is(nodes):
    here, there = nodes
    _, new = undecided(here, there, is_answer)
    there.restart()
    clock = there.world.outside.clock
    before = clock.monotonic()
    there.world.stop(new, 30)
    assert 15 <= clock.monotonic() - before <= 30
    code, _, message = ended(there, new)
    assert (code, message) == (137, "killed: its other node did not say in time whether the virtual machine has moved")
    there.world.remove_sandbox(there.world.container(new).sandbox_id)
    here.cut = lambda _way, _told: False
    fresh = there.create(2)
    there.world.start(fresh)
    assert there.power(fresh) is Power.RUNNING
    assert there.disk.read_bytes() == DISK_BYTES
    assert any("was stopped before the guest could run here" in line for line in logged(there.world))


def test_a_stop_without_a_grace_period_does_not_ask(nodes):
    here, there = nodes
    _, new = undecided(here, there, is_answer)
    there.restart()
    clock = there.world.outside.clock
    before = clock.monotonic()
    there.world.stop(new, 0)
    assert clock.monotonic() - before < 1
    assert there.phase(new) is ContainerPhase.EXITED


def test_a_second_stop_that_is_in_a_hurry_ends_the_wait(nodes):
    here, there = nodes
    _, new = undecided(here, there, is_answer)
    there.restart()
    there.world.outside.clock.held = True
    first = Background(lambda: there.world.stop(new, 3600))
    there.world.outside.clock.until_waiting()
    there.world.stop(new, 0)
    first.done()
    assert ended(there, new)[0] == 137


def silent_about_the_outcome(here: Node, there: Node) -> ContainerId:
    """All of the guest is there, and the other node takes connections and answers nothing."""
    _, new = undecided(here, there, is_answer)
    there.restart()
    here.cut = lambda _way, _told: False
    return new


def test_a_second_stop_that_is_in_a_hurry_ends_a_question_that_gets_no_answer(nodes):
    here, there = nodes
    new = silent_about_the_outcome(here, there)
    with here.silent("outcome") as other:
        first = Background(lambda: there.world.stop(new, 3600))
        assert other.asked.wait(WAIT_LIMIT)
        began = time.monotonic()
        there.world.stop(new, 0)
        assert time.monotonic() - began < 8, "the limit of a question is longer"
        first.done()
    assert ended(there, new)[0] == 137


def test_a_question_that_gets_no_answer_takes_no_more_than_its_part_of_the_grace_period(nodes):
    here, there = nodes
    new = silent_about_the_outcome(here, there)
    with here.silent("outcome"):
        began = time.monotonic()
        there.world.stop(new, 3)
        assert time.monotonic() - began < 8, "the limit of a question is longer"
    assert "did not say in time" in ended(there, new)[2]


def test_a_node_that_answers_nothing_delays_no_other_pod(nodes):
    here, there = nodes
    new = silent_about_the_outcome(here, there)
    with here.silent("outcome") as other:
        began = time.monotonic()
        there.world.app.watch.look()
        assert time.monotonic() - began < 8, "the limit of a question is longer"
        assert other.asked.is_set()
        there.world.app.watch.look()  # does not ask beside the first question
    eventually(lambda: there.world.app.watch.look() or there.power(new) is Power.RUNNING)


def test_a_stop_on_the_first_node_waits_for_a_decision_that_is_being_written(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    put = here.world.journal.hold("saved_vms.put")
    there.world.start(new)
    put.wait()
    stopping = Background(lambda: here.world.stop(old, 30))
    assert not stopping.ended_within(1)
    put.open()
    stopping.done()
    assert ended(here, old)[:2] == (143, "Moved")
    there.until_here(new)
    assert there.power(new) is Power.RUNNING


def test_a_guest_whose_departure_could_not_be_written_shuts_down_where_it_was(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    here.world.journal.fail("saved_vms.put", InternalError("the disk is broken"), times=1)
    there.world.start(new)
    there.until_ended(new)
    eventually(lambda: not here.world.container(old).status.saving)
    here.world.stop(old, 30)
    assert ended(here, old)[2] == "the guest shut down because the container was stopped"
    assert there.power(new) is not Power.RUNNING
