"""The VMs that outlive their pods, as an operator sees them: listed, and removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from virtshim.disks.ports import RootDisks
from virtshim.guest.operation import Outcome
from virtshim.images.service import ImageService
from virtshim.model.container import Container, ContainerPhase
from virtshim.model.errors import NotFound, WrongState
from virtshim.model.sandbox import Sandbox, owner_of, vm_disk_name, vm_uuid
from virtshim.moves.ports import SavedVms
from virtshim.moves.values import OnVolume, SavedLimits, VmRecord
from virtshim.store.ports import Records
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KnownVm:
    """`disk_bytes`: what the root disk takes. `container`, `pod`: those that use the VM now. `lapses_at`: of its saved state,
    in nanoseconds since the epoch; 0 without one."""

    record: VmRecord
    disk_bytes: int
    container: Container | None
    pod: Sandbox | None
    lapses_at: int


@dataclass(frozen=True, slots=True)
class LastingVms:
    records: Records
    vms: SavedVms
    disks: RootDisks
    hypervisor: Hypervisor
    images: ImageService
    locks: PodLocks
    limits: Live[SavedLimits]

    def all(self) -> Sequence[KnownVm]:
        """By name."""
        containers = self.records.containers.all()
        users = {one.spec.pod_disk: one for one in containers if one.phase is not ContainerPhase.EXITED}
        return [self._known(vm, users.get(vm.disk)) for vm in self.vms.all()]

    def _known(self, vm: VmRecord, user: Container | None) -> KnownVm:
        return KnownVm(
            record=vm,
            disk_bytes=self.vms.disk_bytes(vm.disk),
            container=user,
            pod=self.records.sandboxes.get(user.sandbox_id) if user is not None else None,
            lapses_at=self.limits.now.until(vm.saved.saved_at) if vm.saved is not None else 0,
        )

    def remove(self, namespace: str, name: str, container: str) -> Outcome:
        """Removes the VM with disk, firmware variables, TPM state and saved memory. Repeatable after a crash at any step: the
        record goes last. Raises WrongState while anything uses the VM."""
        disk = vm_disk_name(namespace, name, container)
        with self.locks.held_for_all(owner_of(disk)):  # no container is created on it meanwhile
            vm = self.vms.get(disk)
            if vm is None:
                raise NotFound(
                    f"no virtual machine {namespace}/{name}/{container} is kept on this node; `virtshim vms` lists those that are"
                )
            self._refuse_used(vm)
            if vm.volume != OnVolume():
                self.vms.put(vm.forgotten())
            elif vm.saved is not None:
                self.vms.put(vm.with_state(None))
            self.disks.delete_pod_disks(owner_of(disk))
            self.vms.forget(disk)
        self.images.collect(vm.image)
        log.info("vm.removed", vm=vm.readable)
        return Outcome(changed=True, message="removed, with its disk and its saved memory")

    def _refuse_used(self, vm: VmRecord) -> None:
        uuids = {vm_uuid(vm.disk)}
        for one in self.records.containers.all():
            if one.phase is ContainerPhase.UNKNOWN:
                raise WrongState(
                    f"the record of container {one.id.short} cannot be read: the container may use this virtual machine; "
                    "remove the container's pod first"
                )
            if one.spec.pod_disk != vm.disk:
                continue
            if one.phase is not ContainerPhase.EXITED:
                owner = self.records.sandboxes.get(one.sandbox_id)
                where = f"pod {owner.key.readable}" if owner is not None else f"sandbox {one.sandbox_id.short}"
                raise WrongState(
                    f"virtual machine {vm.readable} is used by {where} (container {one.id.short} is {one.phase.value}); delete "
                    "that pod first"
                )
            uuids.add(one.domain_uuid)
        # A failed start may have left a VM on.
        if any(self.hypervisor.power(uuid).is_on for uuid in uuids):
            raise WrongState(f"virtual machine {vm.readable} still runs in libvirt; delete its pod first")
