"""Takes a running VM over from another node.

QEMU starts here before the guest stops there, and waits for the memory. When all of the VM is on this node's disk, the record
says so. From then on, only the other node knows whether the guest may run here. If its answer is lost, the guest waits, and this
node asks again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from pydantic import ValidationError

from virtshim.annotations.parse import parse_vm_options
from virtshim.containers.record_exit import ExitRecorder
from virtshim.disks.ports import DiskPlaces, RootDisks
from virtshim.guest.operation import Outcome
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import (
    Aborted,
    InvalidRequest,
    NotFound,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
    WrongState,
)
from virtshim.model.hardware import places_from_bytes
from virtshim.model.ids import ContainerId, ImageDigest
from virtshim.model.layout import Layout, directories_of
from virtshim.model.network import taps_of
from virtshim.model.sandbox import PodKey, Sandbox, owner_of, vm_disk_name
from virtshim.model.sizing import NodeHardware, may_want_queues, nic_queues
from virtshim.model.vm import Power
from virtshim.moves.disk_passes import DiskReceiver, closed_after, wide_pipe
from virtshim.moves.fitting import (
    Nic,
    Place,
    macs_in,
    offer_in,
    other_image,
    paths_in,
    refusals,
    refuse_other_macs,
    unfit,
)
from virtshim.moves.ports import SavedVms
from virtshim.moves.restoring import RestoreVm, continuing
from virtshim.moves.sending import ANSWER, IDLE, LONGEST_PASS, STATE, SYNC
from virtshim.moves.values import Arrival, SavedState, VmRecord
from virtshim.peers.ports import PeerLink, Peers
from virtshim.system.locks import LeaveOff
from virtshim.system.threads import ContainerThreads
from virtshim.vm.ports import MemoryStreams
from virtshim.vm.streams import wait_for_stream

log = structlog.get_logger(__name__)

# Seconds to reach another node, and until this node asks again.
_CONNECT: Final = 5.0
_AGAIN: Final = 2.0
# Seconds until it asks again for a place for a connection.
_NO_PLACE: Final = 0.2
# Seconds for a guest's memory and the rest of its disk. The other node has the same limit, unless it was taken over.
LONGEST_MEMORY: Final = LONGEST_PASS + SYNC
# No guest has more memory.
MOST_MEMORY: Final = 1 << 44
_FAILED_CODE: Final = 1
_NEVER_RAN: Final = "its container was stopped before the guest could run here"
# An attacker may control the other node. Limits: more passes over a disk than any move needs, and the longest state.
_MOST_PASSES: Final = 32
_LONGEST_STATE: Final = 64 << 10


@dataclass(slots=True)
class _Opened:
    """A link to the other node, and what that node said of the VM. `closing`: closes `link`. `links`: `link` and the memory's."""

    link: PeerLink
    move: str
    images: str
    has_disk: bool
    closing: contextlib.ExitStack
    links: list[PeerLink]


