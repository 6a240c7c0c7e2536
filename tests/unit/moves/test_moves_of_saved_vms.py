"""A VM that was saved on one node continues from its memory on another node, once, and only with its disk."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.moving import DISK, NAMED, Node, two_nodes
from fakes.waiting import eventually

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power

SAVED = {**NAMED, "virtshim.io/on-stop": "save"}
FROM_HERE = {**SAVED, "virtshim.io/restore-from": "here"}
FROM_THERE = {**SAVED, "virtshim.io/restore-from": "there"}
DISK_BYTES = b"a guest's files" * 200_000


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def saved(here: Node, *, removed: bool = True) -> ContainerId:
    """The container that the guest was saved in."""
    old = here.create(1, SAVED, content=DISK_BYTES)
    here.world.start(old)
    here.world.stop(old, 30)
    assert here.vm is not None
    assert here.vm.saved is not None
    if removed:
        here.world.remove_sandbox(here.world.container(old).sandbox_id)
    return old


def expected(there: Node, number: int = 1) -> ContainerId:
    return there.create(number, FROM_HERE, content=b"")


def boots(node: Node, container: ContainerId) -> int:
    return node.world.outside.vms.domains[node.world.domain(container)].boots


def still_counts(here: Node) -> bool:
    vm = here.vm
    return vm is not None and vm.is_here and vm.saved is not None and vm.saved.taken_by is None


def memory(node: Node) -> Path:
    return Path(node.world.app.adapters.files.vms.memory(DISK))


@pytest.mark.parametrize("removed", [True, False])
def test_the_guest_continues_on_the_other_node_with_its_memory_and_its_disk(nodes, removed):
    here, there = nodes
    old = saved(here, removed=removed)
    new = expected(there)
    there.world.start(new)
    there.until_here(new)
    assert there.power(new) is Power.RUNNING
    assert boots(there, new) == 0
    assert there.world.container(new).status.known_as == old
    assert there.disk.read_bytes() == DISK_BYTES
    eventually(lambda: DISK not in here.world.outside.disks.pod_disks)
    here.world.app.watch.look()
    assert not memory(here).exists()


def test_the_first_node_refuses_later_pods_and_the_guest_can_come_back(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    there.world.start(new)
    there.until_here(new)
    eventually(lambda: DISK not in here.world.outside.disks.pod_disks)
    with pytest.raises(WrongState, match="has moved to node there"):
        here.create(2, SAVED)
    there.world.stop(new, 30)
    there.world.remove_sandbox(there.world.container(new).sandbox_id)
    back = here.create(3, FROM_THERE, content=b"")
    here.world.start(back)
    here.until_here(back)
    assert boots(here, back) == 0
    assert here.disk.read_bytes() == DISK_BYTES


def test_no_pod_of_the_vm_starts_on_the_first_node_while_it_moves(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    put = here.world.journal.hold("saved_vms.put")
    there.world.start(new)
    put.wait()
    creating = Background(lambda: here.create(2, SAVED))
    assert not creating.ended_within(1)
    put.open()
    there.until_here(new)
    with pytest.raises(WrongState, match="has moved to node there"):
        creating.done()


# --- refusals


def refused(there: Node, new: ContainerId, text: str) -> None:
    with pytest.raises(WrongState, match=f"node here: virtual machine default/db/vm does not run there{text}"):
        there.world.start(new)


def test_a_vm_that_was_shut_down_is_refused(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    here.world.stop(old, 30)
    refused(there, expected(there), ", and has no saved memory; start its pod on that node")


def test_a_vm_whose_next_pod_is_there_already_is_refused(nodes):
    here, there = nodes
    saved(here)
    again = here.create(2, SAVED)
    refused(there, expected(there), f", and its container {again.short} is created; wait until it runs")
    here.world.start(again)
    assert boots(here, again) == 0, "it goes on from its memory"
    assert here.power(again) is Power.RUNNING


def test_a_vm_whose_disk_was_changed_after_the_save_is_refused(nodes):
    here, there = nodes
    saved(here)
    here.world.outside.written[""] = 1
    refused(there, expected(there), ", and its saved memory no longer fits its disk: the root disk was written to")
    assert still_counts(here)


def test_a_vm_whose_memory_belongs_to_volumes_too_is_refused(nodes):
    here, there = nodes
    saved(here)
    vm = here.vm
    assert vm is not None
    assert vm.saved is not None
    disks = {**vm.saved.disks, "/data": vm.saved.disks[""]}
    here.world.app.adapters.files.vms.put(vm.with_state(dataclasses.replace(vm.saved, disks=disks)))
    refused(there, expected(there), ", and its saved memory belongs to volumes, too")


# --- failures


def test_if_qemu_cannot_use_the_memory_the_state_still_counts(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    there.world.outside.memory_streams.refuses_memory = True
    there.world.start(new)
    there.until_ended(new)
    eventually(lambda: not here.world.app.adapters.files.vms.get(DISK).departure)
    assert still_counts(here)

    again = here.create(2, SAVED)
    here.world.start(again)
    assert boots(here, again) == 0, "it goes on from its memory"
    assert here.power(again) is Power.RUNNING


def test_a_connection_that_breaks_leaves_the_state_where_it_was(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    here.cut = lambda way, told: way == "receive" and "arrived" in told
    there.world.start(new)
    there.until_ended(new)
    assert "has broken the move off" in there.world.container(new).exit.message
    assert still_counts(here)
    here.cut = lambda way, told: False
    again = there.create_in(there.world.container(new).sandbox_id, attempt=1, content=b"")
    there.world.start(again)
    there.until_here(again)
    assert there.disk.read_bytes() == DISK_BYTES


def test_a_decision_that_cannot_be_written_is_none(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    here.world.journal.fail("saved_vms.put", InternalError("the disk is broken"), times=1)
    there.world.start(new)
    there.until_ended(new)
    assert still_counts(here)
    assert there.power(new) is not Power.RUNNING


def test_a_lost_answer_is_asked_for_again(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    lost = []

    def lose_first(way, told):
        is_answer = way == "send" and told.get("outcome") == "yes" and not lost
        lost.extend([told] if is_answer else [])
        return is_answer

    here.cut = lose_first
    there.world.start(new)
    there.until_here(new)
    assert lost
    assert there.power(new) is Power.RUNNING


def test_an_operator_takes_a_guest_whose_first_node_is_gone(nodes):
    here, there = nodes
    saved(here)
    new = expected(there)
    here.cut = lambda way, told: told.get("outcome") == "yes" or told.get("do") == "outcome"
    there.world.start(new)
    eventually(lambda: here.vm.departure is not None and there.vm.arrival.state is not None)
    here.stop_serving()
    there.world.app.receiving.take("default", "db", "vm")
    assert there.power(new) is Power.RUNNING
    assert boots(there, new) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("who", ["here", "there"])
def test_a_kill_of_either_daemon_at_any_step_leaves_one_state_or_one_guest(tmp_path, who, when):
    with two_nodes(tmp_path / "count") as both:
        dying = both[who == "there"]
        saved(both[0])
        new = expected(both[1])
        dying.world.journal.forget()
        both[1].world.start(new)
        both[1].until_here(new)
        eventually(lambda: DISK not in both[0].world.outside.disks.pod_disks)
        steps = len(dying.world.journal.calls)
    for at in range(1, steps + 1):
        with two_nodes(tmp_path / f"{at}") as (here, there):
            _kill_and_look(here, there, there if who == "there" else here, at, when)


def _kill_and_look(here: Node, there: Node, dying: Node, at: int, when: When) -> None:
    old = saved(here)
    new = expected(there)
    dying.world.journal.forget()
    dying.world.journal.crash(at, when)
    with contextlib.suppress(Crash, Exception):
        there.world.start(new)
    eventually(lambda: len(dying.world.journal.calls) >= at or _is_settled(here, there, new))
    dying.restart()
    eventually(lambda: _looked_at(here, there) and _is_settled(here, there, new))
    if there.power(new) is Power.RUNNING:
        assert boots(there, new) == 0, f"at {at}"
        assert there.world.container(new).status.known_as == old, f"at {at}"
        eventually(lambda: _looked_at(here, there) and DISK not in here.world.outside.disks.pod_disks)
        assert not memory(here).exists(), f"at {at}"
    else:
        assert memory(here).exists(), f"at {at}"
        assert DISK in here.world.outside.disks.pod_disks, f"at {at}"


def _looked_at(*both: Node) -> bool:
    for node in both:
        node.world.app.watch.look()
    return True


def _is_settled(here: Node, there: Node, new: ContainerId) -> bool:
    now, runs = there.world.container(new), there.power(new) is Power.RUNNING
    assert not (runs and still_counts(here))
    if runs:
        return not now.status.arriving
    return still_counts(here) and now.phase is not ContainerPhase.RUNNING
