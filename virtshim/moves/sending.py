"""Gives a VM to another node, which asks for it. The guest runs on here while its disk and its memory are copied, and stands
still for the rest.

The VM's record here decides where the guest may run. As soon as it names the other node, this guest never runs again. Until then
any failure lets the guest run on, in the same QEMU.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog
from pydantic import TypeAdapter

from virtshim.disks.ports import DiskPlaces, RootDisks
from virtshim.model.container import Container
from virtshim.model.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    ShimError,
    WrongState,
)
from virtshim.model.layout import Layout, directories_of
from virtshim.model.sandbox import owner_of, vm_disk_name
from virtshim.model.text import escaped
from virtshim.moves.disk_passes import DiskSender, closed_after
from virtshim.moves.saving import SaveVm
from virtshim.moves.values import Departure, SavedState, VmRecord, unsavable
from virtshim.peers.ports import PeerLink
from virtshim.vm.ports import MemoryStreams
from virtshim.vm.streams import wait_for_stream

log = structlog.get_logger(__name__)

# Seconds: for a message, for the other node to start QEMU, to write what it got to its disk, and without progress.
ANSWER: Final = 10.0
QEMU_STARTS: Final = 120.0
SYNC: Final = 60.0
IDLE: Final = 20.0
# Seconds for one pass over a disk, during which nothing of the memory is sent.
LONGEST_PASS: Final = 600.0
# Seconds for a guest's memory, and what is left of its disk. The guest stands still for the last part of this.
_STANDS_STILL: Final = 300.0
# Moves to one node: each has two of the connections that a node may have here, so more would break each other off.
_MOST_AT_ONCE: Final = 2
# Passes over a disk while the guest runs. They end as soon as one of them sent little: bytes.
_PASSES: Final = 5
_LITTLE: Final = 64 << 20
# Seconds after which a guest is stopped that writes to its memory faster than it can be sent.
_PATIENCE: Final = 60.0
_MOVE: Final = re.compile(r"[0-9a-f]{32}")

# A tuple, as `virtshim.moves.files` has it.
STATE: Final[TypeAdapter[tuple[SavedState]]] = TypeAdapter(tuple[SavedState])


class AloneWithVm(Protocol):
    def __call__(self, container: Container, act: Callable[[], None], break_off: Callable[[], None]) -> None:
        """Calls `act`, while stops of the container wait, at most for their grace period. `break_off`: makes `act` fail soon."""


@dataclass(slots=True)
class _Move:
    """A move that is under way. `memory`: where its memory can be read, -1 before and after. `links`: those that it uses."""

    peer: str
    links: list[PeerLink]
    memory: int = -1
    broken: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)
    sent: threading.Event = field(default_factory=threading.Event)
    error: ShimError | None = None

    def break_off(self) -> None:
        self.broken.set()
        for link in self.links:
            link.close()


@dataclass(frozen=True, slots=True)
class Departures:
    """Decides that a VM is another node's, and ends it here."""

    saving: SaveVm
    disks: RootDisks

    def commit(self, container: Container, node: str, move: str) -> None:
        """The guest is the other node's on return. The caller holds `SaveVm.alone`, and the guest stands still."""
        saving, disk = self.saving, container.spec.pod_disk
        with saving.locks.held(container.sandbox_id), saving.locks.held_for_all(owner_of(disk)):
            saving.stopped(container)
            vm = saving.vm(container)
            try:
                saving.vms.put(
                    dataclasses.replace(vm, departure=Departure(node, move, saving.clock.now_ns()), saved=None)
                )
            except ShimError:
                # It may be on disk all the same. If this fails, too, the guest stays paused: it may be the other node's.
                saving.vms.put(vm)
                raise

    def has_left(self, container: Container) -> bool:
        """Whether the container's guest is another node's, whatever the container's record says."""
        vm = self.saving.vms.get(container.spec.pod_disk) if container.status.saving else None
        return vm is not None and vm.has_left

    def finish(self, container: Container) -> None:
        """Ends QEMU, and removes the disk, which is older than the other node's. Another process may repeat it."""
        saving = self.saving
        with saving.locks.held(container.sandbox_id):
            vm, now = saving.vm(container), saving.records.containers.get(container.id)
            if vm.departure is not None and vm.has_left and now is not None and now.is_running:
                if not now.status.moved_to:
                    saving.records.containers.replace(now.moved(vm.departure.node))
                if saving.hypervisor.power(container.domain_uuid).is_on:
                    saving.hypervisor.destroy(container.domain_uuid, container.id)
                    log.info("vm.moved", container=container.id.short, vm=vm.readable, node=vm.departure.node)
        self.drop_disk(vm.disk)

    def drop_disk(self, disk: str) -> None:
        """Removes the disk of a VM that has left. The lock keeps the VM from coming back meanwhile, with another disk."""
        with self.saving.locks.held_for_all(owner_of(disk)):
            vm = self.saving.vms.get(disk)
            if vm is not None and vm.has_left:
                self.disks.delete_pod_disks(owner_of(disk))