@dataclass(slots=True)
class ReceiveVm:
    peers: Peers
    vms: SavedVms
    streams: MemoryStreams
    places: DiskPlaces
    disks: RootDisks
    exits: ExitRecorder
    restoring: RestoreVm
    layout: Layout
    hardware: NodeHardware
    _opened: dict[ContainerId, _Opened] = field(default_factory=dict)
    _threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("arrival"))

    def close(self) -> None:
        """Breaks off the moves that are under way. The next process of virtshim ends them."""
        self._threads.closing.set()
        for container in list(self._opened):
            self.break_off(container)
        self._threads.close()
        for opened in list(self._opened.values()):  # of starts that were broken off before their thread began
            opened.closing.close()

    def break_off(self, container: ContainerId) -> None:
        """Ends all waits for the other node. The guest continues on the other node, unless all of it has arrived here."""
        if (opened := self._opened.get(container)) is not None:
            for link in opened.links:
                link.close()

    def awaits(self, container: Container) -> bool:
        """Whether the container's guest has not arrived yet."""
        vm = self.vms.get(container.spec.pod_disk) if container.spec.vm else None
        return container.status.arriving and vm is not None and vm.arrival is not None

    def is_undecided(self, container: Container) -> bool:
        """Whether all of the container's guest has arrived, and only the other node knows where it may run."""
        return self.awaits(container) and self._undecided(container) is not None

    def _undecided(self, container: Container) -> VmRecord | None:
        vm = self.vms.get(container.spec.pod_disk)
        return vm if vm is not None and vm.arrival is not None and vm.arrival.state is not None else None

    def learn(self, container: Container, seconds: float, hurry: LeaveOff) -> bool:
        """Asks the other node of an undecided guest, at most for `seconds`, until `hurry` is set. Returns whether it is decided:
        the guest runs here, or the container has ended."""
        clock = self.restoring.clock
        until = clock.monotonic() + seconds
        while (vm := self._undecided(container)) is not None and vm.arrival is not None:
            if hurry.is_set() or clock.monotonic() >= until:
                return False
            try:
                with hurry.within(until - clock.monotonic()) as over:
                    self._decide(container, vm, vm.arrival, over)
                return True
            except ShimError as exc:
                log.info("vm.arrival.undecided", container=container.id.short, error=str(exc))
            clock.wait(hurry, min(_AGAIN, until - clock.monotonic()))
        return True

    # --- before the VM is asked for

    def macs(self, pod: PodKey, vm: str, node: str) -> Mapping[str, str]:
        """The MACs of the VM's NICs, by the interface in the pod."""
        known = [one for one in self.vms.all() if (one.namespace, one.name) == (pod.namespace, vm)]
        if any(one.is_here for one in known):
            return {}
        return macs_in(self._ask(node, {"do": "describe", "namespace": pod.namespace, "vm": vm}))

    def expect(self, pod: PodKey, vm: str, container: str, node: str, image: ImageDigest, leave_off: LeaveOff) -> None:
        """Makes a record of a VM that will come from `node`, unless it is here. The caller holds the VM's lock. `leave_off`: set
        when the caller gives up. Raises WrongState if the VM's disk is not based on `image`."""
        disk = vm_disk_name(pod.namespace, vm, container)
        known = self._settled(self.vms.get(disk), leave_off)
        if known is not None and known.is_here:
            return
        asked = {"namespace": pod.namespace, "vm": vm, "container": container}
        answer = self._ask(node, {"do": "describe", **asked}, leave_off)
        if what := other_image(node, str(answer.get("image")), image.value):
            raise unfit(f"{pod.namespace}/{vm}/{container}", node, [what])
        self.disks.delete_pod_disks(owner_of(disk))  # a part of a disk that did not arrive
        self.vms.put(
            VmRecord(
                disk=disk,
                namespace=pod.namespace,
                name=vm,
                container=container,
                image=image,
                created_at=self.restoring.clock.now_ns(),
                macs=macs_in(answer),
                arrival=Arrival(node),
                # Until the VM has arrived: the node that it moved to may still ask, and no other pod may boot it.
                departure=known.departure if known is not None else None,
            )
        )
        try:
            places = base64.b64decode(str(answer.get("places", "")), validate=True)
        except (binascii.Error, ValueError) as exc:
            raise InvalidRequest(f"node {node}: sent no proper addresses of devices") from exc
        self.places.keep(disk, places_from_bytes(places))

    def not_expected(self, disk: str, leave_off: LeaveOff) -> None:
        """For a pod that does not want the VM from another node. Raises WrongState if the VM is there."""
        known = self._settled(self.vms.get(disk), leave_off)
        if known is None or known.is_here:
            return
        if known.departure is not None:
            raise WrongState(
                f"virtual machine {known.readable} has moved to node {known.departure.node}; to bring it back, give the pod the "
                f"annotation virtshim.io/restore-from: {known.departure.node}; to start it anew, run `virtshim vms rm "
                f"{known.namespace}/{known.name}` on this node"
            )
        self.disks.delete_pod_disks(owner_of(disk))  # a part of a disk that did not arrive
        self.vms.forget(disk)

    def _settled(self, known: VmRecord | None, leave_off: LeaveOff) -> VmRecord | None:
        """Learns whether a VM is here that arrived whole. Raises ShimError while nobody knows."""
        if known is None or known.arrival is None or known.arrival.state is None:
            return known
        if self._counts(known, known.arrival, leave_off):
            now = known.arrived(None, lost=_NEVER_RAN)
        else:
            now = dataclasses.replace(known, arrival=Arrival(known.arrival.node))
        self.vms.put(now)
        return now

    # --- the start

    def start(self, container: Container, sandbox: Sandbox, leave_off: LeaveOff) -> Container:
        """Starts the container's VM. If the VM is on another node, QEMU waits for the guest. Returns the container as RUNNING.
        The caller records it, then calls `go_on`. `leave_off`: set when a call waits to end the VM. Raises Aborted then, unless
        QEMU starts already."""
        vm = self.vms.get(container.spec.pod_disk) if container.spec.vm else None
        if vm is None or vm.arrival is None:
            return self.restoring.start(container, leave_off)
        with contextlib.ExitStack() as closing:
            move = secrets.token_hex(16)
            link = closing.enter_context(self.peers.connect(vm.arrival.node, _CONNECT, leave_off))
            link.send({"do": "move", "move": move, **_named(vm)}, ANSWER)
            told = link.receive(2 * ANSWER)
            self._refuse_unfit(link, container, sandbox, told)
            refuse_other_macs(vm, sandbox, told)
            theirs, images, directories = told.get("definition"), told.get("images"), paths_in(told.get("directories"))
            if not isinstance(theirs, str) or not isinstance(images, str) or not directories:
                raise InvalidRequest(f"node {link.peer}: sent no proper definition of the virtual machine")
            moved = dict(zip(directories, directories_of(self.layout, container.id, vm.disk), strict=False))
            has_disk = told.get("has_disk") is True
            if has_disk == (container.granted.root_volume is not None):
                raise WrongState(
                    f"the root disk of virtual machine {vm.readable} is a volume on one of the two nodes alone; give both pods "
                    "the same volumes"
                )
            if leave_off.is_set():  # nobody notices a link that is closed before QEMU has started
                raise Aborted("a call waits to end the virtual machine")
            self.vms.put(dataclasses.replace(vm, arrival=Arrival(vm.arrival.node, move)))
            self.restoring.hypervisor.await_memory(container.domain_uuid, container.id, theirs, moved)
            self._opened[container.id] = _Opened(link, move, images, has_disk, closing.pop_all(), [link])
        return container.running(self.restoring.clock.now_ns()).awaited()

    def _refuse_unfit(self, link: PeerLink, container: Container, sandbox: Sandbox, told: Mapping[str, Any]) -> None:
        """Before anything is started here, or copied there."""
        offer = offer_in(told.get("offer"))
        options, size = parse_vm_options(sandbox.vm_annotations), container.status.size
        queues = nic_queues(options, size) if may_want_queues(options, sandbox.config.resources) else 1
        place = Place(
            image=container.image.value,
            qemu=self.streams.here(offer.needs),
            free_disk=self.vms.free_bytes(),
            free_memory=self.hardware.available_memory(),
            nics={nic.name: Nic(nic.mtu, queues) for nic in taps_of(sandbox.network)},
        )
        if found := refusals(link.peer, offer, place):
            error = unfit(f"{sandbox.key.namespace}/{container.spec.vm}/{container.name.name}", link.peer, found)
            link.refuse(error)  # for the log there
            raise error

    def leave(self, container: ContainerId) -> None:
        """Call this after a failed start. The guest runs on where it is."""
        if (opened := self._opened.pop(container, None)) is not None:
            opened.closing.close()

    def go_on(self, container: Container) -> Container:
        """Lets a restored guest run, or follows one that arrives. Returns the container as recorded."""
        if (opened := self._opened.get(container.id)) is None:
            return self.restoring.go_on(container)
        try:
            self._threads.start(container.id, lambda: self._arrive(container, opened))
        except RuntimeError:  # no thread; the caller ends the VM
            self.leave(container.id)
            raise
        return container

    def follows(self, container: Container) -> bool:
        """Whether a thread of this process follows the container's arrival."""
        return container.id in self._opened or self._threads.thread(container.id) is not None

    def finish_leftover(self, container: Container) -> None:
        """For a VM whose arrival another process followed, or this one cannot finish."""
        if self.follows(container):
            return  # looked at first: what the record says afterwards is the last word of that thread
        vm = self.vms.get(container.spec.pod_disk)
        if vm is None or vm.arrival is None:
            with self.restoring.locks.held(container.sandbox_id):
                now = self.restoring.records.containers.get(container.id)
                if now is not None and now.is_running:
                    self._go_on(now)
        elif vm.arrival.state is None:
            self._fail(container, vm.arrival.move, "virtshim was restarted while it arrived")
        else:
            self._decide(container, vm, vm.arrival)

    def take(self, namespace: str, name: str, container: str) -> Outcome:
        """For an operator who knows that the other node is gone. Refused if that node answers that it has the guest."""
        disk = vm_disk_name(namespace, name, container)
        vm = self.vms.get(disk)
        if vm is None or vm.arrival is None:
            raise WrongState(f"virtual machine {namespace}/{name}/{container} waits for no other node")
        if vm.arrival.state is None:
            raise WrongState(
                f"not all of virtual machine {vm.readable} is on this node: it runs on node {vm.arrival.node}, or is lost with it"
            )
        with contextlib.suppress(Unavailable, PermissionRefused, NotFound):
            if not self._counts(vm, vm.arrival):
                raise WrongState(f"node {vm.arrival.node} answers, and runs virtual machine {vm.readable}")
        for one in self.restoring.records.containers.all():
            if one.spec.pod_disk == disk and one.is_running:
                self._take(one)
                return Outcome(changed=True, message="the guest runs here")
        with self.restoring.locks.held_for_all(owner_of(disk)):
            self.vms.put(vm.arrived(None, lost=_NEVER_RAN))
        return Outcome(changed=True, message="its next pod here boots from the disk that has arrived")

    # --- below: the thread of one arrival

    def _arrive(self, container: Container, opened: _Opened) -> None:
        try:
            with opened.closing:
                self._receive(container, opened)
        except ShimError as exc:
            log.warning("vm.not_arrived", container=container.id.short, error=str(exc))
            self._after_error(container, opened.move, str(exc))
        except Exception as exc:  # the edge of the thread: nobody else would end the container
            log.exception("vm.arrival.crashed", container=container.id.short)
            self._after_error(container, opened.move, f"{type(exc).__name__}; virtshim's log has the details")
        finally:
            self._opened.pop(container.id, None)

    def _receive(self, container: Container, opened: _Opened) -> None:
        link, disk = opened.link, self.layout.pod_disk(container.spec.pod_disk)
        link.send({"ready": True}, ANSWER)
        with contextlib.ExitStack() as parts:
            root = None
            if opened.has_disk:
                root = parts.enter_context(contextlib.closing(DiskReceiver(disk, self.vms.free_bytes)))
            told = self._passes(link, root)
            if told.get("memory") is not True:
                raise InvalidRequest(f"node {link.peer}: sent neither a disk nor memory")
            with self._memory(container, opened) as memory:
                told = self._passes(link, root)
                state = self._state(container, link, told)
                if root is not None:  # no pass comes any more, and QEMU still reads the memory
                    self.restoring.hypervisor.accept_disks(
                        container.domain_uuid, container.id, opened.images, self.layout.images
                    )
                memory()
            self._until_read(container)
        self._has_all(container, opened.move, state)
        link.send({"arrived": True}, ANSWER)
        answer = link.receive(SYNC)
        if answer.get("outcome") != "yes":
            raise InvalidRequest(f"node {link.peer}: sent no proper outcome of the move")
        self._take(container)

    def _has_all(self, container: Container, move: str, state: SavedState) -> None:
        """Writes that all of the VM is here. Raises Aborted if it could not run here: it then runs on where it is."""
        restoring = self.restoring
        with (
            restoring.locks.held(container.sandbox_id),
            restoring.locks.held_for_all(owner_of(container.spec.pod_disk)),
        ):
            now, vm = restoring.records.containers.get(container.id), self._record(container)
            if vm.arrival is None or vm.arrival.move != move:
                raise WrongState("another attempt has begun to move the virtual machine here")
            if now is None or not now.is_running or now.status.ending is not None:
                raise Aborted("its container was stopped")
            if restoring.hypervisor.power(container.domain_uuid).power is not Power.PAUSED:
                raise Aborted("its QEMU has ended")
            self.vms.put(dataclasses.replace(vm, arrival=dataclasses.replace(vm.arrival, state=state)))

    def _passes(self, link: PeerLink, root: DiskReceiver | None) -> dict[str, Any]:
        """Receives passes of the disk. Returns the first message that announces none."""
        for _ in range(_MOST_PASSES):
            if "blocks" not in (told := link.receive(LONGEST_PASS)):
                return told
            if root is None:
                raise InvalidRequest(f"node {link.peer}: sent a disk that is on a volume")
            root.receive(link, told, IDLE)
            # The whole disk is durable before this node says that all has arrived; and little is left for the standstill.
            root.sync()
        raise InvalidRequest(f"node {link.peer}: sent the disk more than {_MOST_PASSES} times")

    @contextlib.contextmanager
    def _memory(self, container: Container, opened: _Opened) -> Iterator[Callable[[], None]]:
        """Pumps the guest's memory into QEMU, on a link of its own. Yields what waits for its end."""
        errors: list[Exception] = []

        def pump() -> None:
            try:
                with self._into_qemu(container) as pipe:
                    link.receive_file(pipe, MOST_MEMORY, LONGEST_PASS)
            except Exception as exc:  # noqa: BLE001  passed on
                errors.append(exc)
                link.close()  # so that the other node learns of it now

        def finished() -> None:
            thread.join()
            if errors:
                raise errors[0]

        with self._second_link(opened.link.peer) as link, closed_after(LONGEST_MEMORY, opened.link, link):
            opened.links.append(link)
            link.send({"do": "memory", "move": opened.move}, ANSWER)
            thread = threading.Thread(target=pump, name="memory", daemon=True)
            thread.start()
            try:
                yield finished
            except ShimError as exc:
                if errors:  # the other node only says that this node has closed the link
                    raise errors[0] from exc
                raise
            finally:
                if sys.exc_info()[0] is not None:  # the other node may never end the stream
                    link.close()
                thread.join()
                opened.links.remove(link)

    @contextlib.contextmanager
    def _second_link(self, node: str) -> Iterator[PeerLink]:
        """Connects for the memory. Tries again while the other node has no place for the connection, so that a moment's questions
        of other pods do not waste the copied disk."""
        clock = self.restoring.clock
        until = clock.monotonic() + _CONNECT
        with contextlib.ExitStack() as stack:
            link = None
            while link is None:
                try:
                    link = stack.enter_context(self.peers.connect(node, _CONNECT))
                except ResourceExhausted:
                    if clock.monotonic() >= until or clock.wait(self._threads.closing, _NO_PLACE):
                        raise
            yield link

    @contextlib.contextmanager
    def _into_qemu(self, container: Container) -> Iterator[int]:
        read, write = wide_pipe()
        try:
            try:
                self.streams.receive(container.domain_uuid, container.id, read)
            finally:
                os.close(read)
            yield write
        finally:
            os.close(write)

    def _until_read(self, container: Container) -> None:
        wait_for_stream(
            lambda: self.streams.state(container.domain_uuid, container.id),
            self.restoring.clock,
            SYNC,
            "QEMU did not read the guest's memory",
            check=self._refuse_if_closing,
        )

    def _refuse_if_closing(self) -> None:
        if self._threads.closing.is_set():
            raise Unavailable("virtshim is stopping")

    # --- the outcome

    def _after_error(self, container: Container, move: str, why: str) -> None:
        """Ends the container, unless its guest may have to run here: then asks until the other node says so."""
        while not self._threads.closing.is_set():
            try:
                vm = self.vms.get(container.spec.pod_disk)
                if vm is None or vm.arrival is None:
                    return
                if vm.arrival.move != move or vm.arrival.state is None:
                    self._fail(container, move, why)
                else:
                    self._decide(container, vm, vm.arrival)
                return
            except ShimError as exc:
                log.warning("vm.arrival.undecided", container=container.id.short, error=str(exc))
            now = self.restoring.records.containers.get(container.id)
            if now is None or not now.is_running:  # the VM's next container asks
                return
            self.restoring.clock.wait(self._threads.closing, _AGAIN)

    def _decide(self, container: Container, vm: VmRecord, arrival: Arrival, leave_off: LeaveOff | None = None) -> None:
        if self._counts(vm, arrival, leave_off):
            self._take(container)
        else:
            self._fail(container, arrival.move, f"node {arrival.node} has broken the move off")

    def _counts(self, vm: VmRecord, arrival: Arrival, leave_off: LeaveOff | None = None) -> bool:
        """Whether the guest may run here. Raises Unavailable while nobody knows."""
        asked = {"do": "outcome", "move": arrival.move, **_named(vm)}
        outcome = self._ask(arrival.node, asked, leave_off).get("outcome")
        if outcome not in ("yes", "no"):
            raise Unavailable(
                f"node {arrival.node} has not decided yet whether virtual machine {vm.readable} has moved"
            )
        return bool(outcome == "yes")

    def _take(self, container: Container) -> None:
        """Lets the guest run here, because it belongs to this node now."""
        restoring = self.restoring
        with restoring.locks.held(container.sandbox_id):
            now = restoring.records.containers.get(container.id)
            runs = now is not None and now.is_running
            with restoring.locks.held_for_all(owner_of(container.spec.pod_disk)):
                vm = self._record(container)
                if vm.arrival is None or (state := vm.arrival.state) is None:
                    return
                if now is not None and runs:
                    # At once: the other node's record, and this one's, say already that the guest is this node's.
                    restoring.resume(now, vm, state)
                lost = "" if runs else _NEVER_RAN
                saved = dataclasses.replace(state, taken_by=container.id) if runs else None
                self.vms.put(vm.arrived(saved, lost=lost))
            if now is not None and runs:
                self._go_on(now, resumed=True)
        self.exits.record_if_ended(container.id)

    def _go_on(self, container: Container, *, resumed: bool = False) -> None:
        """Lets a guest of this node run. Repeatable. The caller holds the pod's lock."""
        restoring = self.restoring
        vm = self.vms.get(container.spec.pod_disk)
        state = vm.saved if vm is not None else None
        if state is not None and state.taken_by == container.id and container.status.known_as is None:
            if container.spec.command:  # its output continues where it was read to
                restoring.logs.entrypoints.write(container.id, (), state.read_to)
            container = continuing(container, state)
            restoring.records.containers.replace(container)
            restoring.keep_copy(container)
        if resumed:
            restoring.arrived(container)
        else:
            restoring.go_on(container)

    def _fail(self, container: Container, move: str, why: str) -> None:
        """Ends a container whose guest does not run here, and removes the parts of the VM that have arrived."""
        message = f"the virtual machine did not arrive from its other node: {why}"
        with self.restoring.locks.held(container.sandbox_id):
            if self._record(container).arrival is None:  # it has arrived after all
                return
            how = Exit(_FAILED_CODE, ExitReason.ERROR, self.restoring.clock.now_ns(), message)
            self.exits.begin_end(container.id, how)
            self.restoring.hypervisor.destroy(container.domain_uuid, container.id)
            self.exits.record_if_ended(container.id)
            with self.restoring.locks.held_for_all(owner_of(container.spec.pod_disk)):
                vm = self._record(container)
                if vm.arrival is None or vm.arrival.move != move:  # a later attempt's
                    return
                self.disks.delete_pod_disks(owner_of(vm.disk))
                self.vms.put(dataclasses.replace(vm, arrival=Arrival(vm.arrival.node)))

    def _state(self, container: Container, link: PeerLink, told: Mapping[str, Any]) -> SavedState:
        """What the other node knows of its guest, and nothing else: the record decides what this node does."""
        text = str(told.get("state", ""))
        try:
            theirs = STATE.validate_json(text if len(text) <= _LONGEST_STATE else "")[0]
        except (ValidationError, InvalidRequest, ValueError) as exc:
            raise InvalidRequest(f"node {link.peer}: sent no proper state of the guest") from exc
        return SavedState(
            container=container.id,
            sandbox=container.sandbox_id,
            saved_at=self.restoring.clock.now_ns(),
            bytes=0,
            known_as=theirs.known_as,
            command_begun=theirs.command_begun,
            read_to=theirs.read_to,
            user=theirs.user,
            addresses=theirs.addresses,
        )

    def _record(self, container: Container) -> VmRecord:
        vm = self.vms.get(container.spec.pod_disk)
        if vm is None:
            raise NotFound(f"the record of virtual machine {container.spec.vm} is gone")
        return vm

    def _ask(self, node: str, question: Mapping[str, object], leave_off: LeaveOff | None = None) -> dict[str, Any]:
        with self.peers.connect(node, _CONNECT, leave_off) as link:
            link.send(question, ANSWER)
            return link.receive(ANSWER)


def _named(vm: VmRecord) -> dict[str, str]:
    return {"namespace": vm.namespace, "vm": vm.name, "container": vm.container}
