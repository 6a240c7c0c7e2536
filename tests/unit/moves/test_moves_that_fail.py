"""When a move meets failures, kills or other calls, there are never two guests, no VM is lost, and nothing is left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.moving import DISK, NAMED, Node, two_nodes
from fakes.node_certificates import ClusterCa
from fakes.waiting import eventually

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted, WrongState
from virtshim.model.sandbox import vm_disk_name
from virtshim.model.vm import OffReason, Power
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.system.live import Live

FROM_HERE = {**NAMED, "virtshim.io/restore-from": "here"}
FROM_THERE = {**NAMED, "virtshim.io/restore-from": "there"}
DISK_BYTES = b"a guest's files" * 200_000
NAME = {"namespace": "default", "vm": "db", "container": "vm"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def expected(there: Node, number: int = 1, annotations: Mapping[str, str] = FROM_HERE):
    return there.create(number, annotations, content=b"")


def moved(here: Node, there: Node):
    """The containers of a move that has succeeded."""
    old = here.run(DISK_BYTES)
    new = expected(there)
    there.world.start(new)
    there.until_here(new)
    eventually(lambda: here.power(old) is Power.OFF)
    return old, new


def runs_on(here: Node, old) -> bool:
    return here.power(old) is Power.RUNNING and not here.world.container(old).status.saving


def when(node: Node, of: Callable[[str, Mapping[str, Any]], bool], do: Callable[[Any], object]) -> None:
    """Does something once, when the node is about to send, or has received, such a message."""
    done = []

    def cut(way: str, told: Mapping[str, Any]) -> bool:
        if not done and of(way, told):
            done.append(told)
            do(told)
        return False

    node.cut = cut


def when_called(node: Node, name: str, do: Callable[[], object]) -> None:
    """Does something once, when the node is about to make such a call."""
    done = []

    def hear(called: str) -> None:
        if called == name and not done:
            done.append(called)
            do()

    node.world.journal.on_call = hear


# --- the first node


def test_a_question_that_meets_the_decision_is_never_answered_with_no(nodes, monkeypatch):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)
    moves: list[str] = []
    when(here, lambda _, told: told.get("do") == "move", lambda told: moves.append(told["move"]))
    put = here.world.journal.hold("saved_vms.put")
    there.world.start(new)
    put.wait()
    read, go_on = threading.Event(), threading.Event()
    vms = here.world.app.sending.saving.vms
    get = vms.get

    def slow_get(disk: str):
        found = get(disk)
        if threading.current_thread().name == "peer" and not read.is_set() and found.departure is None:
            read.set()
            go_on.wait(10)
        return found

    monkeypatch.setattr(vms, "get", slow_get, raising=False)
    answers: list[Any] = []

    def ask() -> None:
        with there.world.outside.peers.connect("here", 5) as link:
            link.send({"do": "outcome", "move": moves[0], **NAME}, 5)
            answers.append(link.receive(10))

    asking = Background(ask)
    assert read.wait(10)
    put.open()
    there.until_here(new)
    go_on.set()
    asking.done()
    assert answers[0]["outcome"] != "no"


def test_a_container_whose_record_cannot_be_written_has_moved_all_the_same(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    full = InternalError("the database is read-only")
    when(
        here,
        lambda way, told: way == "receive" and "arrived" in told,
        lambda _: here.world.journal.fail("records.containers.replace", full, times=2),
    )
    there.world.start(new)
    there.until_here(new)
    eventually(lambda: here.world.app.watch.look() or here.world.container(old).status.moved_to == "there")
    assert here.power(old) is Power.OFF
    assert DISK not in here.world.outside.disks.pod_disks
    assert there.power(new) is Power.RUNNING


def test_a_vm_that_comes_back_keeps_its_disk(nodes):
    here, there = nodes
    old, _new = moved(here, there)
    gate = here.world.journal.hold("disks.delete_pod_disks")
    looking = Background(here.world.app.watch.look)
    gate.wait()
    here.world.stop(old, 30)
    here.world.remove_sandbox(here.world.container(old).sandbox_id)

    def come_back():
        back = here.create(2, FROM_THERE, content=b"")
        here.world.start(back)
        here.until_here(back)
        return back

    returning = Background(come_back)
    returning.ended_within(1)
    gate.open()
    looking.done()
    back = returning.done()
    assert here.power(back) is Power.RUNNING
    assert DISK in here.world.outside.disks.pod_disks


def test_a_vm_that_did_not_come_back_is_still_the_other_nodes(nodes):
    here, there = nodes
    old, new = moved(here, there)
    here.world.stop(old, 30)
    here.world.remove_sandbox(here.world.container(old).sandbox_id)
    here.world.outside.memory_streams.refuses_memory = True
    back = expected(here, 2, FROM_THERE)
    here.world.start(back)
    here.until_ended(back)
    here.world.remove_sandbox(here.world.container(back).sandbox_id)
    here.world.app.watch.look()
    with pytest.raises(WrongState, match="has moved to node there"):
        here.create(3)
    eventually(lambda: runs_on(there, new))


def test_a_stop_breaks_off_a_move_that_takes_long_and_the_guest_shuts_down(nodes):
    here, there = nodes
    old = here.run(bytes(range(256)) * (64 << 12))  # more than fits into the buffers of a connection
    with there.world.outside.peers.connect("here", 5) as link:
        link.send({"do": "move", "move": "0" * 32, **NAME}, 5)
        link.receive(10)
        link.send({"ready": True}, 5)
        link.receive(10)  # announces the disk, which nobody takes
        assert Background(lambda: here.world.stop(old, 30)).ended_within(10)
    ended = here.world.container(old).exit
    assert ended is not None
    assert (ended.code, ended.message) == (143, "the guest shut down because the container was stopped")


def test_a_stop_breaks_off_a_move_whose_memory_nobody_takes(nodes):
    here, there = nodes
    old = here.run(b"")
    with there.world.outside.peers.connect("here", 5) as link:
        link.send({"do": "move", "move": "0" * 32, **NAME}, 5)
        link.receive(10)
        link.send({"ready": True}, 5)
        while "memory" not in (told := link.receive(10)):
            assert told["blocks"] == []
            with open("/dev/null", "wb") as nowhere:
                link.receive_file(nowhere.fileno(), 0, 10)
        assert Background(lambda: here.world.stop(old, 30)).ended_within(5)
    assert here.world.container(old).exit.code == 143


def test_more_moves_to_a_node_than_it_has_connections_for_are_refused_before_they_begin(nodes):
    here, there = nodes
    names = ("a", "b", "c")
    for number, name in enumerate(names):
        disk = Path(here.world.settings.layout().pod_disk(vm_disk_name("default", name, "vm")))
        here.world.start(here.world.create(here.pod(number, {"virtshim.io/vm": name})))
        disk.write_bytes(DISK_BYTES)
    with contextlib.ExitStack() as links:
        asked = []
        for number, name in enumerate(names):
            link = links.enter_context(there.world.outside.peers.connect("here", 5))
            link.send({"do": "move", "move": f"{number:032}", **NAME, "vm": name}, 5)
            asked.append(link)
        assert asked[0].receive(10)["definition"]
        assert asked[1].receive(10)["definition"]
        with pytest.raises(ResourceExhausted, match="2 virtual machines are moving to node there already"):
            asked[2].receive(10)


# --- the other node


def test_a_full_disk_on_the_other_node_ends_the_container_and_makes_room(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    full = ResourceExhausted("no space left on device")
    when_called(there, "streams.receive", lambda: there.world.journal.fail("saved_vms.put", full, times=10**6))
    there.world.start(new)
    there.until_ended(new)
    eventually(lambda: DISK not in there.world.outside.disks.pod_disks)
    eventually(lambda: runs_on(here, old))


def test_a_vm_that_did_not_arrive_leaves_nothing(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    there.world.outside.memory_streams.refuses_memory = True
    there.world.start(new)
    there.until_ended(new)
    eventually(lambda: DISK not in there.world.outside.disks.pod_disks)
    eventually(lambda: there.world.app.watch.look() or there.vm is None)
    there.world.remove_sandbox(there.world.container(new).sandbox_id)
    assert there.world.leftovers() == []
    eventually(lambda: runs_on(here, old))


def test_a_guest_whose_arrival_could_not_be_recorded_at_once_continues_as_itself(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    when(
        here,
        lambda way, told: way == "send" and told.get("outcome") == "yes",
        lambda _: there.world.journal.fail("records.containers.replace", InternalError("read-only"), times=1),
    )
    there.world.start(new)
    eventually(lambda: there.world.app.watch.look() or not there.world.container(new).status.arriving)
    assert there.power(new) is Power.RUNNING
    assert there.world.container(new).status.known_as == old


def test_a_look_at_all_pods_during_the_start_does_not_end_the_arrival(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)

    def look(_before, now) -> None:
        if now is not None and now.status.arriving and not looked:
            looked.append(Background(there.world.app.watch.look))
            looked[0].ended_within(1)

    looked: list[Background] = []
    there.world.records.containers.on_change(look)
    there.world.start(new)
    there.until_here(new)
    looked[0].done()
    assert there.power(new) is Power.RUNNING
    assert there.phase(new) is ContainerPhase.RUNNING


def test_a_container_that_is_stopped_before_all_is_written_leaves_the_guest_where_it_was(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    gate = there.world.journal.hold("vms.accept_disks")
    there.world.start(new)
    gate.wait()
    there.world.stop(new, 30)
    gate.open()
    eventually(lambda: runs_on(here, old))
    assert there.power(new) is not Power.RUNNING


def test_the_end_of_a_qemu_that_waits_for_its_guest_is_told_as_a_move_that_failed(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    gate = there.world.journal.hold("vms.accept_disks")
    there.world.start(new)
    gate.wait()
    there.world.outside.vms.end(there.world.domain(new), OffReason.CRASHED)
    there.world.deliver()
    there.until_ended(new)
    gate.open()
    ended = there.world.container(new).exit
    assert ended is not None
    assert (
        ended.message
        == "the virtual machine did not arrive from its other node: QEMU was killed or crashed; see its log"
    )
    eventually(lambda: runs_on(here, old))


def test_an_operator_cannot_take_a_guest_that_runs_on_on_the_other_node(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)
    here.cut = lambda way, told: (way == "receive" and "arrived" in told) or told.get("do") == "outcome"
    there.world.start(new)
    eventually(lambda: there.vm.arrival.state is not None and runs_on(here, old))
    there.restart()
    here.cut = lambda way, told: False
    with pytest.raises(WrongState, match="node here answers, and runs"):
        there.world.app.receiving.take("default", "db", "vm")
    assert there.power(new) is not Power.RUNNING


def test_an_operator_takes_a_guest_whose_other_node_is_gone(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)
    here.cut = lambda way, told: told.get("outcome") == "yes" or told.get("do") == "outcome"
    there.world.start(new)
    eventually(lambda: here.vm.departure is not None and there.vm.arrival.state is not None)
    here.stop_serving()
    there.restart()
    assert there.power(new) is Power.PAUSED
    there.world.app.receiving.take("default", "db", "vm")
    assert there.power(new) is Power.RUNNING


def test_other_pods_do_not_wait_for_a_node_that_is_slow_to_answer(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    asked, answer = threading.Event(), threading.Event()

    def stall(_told) -> None:
        asked.set()
        answer.wait(20)

    pod = there.pod(1, FROM_HERE)
    when(here, lambda _, told: told.get("do") == "describe", stall)
    creating = Background(lambda: there.create_in(pod, content=b""))
    assert asked.wait(10)
    other = Background(lambda: there.world.create(there.world.run("other")))
    assert other.ended_within(5)
    other.done()
    answer.set()
    creating.done()


def test_a_certificate_that_expires_during_a_move_ends_it_and_the_guest_runs_on(tmp_path):
    """The memory has a connection of its own."""
    ca = ClusterCa(tmp_path)
    with two_nodes(tmp_path, ca) as (here, there):
        old = here.run(DISK_BYTES)
        new = expected(there)
        place = Path(there.files.certificate).parent

        def expire(_told) -> None:
            ca.node("there", into=place, lasts=4)
            over = time.monotonic() + 4
            with there.world.outside.peers.connect("here", 5):
                pass  # it is good now
            eventually(lambda: time.monotonic() > over)

        when(here, lambda _, told: told.get("do") == "move", expire)
        there.world.start(new)
        there.until_ended(new)
        assert "certificate" in there.world.container(new).exit.message
        eventually(lambda: runs_on(here, old))
        ca.node("there", into=place)
        again = there.create_in(there.world.container(new).sandbox_id, attempt=1, content=b"")
        there.world.start(again)
        there.until_here(again)


# --- a taken-over node


class _Hostile:
    """Answers other nodes as a taken-over node may. `own`: the operations that it changes."""

    def __init__(self, node: Node, own: Mapping[str, Callable[[PeerLink, dict[str, Any]], None]]) -> None:
        self.handlers = {**node.world.app.sending.handlers, **own}


def take_over(node: Node, **own: Callable[[PeerLink, dict[str, Any]], None]) -> None:
    node.world.app = dataclasses.replace(node.world.app, sending=_Hostile(node, own))


def test_a_state_as_long_as_a_message_does_not_make_the_record_unreadable(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)

    def lengthen(told) -> None:
        told["state"] = told["state"].replace('"addresses":{', '"addresses":{"x":["' + "y" * 1_040_000 + '"],')

    when(here, lambda way, told: way == "send" and "state" in told, lengthen)
    there.world.start(new)
    there.until_ended(new)
    there.world.app.adapters.files.vms.all(strict=True)
    assert "no proper state" in there.world.container(new).exit.message
    eventually(lambda: runs_on(here, old))


@pytest.mark.parametrize(
    "macs",
    [
        {"eth0": "x" * 900_000},
        {"eth0": "ff:ff:ff:ff:ff:ff"},
        {f"eth{number}": "02:00:00:00:00:01" for number in range(10_000)},
        {"e" * 900_000: "02:00:00:00:00:01"},
    ],
)
def test_macs_that_are_none_are_refused(nodes, macs):
    here, there = nodes
    here.run(DISK_BYTES)
    pod = there.pod(1, FROM_HERE)
    when(here, lambda way, told: way == "send" and "macs" in told, lambda told: told.update(macs=macs))
    with pytest.raises(InvalidRequest, match="no proper MACs"):
        there.create_in(pod, content=b"")
    there.world.app.adapters.files.vms.all(strict=True)


def test_what_another_node_says_of_a_guest_does_not_decide_what_this_node_does(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)

    def lie(told) -> None:
        told["state"] = told["state"].replace('"bytes":0', f'"bytes":{10**30}').replace("false", "true")

    when(here, lambda way, told: way == "send" and "state" in told, lie)
    here.cut = _both(here.cut, lambda way, told: way == "send" and told.get("outcome") == "yes")
    there.world.start(new)
    eventually(lambda: there.vm is not None and there.vm.arrival is not None and there.vm.arrival.state is not None)
    state = there.vm.arrival.state
    assert (state.bytes, state.by_operator, state.renewing) == (0, False, False)
    assert state.known_as == old


def _both(one, other):
    return lambda way, told: one(way, told) or other(way, told)


def test_a_disk_without_an_end_is_refused(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = expected(there)
    real = here.world.app.sending.handlers["move"]
    sent = []

    class Endless:
        """Sends the disk again and again."""

        def __init__(self, link: PeerLink) -> None:
            self._link = link

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

        def send(self, message: Mapping[str, object], timeout: float) -> None:
            while "memory" in message and len(sent) < 1000:
                self._link.send({"size": 1, "blocks": []}, timeout)
                with open("/dev/null", "rb") as nothing:
                    self._link.send_file(nothing.fileno(), timeout)
                sent.append(1)
            self._link.send(message, timeout)

    take_over(here, move=lambda link, asked: real(Endless(link), asked))
    there.world.start(new)
    there.until_ended(new)
    assert "sent the disk more than" in there.world.container(new).exit.message


def test_memory_that_trickles_ends_the_move_and_the_guest_runs_on(nodes, monkeypatch):
    monkeypatch.setattr("virtshim.moves.receiving.LONGEST_MEMORY", 0.5)
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)

    def trickle(link: PeerLink, asked: dict[str, Any]) -> None:
        read, write = os.pipe()
        slowly = Background(lambda: [os.write(write, b"x") for _ in iter(lambda: not cut.wait(0.01), False)])
        try:
            link.send_file(read, 30)
        finally:
            cut.set()
            slowly.done()
            os.close(read)
            os.close(write)

    cut = threading.Event()
    take_over(here, memory=trickle)
    there.world.start(new)
    there.until_ended(new)
    assert "is too slow" in there.world.container(new).exit.message
    eventually(lambda: runs_on(here, old))


def test_memory_without_an_end_is_refused_and_the_guest_runs_on(nodes, monkeypatch):
    monkeypatch.setattr("virtshim.moves.receiving.MOST_MEMORY", 8 << 20)
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = expected(there)

    real = here.world.app.sending.handlers["memory"]

    class Endless:
        def __init__(self, link: PeerLink) -> None:
            self.peer, self.close, self._link = link.peer, link.close, link

        def send_file(self, source: int, idle: float) -> int:
            with open("/dev/zero", "rb") as zeros:
                return self._link.send_file(zeros.fileno(), idle)

    take_over(here, memory=lambda link, asked: real(Endless(link), asked))
    there.world.start(new)
    there.until_ended(new)
    assert "a file of more than" in there.world.container(new).exit.message
    eventually(lambda: runs_on(here, old))


def test_only_the_node_that_a_guest_has_moved_to_hears_that_it_has(tmp_path):
    ca = ClusterCa(tmp_path)
    with two_nodes(tmp_path, ca) as (here, there):
        moves: list[str] = []
        when(here, lambda _, told: told.get("do") == "move", lambda told: moves.append(told["move"]))
        moved(here, there)
        answers = []
        for name in ("there", "another"):
            with PeerClient(ca.node(name), Live({"here": here.address})).connect("here", 5) as link:
                link.send({"do": "outcome", "move": moves[0], **NAME}, 5)
                answers.append(link.receive(10)["outcome"])
        assert answers == ["yes", "no"]


# --- kills


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("who", ["here", "there"])
def test_a_kill_of_either_daemon_at_any_step_leaves_one_guest_that_runs(tmp_path, who, when):
    with two_nodes(tmp_path / "count") as both:
        dying = both[who == "there"]
        old, new = _to_be_moved(*both)
        dying.world.journal.forget()
        both[1].world.start(new)
        both[1].until_here(new)
        eventually(lambda: both[0].power(old) is Power.OFF)
        steps = len(dying.world.journal.calls)
    for at in range(1, steps + 1):
        with two_nodes(tmp_path / f"{at}") as (here, there):
            _kill_and_look(here, there, there if who == "there" else here, at, when)


def _kill_and_look(here: Node, there: Node, dying: Node, at: int, when: When) -> None:
    old, new = _to_be_moved(here, there)
    dying.world.journal.forget()
    dying.world.journal.crash(at, when)
    with contextlib.suppress(Crash, Exception):
        there.world.start(new)
    eventually(lambda: len(dying.world.journal.calls) >= at or _is_settled(here, old, there, new))
    dying.restart()
    eventually(lambda: _looked_at(here, there) and _is_settled(here, old, there, new))
    if there.power(new) is Power.RUNNING:
        assert there.world.outside.vms.domains[there.world.domain(new)].boots == 0, f"at {at}"
        assert there.world.container(new).status.known_as == old, f"at {at}"
        assert there.vm.is_here, f"at {at}"
        eventually(lambda: _looked_at(here, there) and DISK not in here.world.outside.disks.pod_disks)
        assert here.phase(old) is ContainerPhase.RUNNING, f"at {at}"
    else:
        assert here.world.container(old).exit is None, f"at {at}"
        assert here.world.outside.vms.domains[here.world.domain(old)].boots == 1, f"at {at}"


def _to_be_moved(here: Node, there: Node):
    return here.run(DISK_BYTES), expected(there)


def _looked_at(*both: Node) -> bool:
    for node in both:
        node.world.app.watch.look()
    return True


def _is_settled(here: Node, old, there: Node, new) -> bool:
    run_here, run_there = here.power(old) is Power.RUNNING, there.power(new) is Power.RUNNING
    assert not (run_here and run_there)
    status, now = here.world.container(old).status, there.world.container(new)
    if run_here:
        return not status.saving and now.phase is not ContainerPhase.RUNNING
    return run_there and not now.status.arriving and status.moved_to == "there"
