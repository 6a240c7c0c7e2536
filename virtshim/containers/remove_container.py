"""RemoveContainer: makes sure that VM, disk, seed and record are gone. The log file is kubelet's and stays."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.containers.logs import ContainerLogs
from virtshim.containers.record_exit import how_it_ended
from virtshim.devices.services import DeviceServices
from virtshim.disks.ports import RootDisks
from virtshim.guest.ports import GuestAgents
from virtshim.images.service import ImageService
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import ShimError
from virtshim.pods.ports import VmCgroups
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor
from virtshim.volumes.image_volumes import collect_images_of
from virtshim.volumes.pod_volumes import PodVolumes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RemoveContainer:
    """`timeout`: seconds for a call to tapmanager."""

    records: Records
    hypervisor: Hypervisor
    logs: ContainerLogs
    disks: RootDisks
    images: ImageService
    clock: Clock
    locks: PodLocks
    guests: GuestAgents
    cgroups: VmCgroups
    devices: DeviceServices
    timeout: float
    volumes: PodVolumes

    def remove(self, wanted: Container) -> None:
        """Force, idempotent, and repeatable after a crash at any step: the record goes last, and with it the claims. Must not be
        called with the pod's lock held: its devices are released without."""
        with self.locks.held(wanted.sandbox_id):
            container = self.records.containers.get(wanted.id)
            if container is None:
                return
            self._remove_all_but_the_record(container)
        self.devices.releases.finish(container.id)
        with self.locks.held(wanted.sandbox_id):
            if self.records.containers.get(wanted.id) is None:
                return
            self.records.containers.delete(container.id)
        self.devices.borrowed.give_back_of(container)
        collect_images_of(container, self.images)
        log.info("container.removed", container=container.id.short)

    def _remove_all_but_the_record(self, container: Container) -> None:
        domain = container.domain_uuid
        removing = container.removing()
        self.records.containers.replace(removing)
        self.devices.unplug.before_removal(container)
        self.hypervisor.destroy(domain, container.id)
        self.volumes.end(container)
        self.guests.forget(container.id)
        try:
            self.logs.finish(container)
        except ShimError as exc:  # a full disk, say: removal is what makes room
            log.warning("console.unfinished", container=container.id.short, error=str(exc))
        if container.is_running:  # whoever follows events learns that it ended
            how = Exit(137, ExitReason.ERROR, self.clock.now_ns(), "killed: it was removed while running")
            self.records.containers.replace(container.removing(how_it_ended(container, how)))
        self.hypervisor.undefine(domain, container.id)
        self.cgroups.remove(container.id, container.spec.cgroup_parent, self.timeout)
        self.disks.delete(container.id)
