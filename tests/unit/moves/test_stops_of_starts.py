"""A call that ends a pod does not wait for a slow other node. The start of the pod, or the creation of its container,
is given up at once, and the guest continues where it is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT
from fakes.moving import NAMED, Node, Silent, two_nodes
from fakes.waiting import eventually

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Aborted, InternalError, ResourceExhausted, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power
from virtshim.peers.client import PeerClient
from virtshim.system.locks import LeaveOff

FROM_HERE = {**NAMED, "virtshim.io/restore-from": "here"}
DISK_BYTES = b"a guest's files"
GIVEN_UP = "is being stopped, so its start was given up"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


@pytest.fixture
def silent(nodes: tuple[Node, Node]) -> Iterator[Callable[[str], Silent]]:
    """Makes the first node silent about an operation."""
    with contextlib.ExitStack() as stack:
        yield lambda operation: stack.enter_context(nodes[0].silent(operation))


def at_once(call: Callable[[], object], limit: float = 8.0) -> None:
    """`limit`: seconds, less than the limit of what `call` would wait for."""
    began = time.monotonic()
    call()
    assert time.monotonic() - began < limit


@pytest.mark.parametrize("grace", [0, 30])
def test_a_stop_ends_a_start_whose_other_node_does_not_answer(nodes, silent, grace):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    other = silent("move")
    starting = Background(lambda: there.world.start(new))
    assert other.asked.wait(WAIT_LIMIT)
    at_once(lambda: there.world.stop(new, grace))
    with pytest.raises(Aborted, match=GIVEN_UP):
        starting.done()
    assert there.phase(new) is ContainerPhase.EXITED
    assert here.power(old) is Power.RUNNING


def test_a_removal_of_the_pod_ends_such_a_start_too(nodes, silent):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    pod = there.world.container(new).sandbox_id
    other = silent("move")
    starting = Background(lambda: there.world.start(new))
    assert other.asked.wait(WAIT_LIMIT)
    at_once(lambda: there.world.remove_sandbox(pod))
    with pytest.raises(Aborted, match=GIVEN_UP):
        starting.done()
    assert there.world.records.sandboxes.get(pod) is None
    assert here.power(old) is Power.RUNNING


def test_a_stop_ends_a_start_that_is_still_connecting(nodes):
    here, there = nodes
    here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    with socket.create_server(("127.0.0.1", 0)) as mute:  # no handshake
        there.addresses["here"] = f"127.0.0.1:{mute.getsockname()[1]}"
        starting = Background(lambda: there.world.start(new))
        connected, _ = mute.accept()
        with connected:
            at_once(lambda: there.world.stop(new, 30), 4.0)
            with pytest.raises(Aborted, match=GIVEN_UP):
                starting.done()


def test_a_stop_ends_a_start_whose_other_node_is_being_looked_up(nodes, monkeypatch):
    here, there = nodes
    here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    looks, over = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> Any:
        looks.set()
        over.wait(WAIT_LIMIT)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    starting = Background(lambda: there.world.start(new))
    assert looks.wait(WAIT_LIMIT)
    at_once(lambda: there.world.stop(new, 30), 4.0)
    with pytest.raises(Aborted, match=GIVEN_UP):
        starting.done()
    over.set()


def test_a_stop_of_the_pod_ends_the_creation_of_a_container_that_asks_the_other_node(nodes, silent):
    here, there = nodes
    here.run(DISK_BYTES)
    pod = there.pod(1, FROM_HERE)
    other = silent("describe")
    creating = Background(lambda: there.create_in(pod, content=b""))
    assert other.asked.wait(WAIT_LIMIT)
    at_once(lambda: there.world.stop_sandbox(pod))
    with pytest.raises(Aborted, match=r"its pod is being stopped, so container vm .* is not created"):
        creating.done()
    assert there.world.records.containers.all() == []


def test_the_next_attempt_after_a_stopped_start_moves_the_guest(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    with here.silent("move") as other:
        starting = Background(lambda: there.world.start(new))
        assert other.asked.wait(WAIT_LIMIT)
        there.world.stop(new, 30)
        with pytest.raises(Aborted):
            starting.done()
    again = there.create_in(there.world.container(new).sandbox_id, attempt=1)
    there.world.start(again)
    there.until_here(again)
    assert there.disk.read_bytes() == DISK_BYTES
    assert here.phase(old) is ContainerPhase.RUNNING, "until its pod is deleted"


def test_a_failed_start_lets_the_other_node_go_even_if_its_vm_cannot_be_ended(nodes):
    here, there = nodes
    old = here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    there.world.journal.fail("records.containers.replace", InternalError("the database is read-only"), times=9)
    there.world.journal.fail("vms.destroy", InternalError("libvirt does not answer"), times=9)
    with pytest.raises(InternalError):
        there.world.start(new)
    assert saved_by_hand(here, old), "no move is under way any more"


def saved_by_hand(node: Node, container: ContainerId) -> bool:
    def save() -> bool:
        with contextlib.suppress(WrongState):  # a move is under way
            node.world.do.stop_container.save(node.world.container(container), 30)
        return node.phase(container) is ContainerPhase.EXITED

    eventually(save)
    return True


def test_a_place_that_other_questions_have_for_a_moment_does_not_end_a_move(nodes, monkeypatch):
    here, there = nodes
    here.run(DISK_BYTES)
    new = there.create(1, FROM_HERE, content=b"")
    connect, refusals = PeerClient.connect, [1, 2]

    def crowded(client: PeerClient, node: str, timeout: float, leave_off: LeaveOff | None = None) -> Any:
        if leave_off is None and refusals:  # the link of the memory
            refusals.pop()
            raise ResourceExhausted("peer there has 6 connections, the limit for one peer; wait until one ends")
        return connect(client, node, timeout, leave_off)

    monkeypatch.setattr(PeerClient, "connect", crowded)
    there.world.start(new)
    there.until_here(new)
    assert not refusals
