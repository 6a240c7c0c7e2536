"""Gives a VM to another node, which asks for it. The guest runs here while its disk and its memory are copied, and is
paused for the last part. A guest that was saved continues from its saved memory there.

The VM's record here decides where the guest may run. As soon as it names the other node, this guest never runs again. Until then
the guest keeps running in the same QEMU after any failure.
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
from virtshim.model.container import Container, ContainerPhase
from virtshim.model.errors import (
    Aborted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    ShimError,
    Unavailable,
    WrongState,
)
from virtshim.model.layout import Layout, directories_of
from virtshim.model.network import taps_of
from virtshim.model.sandbox import owner_of, vm_disk_name, vm_uuid
from virtshim.model.text import escaped
from virtshim.moves.disk_passes import DiskSender, closed_after, wide_pipe
from virtshim.moves.fingerprints import difference
from virtshim.moves.fitting import Nic, Offer, text_of_offer
from virtshim.moves.saving import SaveVm
from virtshim.moves.values import Departure, OnVolume, SavedState, VmRecord, unsavable_vm
from virtshim.peers.ports import PeerLink
from virtshim.system.locks import new_lock
from virtshim.vm.guest_needs import SavedMemory
from virtshim.vm.ports import MemoryStreams
from virtshim.vm.streams import wait_for_stream

log = structlog.get_logger(__name__)

# Seconds: for a message, for the other node to start QEMU, to write what it got to its disk, and without progress.
ANSWER: Final = 10.0
QEMU_STARTS: Final = 120.0
SYNC: Final = 60.0
IDLE: Final = 20.0
# Seconds that a move waits for the lock of a VM that is off.
_VM_WAIT: Final = 5.0
# Seconds for one pass over a disk, during which nothing of the memory is sent.
LONGEST_PASS: Final = 600.0
# Seconds for a guest's memory, and what is left of its disk. The guest is paused for the last part of this.
_STANDS_STILL: Final = 300.0
# Moves to one node at once. Each takes two of the connections that a node may have here, so more moves would end each other.
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
    """A move that is under way. `memory`: the descriptor to read its memory from, -1 before and after. `links`: those in use."""

    peer: str
    links: list[PeerLink]
    memory: int = -1
    broken: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)
    sent: threading.Event = field(default_factory=threading.Event)
    error: ShimError | None = None

    def break_off(self) -> None:
        self.broken.set()
        self.taken.set()  # nobody takes the memory any more
        self.sent.set()
        for link in self.links:
            link.close()


@dataclass(frozen=True, slots=True)
class Departures:
    """Decides that a VM is another node's, and ends it here."""

    saving: SaveVm
    disks: RootDisks

    def commit(self, container: Container, node: str, move: str) -> None:
        """Gives the guest to the other node. The caller holds `SaveVm.alone`, and the guest is paused."""
        saving, disk = self.saving, container.spec.pod_disk
        with saving.locks.held(container.sandbox_id), saving.locks.held_for_all(owner_of(disk)):
            saving.stopped(container)
            self.commit_of(saving.vm(container), node, move)

    def commit_of(self, vm: VmRecord, node: str, move: str) -> None:
        """Like `commit`, for a VM that is off. The caller holds the VM's lock."""
        vms, at = self.saving.vms, self.saving.clock.now_ns()
        try:
            vms.put(dataclasses.replace(vm, departure=Departure(node, move, at), saved=None))
        except ShimError:
            # The record may be on disk despite the error. If this fails, too, nobody uses the VM here: it may have moved.
            vms.put(vm)
            raise

    def has_left(self, container: Container) -> bool:
        """Whether the container's guest belongs to another node now, whatever the container's record says."""
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
    _lock: threading.Lock = field(default_factory=new_lock)

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
        """Answers whether a move counts. "no" is final: the move never counts later."""
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
        vm, mine = self._record(asked), _Move(link.peer, [link])
        container = self._user(vm)
        if container is not None and container.is_running:
            self.alone(container, lambda: self._give(link, container, vm, move, mine), mine.break_off)
        else:
            self._give_saved(link, vm.disk, asked, move, mine)

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
            "offer": text_of_offer(self._offer(container, vm)),
        }

    def _offer(self, container: Container, vm: VmRecord) -> Offer:
        needs, size = self.streams.needs(container.domain_uuid, container.id), container.status.size
        sandbox = self.saving.records.sandboxes.get(container.sandbox_id)
        nics = taps_of(sandbox.network if sandbox is not None else None)
        return Offer(
            image=vm.image.value,
            needs=needs,
            disk_bytes=self.saving.vms.disk_bytes(vm.disk) if container.granted.root_volume is None else 0,
            memory_bytes=0 if size.page_bytes else size.memory_bytes,  # huge pages are taken before QEMU waits
            nics={nic.name: Nic(nic.mtu, queues) for nic, queues in zip(nics, needs.queues, strict=False)},
        )

    @contextlib.contextmanager
    def _root_disk(self, container: Container, mine: _Move) -> Iterator[DiskSender | None]:
        """Yields None for a root disk on a volume, which the other node has, too."""
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
        """Sends the memory and, once the guest is paused, the rest of the disk. Returns when all of it has left this node."""
        domain, own = container.domain_uuid, container.id
        runs_on = self.streams.can_copy_while_running(domain, own)
        with self._memory_pipe(mine) as write:
            try:
                link.send({"memory": True}, ANSWER)
                self._until_taken(mine)
                if not runs_on:  # not before the other node waits for the memory
                    self.saving.pausing.pause(domain, own)
                self.streams.send(domain, own, write)
            finally:
                os.close(write)  # QEMU has its own
            if disk is not None and not runs_on:
                disk.send(link, IDLE)  # beside the memory, because the guest writes nothing more
            self._until_stopped(container, mine)
            self.streams.go_on(domain, own)
            if disk is not None and runs_on:
                disk.send(link, IDLE)
            self._until(container, mine, SYNC, stopped=False)
            if not mine.sent.wait(IDLE):
                raise DeadlineExceeded(f"node {mine.peer} did not take the guest's memory")
            if mine.error is not None:
                raise mine.error

    def _until_taken(self, mine: _Move) -> None:
        """Returns when the other node has asked for the memory."""
        if not mine.taken.wait(ANSWER):
            raise DeadlineExceeded(f"node {mine.peer} did not ask for the guest's memory")
        if mine.broken.is_set():
            raise Aborted("the move was broken off")

    @contextlib.contextmanager
    def _memory_pipe(self, mine: _Move) -> Iterator[int]:
        """Yields the end that QEMU writes to; the caller closes it."""
        read, write = wide_pipe()
        mine.memory = read
        try:
            yield write
        finally:
            with self._lock:
                mine.memory = -1
                os.close(read)

    def _until_stopped(self, container: Container, mine: _Move) -> None:
        """Returns when the guest is paused, because little of its memory is left, or because it has written too much."""
        try:
            self._until(container, mine, _PATIENCE, stopped=True)
        except DeadlineExceeded:
            log.info("vm.move.paused", container=container.id.short, why=f"its memory changed for {_PATIENCE:g} s")
            self.saving.pausing.pause(container.domain_uuid, container.id)
            self._until(container, mine, SYNC, stopped=True)

    def _until(self, container: Container, mine: _Move, seconds: float, *, stopped: bool) -> None:
        def check() -> None:
            if mine.broken.is_set():
                raise Aborted("the move was broken off")
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

    # --- below: the move of a VM that is off

    def _give_saved(self, link: PeerLink, disk: str, asked: dict[str, Any], move: str, mine: _Move) -> None:
        """Holds the VM's lock, so no container of the VM is created here meanwhile."""
        saving = self.saving
        with saving.locks.held_soon(owner_of(disk), _VM_WAIT) as held, self._under_way(move, mine):
            if not held:
                raise Unavailable("another call works on the virtual machine; try again")
            vm = self._record(asked)
            state = self._movable_state(vm)
            memory = self.streams.saved(saving.vms.memory(disk))
            link.send(self._saved_definition(vm, state, memory), ANSWER)
            link.receive(QEMU_STARTS)
            with contextlib.closing(DiskSender(self.layout.pod_disk(disk), mine.broken)) as sender:
                sender.send(link, IDLE)
            with closed_after(LONGEST_PASS, link):
                self._send_saved_memory(link, saving.vms.memory(disk), memory.begins_at, mine)
                link.send({"state": STATE.dump_json((state,)).decode()}, ANSWER)
                link.receive(SYNC)
            self.departures.commit_of(vm, link.peer, move)
        log.info("vm.moved", vm=vm.readable, node=link.peer, saved_at=state.saved_at)
        with contextlib.suppress(ShimError):  # the peer asks again
            link.send({"outcome": "yes"}, ANSWER)
        self.departures.drop_disk(disk)

    def _movable_state(self, vm: VmRecord) -> SavedState:
        """Raises WrongState. A state is sent only with the disks that it knows."""
        what, remedy = f"virtual machine {vm.readable} does not run there", "start its pod on that node"
        if (user := self._user(vm)) is not None:
            raise WrongState(f"{what}, and its container {user.id.short} is {user.phase.value}; wait until it runs")
        if vm.volume != OnVolume():
            raise WrongState(f"{what}, and has its state on a volume; remove virtshim.io/restore-from")
        if self.saving.hypervisor.power(vm_uuid(vm.disk)).is_on:
            raise WrongState(f"{what}, but is still on in libvirt; delete its pod on that node")
        state = vm.saved
        if state is None or state.taken_by is not None:
            raise WrongState(f"{what}, and has no saved memory; {remedy}")
        if state.disks.keys() != {""} or not self.saving.vms.disk_bytes(vm.disk):
            raise WrongState(f"{what}, and its saved memory belongs to volumes, too; {remedy}")
        if changed := difference(state.disks, {"": self.saving.vms.root_fingerprint(vm.disk)}):
            raise WrongState(
                f"{what}, and its saved memory no longer fits its disk: {changed}; {remedy}, where it boots"
            )
        return state

    def _saved_definition(self, vm: VmRecord, state: SavedState, memory: SavedMemory) -> dict[str, object]:
        disk_bytes = self.saving.vms.disk_bytes(vm.disk)
        return {
            "definition": memory.definition,
            "directories": state.directories or directories_of(self.layout, state.container, vm.disk),
            "images": self.layout.images,
            "macs": dict(vm.macs),
            "has_disk": True,
            "offer": text_of_offer(Offer(vm.image.value, memory.needs, disk_bytes, memory.memory_bytes)),
        }

    def _send_saved_memory(self, link: PeerLink, path: str, begins_at: int, mine: _Move) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise InternalError(f"the saved memory {path} cannot be read: {exc.strerror}") from exc
        try:
            os.lseek(file, begins_at, os.SEEK_SET)
            mine.memory = file
            link.send({"memory": True}, ANSWER)
            self._until_taken(mine)
            if not mine.sent.wait(LONGEST_PASS):
                raise DeadlineExceeded(f"node {mine.peer} did not take the guest's memory")
            if mine.error is not None:
                raise mine.error
        finally:
            with self._lock:
                mine.memory = -1
                os.close(file)

    # --- what cannot move

    def _refuse_unmovable(self, container: Container) -> None:
        spec = container.spec
        if what := unsavable_vm(spec):
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
            for link in mine.links[1:]:  # the other node gets no more of the memory; the first link carries the reason
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

    def _user(self, vm: VmRecord) -> Container | None:
        """The container that may use the VM now."""
        containers = self.saving.records.containers.all()
        users = [one for one in containers if one.spec.pod_disk == vm.disk and one.phase is not ContainerPhase.EXITED]
        return next((one for one in users if one.is_running), users[0] if users else None)


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name, "")
    if not isinstance(value, str) or len(value) > 300:
        raise InvalidRequest(f"a question of another node has no proper {name}")
    return value
