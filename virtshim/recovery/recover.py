"""Start-up: reconciles the records with what exists. No caller is served before this has finished."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.devices.releases import DeviceReleases
from virtshim.devices.resets import DeviceResets
from virtshim.disks.ports import RootDisks
from virtshim.images.service import ImageService
from virtshim.metrics import observed
from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Unavailable
from virtshim.pods.ports import PodNetworks
from virtshim.recovery.plan import NodeState, Plan, plan
from virtshim.recovery.rebuild import Rebuild
from virtshim.recovery.repairs import RepairRunner, Repairs
from virtshim.store.ports import StateRecords, VmInventory
from virtshim.volumes.ports import VmShares

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Survey:
    """Reads what there is. `timeout`: seconds for a call to tapmanager."""

    records: StateRecords
    inventory: VmInventory
    networks: PodNetworks
    disks: RootDisks
    timeout: float
    shares: VmShares

    def take(self, rebuild: Rebuild | None = None, *, lost: bool = False, rebooted: bool = False) -> NodeState:
        """The world first, then the records: a record is written before anything is made, so what was seen in the world and
        has no record now is really without one. Raises what reading raises."""
        there = self.inventory.take()
        networks = self.networks.attached(self.timeout)
        directories = self.disks.existing()
        pods_with_disks = self.disks.pods_with_disks()
        shares = self._shares()
        if rebuild is not None:
            rebuild.run(there.owned, lost=lost)
        containers = self.records.containers.all()
        sandboxes = self.records.sandboxes.all()
        for container, node in (there.other_nodes or {}).items():
            if container in directories:
                log.warning("domain.of_another_node", container=container.short, node=node, why="its disk is here")
        return NodeState(
            sandboxes=sandboxes,
            containers=containers,
            domains=there.owned,
            networks=networks - there.other_sandboxes,
            directories=directories - (there.other_nodes or {}).keys(),
            pods_with_disks=pods_with_disks,
            rebooted=rebooted,
            shares=shares,
            in_doubt=bool(there.unreadable or self.records.unreadable()),
        )

    def _shares(self) -> frozenset[str]:
        """None where the share program does not answer: a node without volumes does without it, and the next look comes."""
        try:
            return frozenset(self.shares.served(self.timeout))
        except Unavailable as exc:
            log.info("shares.unknown", why=str(exc))
            return frozenset()


@dataclass(frozen=True, slots=True)
class Recover:
    survey: Survey
    rebuild: Rebuild
    repairs: Repairs
    repair_runner: RepairRunner
    images: ImageService
    resets: DeviceResets
    releases: DeviceReleases

    def run(self, *, rebooted: bool, lost: bool = False) -> None:
        """`lost`: there is no record of an earlier life, or an earlier recovery of such a database was not finished. Raises
        what reading raises (then nothing was changed). A failed or stuck repair of one item is logged and the others go on:
        the item's record stays, so nothing is forgotten."""
        self.survey.inventory.take_records_out(self.rebuild.copies.keep)
        found = self.survey.take(self.rebuild, lost=lost, rebooted=rebooted)
        todo = plan(found)
        if lost:
            self.images.adopt()
            _log_unknown_pods(todo)
            todo = (
                todo.without_deletions()
            )  # kubelet has had no time to ask for what it misses: the reconciler looks again
        left = self.repair_runner.begin_round()
        for repair in self.repairs.steps(todo, rebooted=rebooted):
            if repair.is_of_leftover:
                observed.meter().tell(observed.Leftover(repair.what))
            left = self.repair_runner.make(repair, left)
        if not (lost or found.in_doubt):  # a VM that could not be read may have them
            for repair in self.repairs.idle_devices():
                left = self.repair_runner.make(repair, left)
        if not found.in_doubt:
            self._drop_spent_disks()
        if rebooted:
            self.resets.forget()
        self.releases.begin_all()  # not waited for: the claims keep the devices
        self.images.collect_all()
        log.info(
            "recovered",
            sandboxes=len(found.sandboxes),
            containers=len(found.containers),
            running=len(todo.follow),
            unreadable=list(self.survey.records.unreadable()),
            unfinished=list(self.repair_runner.unfinished()),
        )

    def _drop_spent_disks(self) -> None:
        """Of containers that ended just before we did."""
        for container in self.survey.records.containers.all():
            if container.phase is ContainerPhase.EXITED and not container.may_be_running:
                self.repairs.exits.drop_disk(container)


def _log_unknown_pods(todo: Plan) -> None:
    """What is here of pods that have no VM."""
    networks = [sandbox.short for sandbox in todo.stray_networks]
    directories = [container.short for container in todo.stray_directories]
    if networks or directories or todo.stray_pod_disks:
        log.warning(
            "rebuild.unknown",
            sandboxes=networks,
            containers=directories,
            pods_with_disks=list(todo.stray_pod_disks),
            why="no VM's definition names their pods; what kubelet does not ask for again is removed later",
        )
