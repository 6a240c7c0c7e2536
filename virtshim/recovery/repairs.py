"""The repair for each kind of difference between records and reality. Start-up runs all of them, and the reconciler
repeats those that failed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from virtshim.containers.checkpoint_container import CheckpointContainer
from virtshim.containers.parts import ContainerParts
from virtshim.containers.record_exit import ExitRecorder, how_it_ended
from virtshim.containers.remove_container import RemoveContainer
from virtshim.containers.update_resources import UpdateContainerResources
from virtshim.devices.values import BorrowedDevice
from virtshim.guest.entrypoint_runner import GuestFollowers
from virtshim.model.container import Container, ContainerPhase, Exit, ExitReason
from virtshim.model.errors import DeadlineExceeded, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import Sandbox, pod_hash
from virtshim.model.vm import OwnedDomain
from virtshim.moves.renewing import VmStates
from virtshim.recovery.plan import Plan
from virtshim.store.ports import KnownNetworks, StateRecords
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.templates.warm_start import WarmStarts
from virtshim.volumes.ports import VmShares

log = structlog.get_logger(__name__)

FOLLOW: Final = "running container"
# Prefixes of the names of repairs that remove something.
_LEFTOVERS: Final = ("stray", "unwanted", "half-made", "borrowed")


@dataclass(frozen=True, slots=True)
class Repair:
    """`about`: the ids that it changes; two repairs that share an id must not overlap. `pod`: whose lock keeps calls
    away, None if unknown (then nobody calls). `takes_lock`: the repair takes that lock itself, and its reason does not
    disappear meanwhile."""

    what: str
    item: Any
    do: Callable[[Any], object]
    about: frozenset[str]
    pod: SandboxId | None
    takes_lock: bool = False

    def guarded(self, guard: Callable[[Repair], object]) -> Repair:
        """The same repair, run through `guard`."""
        return dataclasses.replace(self, do=lambda _item: guard(self))

    @property
    def is_of_leftover(self) -> bool:
        """Whether it removes something that nobody owns."""
        return self.what.startswith(_LEFTOVERS)

    @property
    def name(self) -> str:
        match self.item:
            case Sandbox(id=found) | Container(id=found):
                return f"{self.what} {found.short}"
            case OwnedDomain(name=found):
                return f"{self.what} {found}"
            case BorrowedDevice(address=address):
                return f"{self.what} {address}"
            case _:
                return f"{self.what} {self.item}"


@dataclass(frozen=True, slots=True)
class Repairs:
    records: StateRecords
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    networks: KnownNetworks
    shares: VmShares
    guest: GuestFollowers
    exits: ExitRecorder
    remove_container: RemoveContainer
    checkpoints: CheckpointContainer
    states: VmStates
    update_container_resources: UpdateContainerResources
    warm: WarmStarts

    def steps(self, todo: Plan, *, rebooted: bool) -> Iterator[Repair]:
        """The repairs in the order in which they must run."""
        yield from self._each("stray domain", todo.stray_domains, self._drop_domain)
        yield from self._each("unwanted domain", todo.unwanted_domains, self._end_domain)
        for half in self._each("half-made container", todo.undo_containers, self.remove_container.remove):
            yield dataclasses.replace(half, takes_lock=True)
        yield from self._each("stray directory", todo.stray_directories, self.parts.disks.delete)
        yield from self._each("stray disks of a pod", todo.stray_pod_disks, self._drop_pod_disks)
        yield from self._each("stray share", todo.stray_shares, self._drop_share)
        for half in self._each("unfinished saved state", todo.states, self.states.finish_leftover):
            yield dataclasses.replace(half, takes_lock=True)  # it may wait for another node
        yield from self._each("started container", todo.adopt, self._adopt)
        yield from self._each(FOLLOW, todo.follow, self._follow)
        yield from self._each("ended container", todo.settle, self._settle_rebooted if rebooted else self._settle)
        yield from self._each("half-made sandbox", todo.undo_sandboxes, self._undo_sandbox)
        yield from self._each("sandbox without network", todo.lost_networks, self._lost_network)
        yield from self._each("stray network", todo.stray_networks, self._drop_network)
        yield from self._each("unfinished checkpoint", todo.checkpoints, self.checkpoints.finish_leftover)
        for half in self._each("unfinished resize", todo.resizes, self.update_container_resources.finish_leftover):
            yield dataclasses.replace(half, takes_lock=True)

    def idle_devices(self) -> Iterator[Repair]:
        """Devices that were borrowed for containers which are gone. Runs after all other repairs, which may free
        devices."""
        borrowed = self.parts.devices.borrowed
        for device in borrowed.idle():
            yield Repair("borrowed device", device, borrowed.give_back, frozenset({device.claim}), None)

    def still_due(self, repair: Repair) -> bool:
        """Whether the reason for the repair still holds; called with the pod's lock held."""
        containers, sandboxes = self.records.containers, self.records.sandboxes
        match repair.item:
            case Container(id=found):
                return containers.get(found) == repair.item
            case Sandbox(id=found):
                return sandboxes.get(found) == repair.item
            case OwnedDomain(container_id=found):
                there = containers.get(found)
                return there is None or (there.phase is ContainerPhase.EXITED and repair.what != "stray domain")
            case ContainerId():
                return containers.get(repair.item) is None
            case SandboxId():
                return sandboxes.get(repair.item) is None
            case _:
                return True

    def _each(self, what: str, items: tuple[Any, ...], do: Callable[[Any], object]) -> Iterator[Repair]:
        for item in items:
            yield Repair(what, item, do, _about(item), _pod_of(item))

    def _drop_domain(self, domain: OwnedDomain) -> None:
        self.parts.hypervisor.destroy(domain.uuid, domain.container_id)
        self.parts.hypervisor.undefine(domain.uuid, domain.container_id)

    def _end_domain(self, domain: OwnedDomain) -> None:
        """Handles a start that failed and could not be undone; RemoveContainer undefines the VM."""
        self.parts.hypervisor.destroy(domain.uuid, domain.container_id)

    def _adopt(self, container: Container) -> None:
        """Handles a kill between libvirt's start and the record."""
        running = None if self.warm.is_half_made(container) else self.states.restoring.taken(container)
        # The VM is paused and has not taken the saved state, which the next attempt takes; or its guest is still a mere copy
        # of a template.
        if running is None:
            self.parts.hypervisor.destroy(container.domain_uuid, container.id)
            return
        self.parts.logs.open(container)
        self.records.containers.replace(running)
        self.guest.follow(self.states.restoring.go_on(running))

    def _follow(self, container: Container) -> None:
        now = self.records.containers.get(container.id)
        if now is None or not now.is_running:  # an earlier repair has ended it
            return
        self.parts.logs.open(container)
        self.guest.follow(container)

    def _settle(self, container: Container) -> None:
        self.exits.record_if_ended(container.id)

    def _settle_rebooted(self, container: Container) -> None:
        self.exits.finish_log(container)
        how = Exit(255, ExitReason.UNKNOWN, self.clock.now_ns(), "the node was restarted")
        # The restart of the node has reset its devices.
        self.records.containers.replace(container.exited(how_it_ended(container, how)).with_claims(()))

    def _undo_sandbox(self, sandbox: Sandbox) -> None:
        self.networks.release(sandbox.id, self.parts.timeout)
        self.records.sandboxes.delete(sandbox.id)

    def _lost_network(self, sandbox: Sandbox) -> None:
        """kubelet replaces a sandbox that is not ready. Its StopPodSandbox releases what CNI still holds."""
        self.records.sandboxes.replace(sandbox.not_ready("its network is gone (the node or tapmanager was restarted)"))

    def _drop_pod_disks(self, pod: str) -> None:
        """Checks again, because the pod's next sandbox may have been made since the look."""
        with self.locks.held_for_all(pod):
            if self.records.unreadable() or any(pod_hash(one.key) == pod for one in self.records.sandboxes.all()):
                return
            self.parts.disks.delete_pod_disks(pod)

    def _drop_share(self, name: str) -> None:
        self.shares.end(name, self.parts.timeout)

    def _drop_network(self, sandbox: SandboxId) -> None:
        self.networks.release(sandbox, self.parts.timeout)