@dataclass(slots=True)
class SendVm:
    departures: Departures
    streams: MemoryStreams
    places: DiskPlaces
    layout: Layout
    alone: AloneWithVm
    _moves: dict[str, _Move] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def handlers(self) -> Mapping[str, Callable[[PeerLink, dict[str, Any]], None]]:
        return {"describe": self.describe, "move": self.move, "memory": self.memory, "outcome": self.outcome}

    @property
    def saving(self) -> SaveVm:
        return self.departures.saving

    # --- what other nodes ask

    def describe(self, link: PeerLink, asked: dict[str, Any]) -> None:
        """The MACs of a VM and, if `container` is asked for, what its next node needs to define it."""
        namespace, vm, container = (_text(asked, name) for name in ("namespace", "vm", "container"))
        known = [one for one in self.saving.vms.all() if (one.namespace, one.name) == (namespace, vm)]
        if container:
            known = [self._record(asked)]
        if not known:
            raise NotFound(f"virtual machine {escaped(f'{namespace}/{vm}', 200)} is not on this node")
        macs = {name: mac for one in known for name, mac in one.macs.items()}
        answer: dict[str, object] = {"macs": macs}
        if container:
            places = self.places.read(known[0].disk)
            answer |= {"image": known[0].image.value, "places": base64.b64encode(places.to_bytes()).decode()}
        link.send(answer, ANSWER)

    def outcome(self, link: PeerLink, asked: dict[str, Any]) -> None:
        """Whether a move counts. "no" is the last word: the move never counts later."""
        move = _text(asked, "move")
        with self._lock:  # before the record is read: a move that ends in between has written it
            is_under_way = move in self._moves
        vm = self._record(asked, may_be_gone=True)
        if vm.departure is not None and vm.departure.move == move:
            link.send({"outcome": "yes" if vm.departure.node == link.peer else "no"}, ANSWER)
            return
        link.send({"outcome": "later" if is_under_way else "no"}, ANSWER)

    def memory(self, link: PeerLink, asked: dict[str, Any]) -> None:
        """The guest's memory, for a move that is under way on another link of the same peer."""
        with self._lock:
            found = self._moves.get(_text(asked, "move"))
            if found is None or found.peer != link.peer or found.memory < 0 or found.taken.is_set():
                raise NotFound("no such move waits for its memory to be taken")
            pipe = os.dup(found.memory)
            found.links.append(link)
            found.taken.set()
        try:
            link.send_file(pipe, LONGEST_PASS)
        except ShimError as exc:
            found.error = exc
            raise
        finally:
            os.close(pipe)
            found.sent.set()

    def move(self, link: PeerLink, asked: dict[str, Any]) -> None:
        """Gives the VM to the peer."""
        move = _text(asked, "move")
        if not _MOVE.fullmatch(move):
            raise InvalidRequest("a move has no proper name")
        vm = self._record(asked)
        container = self._running(vm)
        mine = _Move(link.peer, [link])
        self.alone(container, lambda: self._give(link, container, vm, move, mine), mine.break_off)

    # --- below: the move

    def _give(self, link: PeerLink, container: Container, vm: VmRecord, move: str, mine: _Move) -> None:
        saving = self.saving
        with saving.alone(container.id) as is_alone, self._under_way(move, mine):
            if not is_alone:
                raise Aborted(f"container {container.id.short} is being saved or moved already")
            self._refuse_unmovable(container)
            link.send(self._definition(container, vm), ANSWER)
            link.receive(QEMU_STARTS)
            with self._root_disk(container, mine) as disk:
                self._first_passes(link, disk)
                saving.begin(container)
                try:
                    with closed_after(_STANDS_STILL, link):
                        self._send_rest(link, container, disk, mine)
                        self._confirmed(link, container)
                    self.departures.commit(container, link.peer, move)
                except BaseException:
                    with contextlib.suppress(ShimError):
                        self.streams.cancel(container.domain_uuid, container.id)
                    saving.go_on(container)
                    raise
        with contextlib.suppress(ShimError):  # the peer asks again
            link.send({"outcome": "yes"}, ANSWER)
        self.departures.finish(container)

    def _definition(self, container: Container, vm: VmRecord) -> dict[str, object]:
        return {
            "definition": self.streams.definition(container.domain_uuid, container.id),
            "directories": directories_of(self.layout, container.id, vm.disk),
            "images": self.layout.images,
            "macs": dict(vm.macs),
            "has_disk": container.granted.root_volume is None,
        }

    @contextlib.contextmanager
    def _root_disk(self, container: Container, mine: _Move) -> Iterator[DiskSender | None]:
        """None if it is on a volume, which the other node has, too."""
        if container.granted.root_volume is not None:
            yield None
            return
        with contextlib.closing(DiskSender(self.layout.pod_disk(container.spec.pod_disk), mine.broken)) as disk:
            yield disk

    def _first_passes(self, link: PeerLink, disk: DiskSender | None) -> None:
        for _ in range(_PASSES if disk is not None else 0):
            assert disk is not None
            if disk.send(link, IDLE) < _LITTLE:
                return

    def _send_rest(self, link: PeerLink, container: Container, disk: DiskSender | None, mine: _Move) -> None:
        """The memory and, once the guest stands still, what is left of the disk. All of it has left this node on return."""
        domain, own = container.domain_uuid, container.id
        with self._memory_pipe(container, mine):
            link.send({"memory": True}, ANSWER)
            if not mine.taken.wait(ANSWER):
                raise DeadlineExceeded(f"node {mine.peer} did not ask for the guest's memory")
            self._until_stopped(container, mine)
            self.streams.go_on(domain, own)
            if disk is not None:
                disk.send(link, IDLE)
            self._until(container, mine, SYNC, stopped=False)
            if not mine.sent.wait(IDLE):
                raise DeadlineExceeded(f"node {mine.peer} did not take the guest's memory")
            if mine.error is not None:
                raise mine.error

    @contextlib.contextmanager
    def _memory_pipe(self, container: Container, mine: _Move) -> Iterator[None]:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self.streams.send(container.domain_uuid, container.id, write)
            finally:
                os.close(write)
            mine.memory = read
            yield
        finally:
            with self._lock:
                mine.memory = -1
                os.close(read)

    def _until_stopped(self, container: Container, mine: _Move) -> None:
        """Returns when the guest stands still, because little of its memory is left, or because it has written too much."""
        try:
            self._until(container, mine, _PATIENCE, stopped=True)
        except DeadlineExceeded:
            log.info("vm.move.paused", container=container.id.short, why=f"its memory changed for {_PATIENCE:g} s")
            self.saving.pausing.pause(container.domain_uuid, container.id)
            self._until(container, mine, SYNC, stopped=True)

    def _until(self, container: Container, mine: _Move, seconds: float, *, stopped: bool) -> None:
        def check() -> None:
            if mine.error is not None:
                raise mine.error

        wait_for_stream(
            lambda: self.streams.state(container.domain_uuid, container.id),
            self.saving.clock,
            seconds,
            "the guest's memory was not sent",
            stopped=stopped,
            check=check,
        )

    def _confirmed(self, link: PeerLink, container: Container) -> None:
        """Returns when the peer has all of the VM on its disk."""
        found = self.saving.records.containers.get(container.id) or container
        state = self.saving.left_by(found, self.saving.vm(container))
        link.send({"state": STATE.dump_json((state,)).decode()}, ANSWER)
        link.receive(SYNC)

    def _refuse_unmovable(self, container: Container) -> None:
        spec = container.spec
        if what := unsavable(spec.granted, spec.volumes, spec.empty_disks):
            raise WrongState(f"virtual machine {spec.vm} cannot be moved with {what}")
        if spec.state_volume:
            raise WrongState(
                f"virtual machine {spec.vm} has its state on a volume, by which it reaches other nodes; remove "
                "virtshim.io/restore-from"
            )
        if blockers := self.streams.blockers(container.domain_uuid, container.id):
            raise WrongState(f"QEMU cannot move virtual machine {spec.vm}: {escaped('; '.join(blockers), 400)}")

    @contextlib.contextmanager
    def _under_way(self, move: str, mine: _Move) -> Iterator[None]:
        with self._lock:
            if move in self._moves:
                raise Aborted("this move is under way already")
            if sum(one.peer == mine.peer for one in self._moves.values()) >= _MOST_AT_ONCE:
                raise ResourceExhausted(
                    f"{_MOST_AT_ONCE} virtual machines are moving to node {mine.peer} already; wait until one has arrived"
                )
            self._moves[move] = mine
        try:
            yield
        except BaseException:
            for link in mine.links[1:]:  # whoever takes the memory gets no more of it; the first one is told why
                link.close()
            raise
        finally:
            with self._lock:
                del self._moves[move]

    # --- look-ups

    def _record(self, asked: dict[str, Any], *, may_be_gone: bool = False) -> VmRecord:
        namespace, name, container = (_text(asked, one) for one in ("namespace", "vm", "container"))
        vm = self.saving.vms.get(vm_disk_name(namespace, name, container))
        if vm is None:
            raise NotFound(f"virtual machine {escaped(f'{namespace}/{name}/{container}', 200)} is not on this node")
        if vm.departure is not None and not may_be_gone:
            raise NotFound(f"virtual machine {vm.readable} has moved to node {vm.departure.node}")
        if vm.arrival is not None and not may_be_gone:
            raise WrongState(f"virtual machine {vm.readable} is on its way to this node itself; try again")
        return vm

    def _running(self, vm: VmRecord) -> Container:
        for one in self.saving.records.containers.all():
            if one.spec.pod_disk == vm.disk and one.is_running:
                return one
        raise WrongState(
            f"virtual machine {vm.readable} does not run there, and only a running one can be moved; start its pod on that node"
        )


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name, "")
    if not isinstance(value, str) or len(value) > 300:
        raise InvalidRequest(f"a question of another node has no proper {name}")
    return value
