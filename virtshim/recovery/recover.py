"""Start-up: makes records and reality agree. No caller is served before this has finished."""

from __future__ import annotations

import dataclasses
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
    """Reads what exists. `timeout`: seconds for a call to tapmanager."""

    records: StateRecords
    inventory: VmInventory
    networks: PodNetworks
    disks: RootDisks
    timeout: float
    shares: VmShares

    def take(self, rebuild: Rebuild | None = None, *, lost: bool = False, rebooted: bool = False) -> NodeState:
        """Reads the world first and the records second. A record is written before anything is made, so what exists and
        has no record afterwards really has none. Raises the errors of reading."""
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
        """Short ids of the containers whose volumes are served. Empty if the share program does not answer, because a
        node without volumes does not need it, and the next look asks again."""
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
        """`lost`: there is no record of an earlier life, or an earlier recovery of such a database was not finished. If
        reading fails, this raises that error and has changed nothing. A repair that fails or hangs is logged, and the
        others continue: the item's record stays, so nothing is forgotten."""
        self.survey.inventory.take_records_out(self.rebuild.copies.keep)
        found = self.survey.take(self.rebuild, lost=lost, rebooted=rebooted)
        self.repairs.states.reconcile(rebooted=rebooted)
        found = dataclasses.replace(found, containers=self.survey.records.containers.all())
        todo = plan(found)
        if lost:
            self.images.adopt()
            _log_unknown_pods(todo)
            # kubelet has had no time to ask for missing pods, so the reconciler decides later.
            todo = todo.without_deletions()
        left = self.repair_runner.begin_round()
        for repair in self.repairs.steps(todo, rebooted=rebooted):
            if repair.is_of_leftover:
                observed.meter().tell(observed.Leftover(repair.what))
            left = self.repair_runner.make(repair, left)
        if not (lost or found.in_doubt):  # otherwise an unreadable VM may have the devices
            for repair in self.repairs.idle_devices():
                left = self.repair_runner.make(repair, left)
        if not found.in_doubt:
            self._drop_spent_disks()
        if rebooted:
            self.resets.forget()
        self.releases.begin_all()  # runs in the background, because the claims keep the devices
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
        """Finishes the end of containers that ended just before virtshim did."""
        for container in self.survey.records.containers.all():
            if container.phase is ContainerPhase.EXITED and not container.may_be_running:
                self.repairs.exits.drop_disk(container)


def _log_unknown_pods(todo: Plan) -> None:
    """Logs what exists of pods that have no VM."""
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