@dataclass(slots=True)
class _Attempt:
    repair: Repair
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.repair.do(self.repair.item)
        except BaseException as exc:  # noqa: BLE001  passed on to the waiting caller
            self.error = exc
        self.over.set()


class RepairRunner:
    """Runs repairs one after another, each for at most `limit` seconds. A longer one is left behind on its thread.
    `budget`: how many seconds one round may wait for such repairs."""

    def __init__(self, limit: float, budget: float) -> None:
        self.limit = limit
        self._budget = budget
        self._lock = threading.Lock()
        self._behind: list[_Attempt] = []
        self._failed: dict[str, str] = {}

    def begin_round(self, due: Collection[str] = ()) -> float:
        """Returns the seconds that this round may wait for hanging repairs. `due`: names of all pending repairs;
        failures of others are forgotten."""
        with self._lock:
            self._behind = [one for one in self._behind if not one.over.is_set()]
            self._failed = {name: why for name, why in self._failed.items() if name in due}
        return self._budget

    def make(self, repair: Repair, left: float) -> float:
        """Runs one repair and returns what is left of the round's seconds. A failure is logged: the item's record
        stays, so nothing is forgotten."""
        if self._is_busy(repair):
            self._note(repair, "an earlier repair of it has not finished yet")
            return left
        attempt = _Attempt(repair)
        thread = threading.Thread(target=attempt.run, name="repair", daemon=True)
        thread.start()
        limit = min(self.limit, left)
        if not attempt.over.wait(limit):
            with self._lock:
                self._behind.append(attempt)
            self._note(
                repair,
                str(DeadlineExceeded(f"it did not finish within {limit:g} s; it continues and is checked again")),
            )
            return left - limit
        if isinstance(attempt.error, ShimError):
            self._note(repair, str(attempt.error))
        elif attempt.error is not None and not isinstance(attempt.error, Exception):
            raise attempt.error
        elif attempt.error is not None:
            log.error("recover.broken", item=repair.name, exc_info=attempt.error)
            self._note(repair, f"an error in virtshim itself: {attempt.error!r}")
        else:
            with self._lock:
                self._failed.pop(repair.name, None)
            log.info("recover.done", what=repair.what, item=repair.name)
        return left

    def unfinished(self) -> dict[str, str]:
        """The repairs that have not succeeded yet, with the reason."""
        with self._lock:
            over = {one.repair.name for one in self._behind if one.over.is_set() and one.error is None}
            return {name: why for name, why in self._failed.items() if name not in over}

    def _is_busy(self, repair: Repair) -> bool:
        with self._lock:
            return any(one.repair.about & repair.about for one in self._behind if not one.over.is_set())

    def _note(self, repair: Repair, why: str) -> None:
        with self._lock:
            self._failed[repair.name] = why
        log.warning("recover.failed", what=repair.what, item=repair.name, error=why)


def _about(item: object) -> frozenset[str]:
    match item:
        case Container(id=own, sandbox_id=sandbox) | OwnedDomain(container_id=own, sandbox_id=sandbox):
            return frozenset({own.value, sandbox.value})
        case Sandbox(id=found):
            return frozenset({found.value})
        case _:
            return frozenset({str(item)})


def _pod_of(item: object) -> SandboxId | None:
    match item:
        case Container(sandbox_id=sandbox) | OwnedDomain(sandbox_id=sandbox) | Sandbox(id=sandbox):
            return sandbox
        case SandboxId():
            return item
        case _:
            return None
