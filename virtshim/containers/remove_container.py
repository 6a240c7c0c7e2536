"""RemoveContainer: makes sure that VM, disk, seed and record are gone. The log file belongs to kubelet and stays."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.containers.parts import ContainerParts
from virtshim.containers.record_exit import how_it_ended
from virtshim.guest.ports import GuestAgents
from virtshim.images.service import ImageService
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import ShimError
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.volumes.image_volumes import collect_images_of

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RemoveContainer:
    records: Records
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    images: ImageService
    guests: GuestAgents

    def remove(self, wanted: Container) -> None:
        """Forced, idempotent, and repeatable after a crash at any step: the record, with its claims, is deleted last.
        The caller must not hold the pod's lock, because devices are released without it."""
        with self.locks.held(wanted.sandbox_id):
            container = self.records.containers.get(wanted.id)
            if container is None:
                return
            self._remove_all_but_the_record(container)
        self.parts.devices.releases.finish(container.id)
        with self.locks.held(wanted.sandbox_id):
            if self.records.containers.get(wanted.id) is None:
                return
            self.records.containers.delete(container.id)
        self.parts.devices.borrowed.give_back_of(container)
        collect_images_of(container, self.images)
        log.info("container.removed", container=container.id.short)

    def _remove_all_but_the_record(self, container: Container) -> None:
        domain = container.domain_uuid
        removing = container.removing()
        self.records.containers.replace(removing)
        self.parts.devices.unplug.before_removal(container)
        self.parts.hypervisor.destroy(domain, container.id)
        self.parts.volumes.end(container)
        self.guests.forget(container.id)
        try:
            self.parts.logs.finish(container)
        except ShimError as exc:  # the disk may be full, and removal makes room
            log.warning("console.unfinished", container=container.id.short, error=str(exc))
        if container.is_running:  # followers of events learn that it ended
            how = Exit(137, ExitReason.ERROR, self.clock.now_ns(), "killed: it was removed while running")
            self.records.containers.replace(container.removing(how_it_ended(container, how)))
        self.parts.hypervisor.undefine(domain, container.id)
        self.parts.cgroups.remove(container.id, container.spec.cgroup_parent, self.parts.timeout)
        self.parts.disks.delete(container.id)
