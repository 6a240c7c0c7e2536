"""When a running VM moves to another node, exactly one guest runs, and its disk moves with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.journal import WAIT_LIMIT, Crash
from fakes.moving import DISK, NAMED, Node, two_nodes
from fakes.waiting import eventually

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import NotFound, Unavailable, WrongState
from virtshim.model.vm import Power
from virtshim.peers.certificates import PeerFiles
from virtshim.peers.client import PeerClient
from virtshim.system.live import Live

FROM_HERE = {**NAMED, "virtshim.io/restore-from": "here"}
FROM_THERE = {**NAMED, "virtshim.io/restore-from": "there"}
DISK_BYTES = b"a guest's files" * 200_000  # some blocks, and a part of one


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def expected(there: Node, number: int = 1):
    """The replacement pod's container, which has been created."""
    return there.create(number, FROM_HERE, content=b"a new disk")


def arrived(there: Node):
    """The replacement pod's container, when the guest runs in it."""
    new = expected(there)
    there.world.start(new)
    there.until_here(new)
    return new


def runs_here_alone(here: Node, container, there: Node, other) -> bool:
    return here.power(container) is Power.RUNNING and there.power(other) is not Power.RUNNING


def test_the_guest_runs_on_the_other_node_with_its_disk(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = arrived(there)
    assert there.power(new) is Power.RUNNING
    assert there.disk.read_bytes() == DISK_BYTES
    assert there.world.outside.vms.domains[there.world.domain(new)].boots == 0
    eventually(lambda: here.power(old) is Power.OFF)


def test_the_container_on_the_first_node_runs_until_its_pod_is_deleted(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    arrived(there)
    eventually(lambda: here.power(old) is Power.OFF)
    here.world.app.events.changed(here.world.domain(old))
    assert here.phase(old) is ContainerPhase.RUNNING
    here.world.stop(old, 30)
    ended = here.world.container(old).exit
    assert ended is not None
    assert (ended.code, ended.reason.value) == (143, "Moved")
    assert "moved to node there" in ended.message


def test_a_reboot_ends_the_container_of_a_guest_that_has_moved(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    arrived(there)
    eventually(lambda: here.power(old) is Power.OFF)
    here.restart(rebooted=True)
    ended = here.world.container(old).exit
    assert ended is not None
    assert ended.reason.value == "Moved"


def test_the_first_node_keeps_no_disk_and_refuses_pods_that_do_not_name_the_other_node(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    arrived(there)
    eventually(lambda: DISK not in here.world.outside.disks.pod_disks)
    here.world.stop(old, 30)
    here.world.remove_sandbox(here.world.container(old).sandbox_id)
    with pytest.raises(WrongState, match="has moved to node there; to bring it back, give the pod the annotation"):
        here.create(2)


def test_a_guest_comes_back(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = arrived(there)
    eventually(lambda: here.power(old) is Power.OFF)
    here.world.stop(old, 30)
    here.world.remove_sandbox(here.world.container(old).sandbox_id)
    back = here.create(2, FROM_THERE, content=b"")
    here.world.start(back)
    here.until_here(back)
    assert here.power(back) is Power.RUNNING
    assert here.disk.read_bytes() == DISK_BYTES
    eventually(lambda: there.power(new) is Power.OFF)


def test_a_pod_that_names_a_node_starts_a_vm_that_is_here_already(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = arrived(there)
    there.world.stop(new, 30)
    again = there.create_in(there.world.container(new).sandbox_id, attempt=1)
    there.world.start(again)
    assert there.power(again) is Power.RUNNING
    assert there.disk.read_bytes() == DISK_BYTES


def test_if_qemu_cannot_use_the_memory_the_guest_runs_on_where_it_was(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    there.world.outside.memory_streams.refuses_memory = True
    there.world.start(new)
    there.until_ended(new)
    ended = there.world.container(new).exit
    assert ended is not None
    assert "did not arrive" in ended.message
    assert "Invalid argument" in ended.message
    eventually(lambda: not here.world.container(old).status.saving)
    assert here.power(old) is Power.RUNNING
    assert here.world.outside.vms.domains[here.world.domain(old)].boots == 1

    there.world.outside.memory_streams.refuses_memory = False
    again = there.create_in(there.world.container(new).sandbox_id, attempt=1, content=b"")
    there.world.start(again)
    there.until_here(again)
    assert there.disk.read_bytes() == DISK_BYTES
    eventually(lambda: here.power(old) is Power.OFF)


def test_if_the_answer_is_lost_the_other_node_asks_again(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    lost = []

    def lose_first(way: str, told) -> bool:
        is_answer = way == "send" and told.get("outcome") == "yes" and not lost
        lost.extend([told] if is_answer else [])
        return is_answer

    here.cut = lose_first
    there.world.start(new)
    there.until_here(new)
    assert lost
    assert there.power(new) is Power.RUNNING
    eventually(lambda: here.power(old) is Power.OFF)


def test_a_guest_that_has_arrived_waits_until_the_first_node_answers(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)
    here.cut = lambda way, told: "outcome" in told or told.get("do") == "outcome"
    there.world.start(new)
    eventually(lambda: here.vm is not None and here.vm.departure is not None)
    there.restart()
    assert there.power(new) is Power.PAUSED
    assert there.phase(new) is ContainerPhase.RUNNING
    here.cut = lambda way, told: False
    there.world.app.watch.look()
    there.until_here(new)
    assert there.power(new) is Power.RUNNING


def test_if_the_first_node_never_learns_of_the_arrival_the_guest_runs_on_there(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    here.cut = lambda way, told: way == "receive" and "arrived" in told
    there.world.start(new)
    there.until_ended(new)
    assert "has broken the move off" in there.world.container(new).exit.message
    eventually(lambda: not here.world.container(old).status.saving)
    assert runs_here_alone(here, old, there, new)


def test_a_daemon_that_is_started_again_ends_an_arrival_that_was_under_way(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    there.world.outside.vms.on_power_event(lambda _domain: None)
    here.cut = lambda way, told: "blocks" in told
    there.world.start(new)
    there.until_ended(new)
    there.restart()
    assert there.power(new) is not Power.RUNNING
    assert runs_here_alone(here, old, there, new)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the node
def test_a_first_node_that_loses_its_power_before_its_decision_boots_the_guest_from_its_disk(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)
    is_dead = threading.Event()

    def die(name: str) -> None:
        if name == "streams.send" or is_dead.is_set():
            is_dead.set()
            raise Crash(name)

    here.world.journal.on_call = die
    there.world.start(new)
    assert is_dead.wait(WAIT_LIMIT)
    here.stop_serving()
    here.world.journal.on_call = lambda _: None
    here.restart(rebooted=True)
    there.until_ended(new)
    assert DISK not in there.world.outside.disks.pod_disks, "what has arrived is discarded"
    again = here.create(2)
    here.world.start(again)
    assert here.power(again) is Power.RUNNING
    assert here.disk.read_bytes() == DISK_BYTES


def test_a_first_node_that_is_killed_after_its_decision_ends_its_qemu(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    here.world.outside.vms.why_not = ""
    here.cut = lambda way, told: told.get("outcome") == "yes"
    there.world.start(new)
    eventually(lambda: here.vm is not None and here.vm.departure is not None)
    here.cut = lambda way, told: False
    here.restart()
    there.until_here(new)
    assert here.power(old) is Power.OFF
    assert here.phase(old) is ContainerPhase.RUNNING
    assert there.power(new) is Power.RUNNING


def test_a_container_that_is_stopped_before_its_guest_arrives_leaves_it_where_it_was(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    here.cut = lambda way, told: way == "receive" and "arrived" in told
    there.world.start(new)
    there.world.stop(new, 30)
    assert there.phase(new) is ContainerPhase.EXITED
    eventually(lambda: not here.world.container(old).status.saving)
    assert runs_here_alone(here, old, there, new)


def test_a_pod_without_the_annotation_gives_a_failed_move_up(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)
    there.world.outside.memory_streams.refuses_memory = True
    there.world.start(new)
    there.until_ended(new)
    there.world.remove_sandbox(there.world.container(new).sandbox_id)
    fresh = there.create(2, content=b"a new disk")
    there.world.start(fresh)
    assert there.power(fresh) is Power.RUNNING
    assert there.vm is not None
    assert there.vm.is_here


def test_nobody_can_use_a_guest_that_has_moved(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    arrived(there)
    eventually(lambda: here.power(old) is Power.OFF)
    with pytest.raises(WrongState, match="has moved to node there"):
        here.world.app.operator.services.actions.pause(here.world.container(old))


def test_a_vm_that_qemu_cannot_move_is_refused_with_qemus_reason(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    here.world.outside.memory_streams.blocked = ("a device forbids it",)
    with pytest.raises(WrongState, match="node here: QEMU cannot move virtual machine db: a device forbids it"):
        there.world.start(new)
    assert runs_here_alone(here, old, there, new)


def test_a_vm_that_does_not_run_is_refused(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    here.world.stop(old)
    with pytest.raises(WrongState, match="node here: virtual machine default/db/vm does not run there"):
        there.world.start(new)


def test_a_vm_that_the_named_node_does_not_know_is_refused(nodes):
    _, there = nodes
    with pytest.raises(NotFound, match="node here: virtual machine default/db is not on this node"):
        there.create(1, FROM_HERE)


def test_a_node_that_cannot_be_reached_makes_the_pod_wait(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    here.stop_serving()
    with pytest.raises(Unavailable, match=r"node here: .* cannot be reached"):
        there.create(1, FROM_HERE)
    assert not there.world.records.sandboxes.all()


def test_a_node_that_serves_no_others_can_take_a_vm(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    there.stop_serving()
    new = arrived(there)
    assert there.power(new) is Power.RUNNING


def test_a_node_without_a_certificate_says_so(tmp_path):
    with two_nodes(tmp_path) as (here, there):
        here.run(DISK_BYTES)
        there.world.outside.peers = PeerClient(PeerFiles("", "", ""), Live({}))
        there.restart()
        with pytest.raises(WrongState, match=r"peers\.certificate"):
            there.create(1, FROM_HERE)


def test_a_guest_whose_writes_qemu_could_miss_is_paused_before_its_memory_is_copied(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    here.world.outside.memory_streams.finds_all_writes = False
    here.world.journal.forget()
    arrived(there)
    calls = here.world.journal.calls
    assert calls.index("vms.pause") < calls.index("streams.send")


def test_the_rest_of_the_disk_goes_beside_the_memory_of_a_guest_that_is_paused(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    here.world.outside.memory_streams.finds_all_writes = False
    written = b"written a moment before the guest stood still"

    def called(name: str) -> None:
        steps.append(name)
        if name == "vms.pause":
            here.disk.write_bytes(written)

    steps: list[str] = []
    here.cut = lambda way, told: steps.append("disk") if way == "send" and "blocks" in told else False
    here.world.journal.on_call = called
    arrived(there)
    assert there.disk.read_bytes() == written
    last = len(steps) - 1 - steps[::-1].index("disk")
    assert steps.index("streams.send") < last < steps.index("streams.go_on")


def test_all_of_a_disk_is_durable_before_the_first_node_hears_that_it_has_arrived(nodes, monkeypatch):
    here, there = nodes
    here.run(DISK_BYTES)
    steps: list[str] = []
    new = expected(there)

    def noted(call: Callable[..., Any], step: str) -> Callable[..., Any]:
        def made(file: int, *more: Any) -> Any:
            found = call(file, *more)
            if os.path.samefile(f"/proc/self/fd/{file}", there.disk):
                steps.append(step)
            return found

        return made

    monkeypatch.setattr(os, "pwrite", noted(os.pwrite, "write"))
    monkeypatch.setattr(os, "fsync", noted(os.fsync, "sync"))

    def hear(way: str, told: Mapping[str, Any]) -> bool:
        if "memory" in told:
            here.disk.write_bytes(DISK_BYTES + b"written while the memory was copied")
        if "arrived" in told:
            steps.append("arrived")
        return False

    here.cut = hear
    there.world.start(new)
    there.until_here(new)
    until_arrived = steps[: steps.index("arrived")]
    assert until_arrived.count("write") > 1
    assert until_arrived[-1] == "sync"


def test_the_disks_header_is_checked_while_qemu_still_reads_the_memory(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    arrived(there)
    calls = there.world.journal.calls
    assert calls.index("vms.accept_disks") < calls.index("streams.state")


def test_a_guest_is_paused_only_when_the_other_node_waits_for_its_memory(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    here.world.outside.memory_streams.finds_all_writes = False
    heard: list[str] = []
    here.cut = lambda way, told: heard.append(str(told.get("do"))) if way == "receive" else False
    before: list[list[str]] = []
    here.world.journal.on_call = lambda name: name == "vms.pause" and before.append(list(heard))
    arrived(there)
    assert "memory" in before[0]
