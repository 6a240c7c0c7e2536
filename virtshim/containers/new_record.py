"""The record of a new container. It is written before any part of the container exists, and deleted when none is
left."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.annotations.options import VmOptions
from virtshim.annotations.parse import VM_ANNOTATION
from virtshim.containers.admission import Admitted
from virtshim.containers.creation_steps import Draft
from virtshim.devices.claims import BorrowedDevices, DeviceClaims
from virtshim.disks.ports import RootDisks
from virtshim.images.service import ImageService
from virtshim.model.container import Container, ContainerConfig, ContainerPhase, ContainerSpec, ContainerStatus
from virtshim.model.errors import Aborted, AlreadyExists, ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId, ImageDigest
from virtshim.model.image import Image, ImageConfig
from virtshim.model.sandbox import Sandbox, disk_name, owner_of, vm_disk_name, vm_name, vm_uuid
from virtshim.moves.ports import SavedVms, StateVolumes
from virtshim.moves.receiving import ReceiveVm
from virtshim.moves.values import Brought, OnVolume, VmRecord, with_nics, without_foreign_macs
from virtshim.store.ports import Records
from virtshim.system.clock import Stamps
from virtshim.system.live import Live
from virtshim.system.locks import LeaveOff, PodLocks
from virtshim.vm.ports import Hypervisor
from virtshim.volumes.image_volumes import collect_images_of

# Seconds for a VM to be copied to its state volume before its next container is refused. kubelet tries again.
_VM_WAIT: Final = 30.0

# Each VM's QEMU has its own user id, so that no other QEMU can open its files, signal it or trace it.


class VmUids:
    """`count` ids starting at `first`. With a count of 0 all VMs run as libvirt's single user. An id is taken while a
    record has it, or while it is `in_use` by a process or file that outlived its record."""

    def __init__(self, records: Records, first: int, count: int, in_use: Callable[[], Collection[int]]) -> None:
        self._records = records
        self._first = first
        self._count = count
        self._in_use = in_use
        self._lock = threading.Lock()
        self._last = first - 1

    @contextlib.contextmanager
    def free(self) -> Iterator[int]:
        """A free id for the record that the block writes; 0 if VMs have no ids of their own. Raises
        ResourceExhausted."""
        with self.free_for(passt=False) as (uid, _):
            yield uid

    @contextlib.contextmanager
    def free_for(self, *, passt: bool) -> Iterator[tuple[int, int]]:
        """Like `free`, with a second id for the VM's passt; 0 without. Raises also WrongState."""
        if not self._count:
            if passt:
                raise WrongState(
                    "libvirt.vm_uids is 0, but the passt of a VM with containers beside it needs a user id of its own; set "
                    "libvirt.vm_uids"
                )
            yield 0, 0
            return
        with self._lock:
            uid = self._last = self._next()
            if passt:
                self._last = self._next(uid)
            yield uid, self._last if passt else 0

    def _next(self, *just_taken: int) -> int:
        """The next free id after the last one: a freed id is reused as late as possible."""
        recorded = [uid for one in self._records.containers.all() for uid in (one.spec.uid, one.spec.passt_uid)]
        taken = {*recorded, *just_taken, *self._in_use()}
        begin = max((self._last, *recorded)) + 1 - self._first
        for step in range(self._count):
            uid = self._first + (begin + step) % self._count
            if uid not in taken:
                return uid
        raise ResourceExhausted(
            f"all {self._count} user ids from {self._first} on are taken by VMs; raise libvirt.vm_uids"
        )


@dataclass(frozen=True, slots=True)
class ContainerRecords:
    """Records of new containers. A record reserves the container's image, its devices and its pod's disk."""

    records: Records
    hypervisor: Hypervisor
    images: ImageService
    disks: RootDisks
    claims: DeviceClaims
    borrowed: BorrowedDevices
    stamps: Stamps
    uids: VmUids
    vms: SavedVms
    state_volumes: StateVolumes
    receiving: ReceiveVm
    locks: PodLocks
    # Whether commands run in the guest if the pod's annotations do not say.
    run_commands: Live[bool]

    def add(self, admitted: Admitted, leave_off: LeaveOff) -> Draft:
        """`leave_off`: set when a call waits to end the pod. Raises Aborted then, if this waits for a volume or another node."""
        # Before the locks are taken, because other pods and pulls would wait.
        ended = self._end_earlier(admitted)
        without_devices = self.claims.end_earlier(admitted.granted, admitted.sandbox)
        with self._vm_held(admitted):
            brought = self._bring_state(admitted, leave_off)
            expected = self._expect(admitted, leave_off)
            with (
                self.images.pinned(admitted.config.image, admitted.volumes) as image,
                self.uids.free_for(passt=admitted.sandbox.adopted is not None) as uids,
            ):
                if expected is not None and image.digest != expected:
                    raise Aborted("the image changed meanwhile; repeat the call")
                container = self._new(admitted, image, *uids)
                self._refuse_taken_uuid(admitted, ended)
                # From now on the record reserves the image, the devices, and the VM that outlives its pods.
                self.claims.add(container, without_devices)
                sandbox = self._note_pod_disk(admitted.sandbox, container, brought)
        return Draft(container, sandbox, image, admitted.options)

    def _bring_state(self, admitted: Admitted, leave_off: LeaveOff) -> Brought:
        """Copies the VM's files from its state volume, if another node ran it last. Refuses a pod without the VM's volume."""
        disk, key = _vm_disk(admitted), admitted.sandbox.key
        if not admitted.state_volume:
            known = self.vms.get(disk) if disk else None
            if known is not None and known.volume != OnVolume():
                raise WrongState(
                    f"virtual machine {known.readable} has its state on a volume, so each of its pods needs the annotation "
                    "virtshim.io/state-volume; to start the VM anew without the volume, run `virtshim vms rm "
                    f"{known.namespace}/{known.name}` on this node"
                )
            return Brought()
        self._with_uuid_of(admitted)  # refuses a VM that runs
        vm = f"{key.namespace}/{vm_name(admitted.options.vm, key)}/{admitted.name.name}"
        return self.state_volumes.bring(admitted.state_volume, disk, vm, leave_off)

    def _expect(self, admitted: Admitted, leave_off: LeaveOff) -> ImageDigest | None:
        """Prepares for a VM that comes from another node. Refuses a pod whose VM is there. Asks the other node, so without the
        locks that other pods need. Returns the image that the VM is expected with."""
        disk, key = _vm_disk(admitted), admitted.sandbox.key
        if not disk:
            return None
        self._with_uuid_of(admitted)  # refuses a VM that runs
        if not (node := admitted.options.restore_from):
            self.receiving.not_expected(disk, leave_off)
            return None
        with self.images.pinned(admitted.config.image) as image:
            digest = image.digest
        self.receiving.expect(key, vm_name(admitted.options.vm, key), admitted.name.name, node, digest, leave_off)
        return digest

    @contextlib.contextmanager
    def _vm_held(self, admitted: Admitted) -> Iterator[None]:
        """Within the block nobody removes the VM. Enter the block before taking other locks, because it may wait until
        the VM is copied to its state volume."""
        disk = _vm_disk(admitted)
        if not disk:
            yield
            return
        with self.locks.held_soon(owner_of(disk), _VM_WAIT) as held:
            if not held:
                raise Unavailable(
                    "another call works on the virtual machine, such as its copy to the state volume; a retry may succeed"
                )
            yield

    def forget(self, container: Container, *, clean: bool) -> None:
        """`clean`: nothing else of the container is left. Otherwise RemoveContainer, or the next start of virtshim,
        finishes."""
        if clean:
            self.records.containers.delete(container.id)
            self.borrowed.give_back_of(container)
            collect_images_of(container, self.images)  # an image may have been removed meanwhile
        else:
            self.records.containers.replace(container.removing())

    def _new(self, admitted: Admitted, image: Image, uid: int, passt_uid: int) -> Container:
        sandbox, name, options = admitted.sandbox, admitted.name, admitted.options
        own = ContainerId(secrets.token_hex(32))
        image_config = image.config if options.use_image_config else ImageConfig()
        pod_disk = _vm_disk(admitted)
        if options.keep_root_disk and not pod_disk:
            pod_disk = disk_name(sandbox.key, name.name)
        spec = ContainerSpec(
            id=own,
            sandbox_id=sandbox.id,
            name=name,
            config=admitted.config,
            image=image.digest,
            image_ref=image.repo_digests[0] if image.repo_digests else image.id.value,
            domain_uuid=str(_lasting_uuid(admitted) or own.domain_uuid()),
            created_at=self.stamps.next(),
            log_file=admitted.log_file,
            cgroup_parent=sandbox.vm_cgroup_parent,
            pod_disk=pod_disk,
            command=self._command(options, admitted.config, image_config),
            granted=admitted.granted,
            uid=uid,
            passt_uid=passt_uid,
            image_config=image_config,
            beside_pod=sandbox.config.vms_lie_beside,
            volumes=admitted.volumes,
            image_id=image.id,
            copies=admitted.copies,
            empty_disks=admitted.empty_disks,
            memory_volumes=admitted.memory_volumes,
            vm=vm_name(options.vm, sandbox.key),
            save_on_stop=options.save_on_stop,
            state_volume=admitted.state_volume,
            restore_from=options.restore_from,
            warm_start=options.warm_start,
        )
        return Container(spec, ContainerStatus(size=admitted.size, claims=admitted.granted.claims))

    def _command(self, options: VmOptions, config: ContainerConfig, image: ImageConfig) -> tuple[str, ...]:
        """The rules are those of containers: the pod's `command` replaces the image's entrypoint and arguments, and its
        `args` replace the image's arguments. A disk image, and a containerDisk without a config, have no entrypoint:
        `args` alone are then the command, and without `args` no command runs."""
        run = self.run_commands.now if options.run_command is None else options.run_command
        if not run:
            return ()
        if config.command:
            return (*config.command, *config.args)
        return (*image.entrypoint, *(config.args or image.cmd))

    def _end_earlier(self, admitted: Admitted) -> frozenset[ContainerId]:
        """Ends VMs of earlier attempts with the same UUID whose failed starts could not be undone. Raises if one stays
        on."""
        maybe_on = [other for other in self._with_uuid_of(admitted) if other.may_be_running]
        for other in maybe_on:
            self.hypervisor.destroy(other.domain_uuid, other.id)
        return frozenset(other.id for other in maybe_on)

    def _refuse_taken_uuid(self, admitted: Admitted, ended: frozenset[ContainerId]) -> None:
        """`ended`: containers whose VMs are known to be off."""
        for other in self._with_uuid_of(admitted):
            if other.may_be_running and other.id not in ended:
                raise Aborted(
                    f"the start of container {other.id}, which has the same UUID, failed meanwhile; repeat the call"
                )

    def _with_uuid_of(self, admitted: Admitted) -> Sequence[Container]:
        """Earlier attempts of this pod with the same UUID. libvirt's definition belongs to the newest attempt. An earlier
        attempt may still have a record if it was never started, or failed to start."""
        wanted = str(_lasting_uuid(admitted) or "")
        disk = _vm_disk(admitted)
        found = [
            other
            for other in self.records.containers.all()
            if other.spec.domain_uuid == wanted or (disk and other.spec.pod_disk == disk)
        ]
        for other in found:
            owner = self.records.sandboxes.get(other.sandbox_id)
            is_earlier = owner is not None and owner.key.is_same_pod(admitted.sandbox.key)
            if disk and other.spec.pod_disk == disk:  # of whatever pod
                _refuse_second_pod(other, owner)
                is_earlier = True
            if not (is_earlier and other.phase in (ContainerPhase.CREATED, ContainerPhase.EXITED)):
                raise AlreadyExists(
                    f"VirtletSystemUUID {wanted} is already used by container {other.id}; a UUID names one VM on a node"
                )
        return found

    def _note_pod_disk(self, sandbox: Sandbox, container: Container, brought: Brought) -> Sandbox:
        """Written before the disk is made: the image under the disk must stay as long as the disk, and the call that
        removes the pod's last sandbox must know about the disk."""
        image = container.image
        if container.spec.vm:
            image = self._note_vm(sandbox, container, brought).image
        elif not container.spec.pod_disk or self.disks.pod_disk(container.spec.pod_disk) is not None:
            return sandbox
        if sandbox.root_disks.get(container.name.name) == image:
            return sandbox
        noted = sandbox.with_root_disk(container.name.name, image)
        self.records.sandboxes.replace(noted)
        return noted

    def _note_vm(self, sandbox: Sandbox, container: Container, brought: Brought) -> VmRecord:
        known = self.vms.get(container.spec.pod_disk)
        vm = known or VmRecord(
            disk=container.spec.pod_disk,
            namespace=sandbox.key.namespace,
            name=container.spec.vm,
            container=container.name.name,
            image=container.image,
            created_at=container.created_at,
            volume=brought.volume,
            lost=brought.lost,
        )
        if self.disks.pod_disk(vm.disk) is None:  # it is about to be made: saved memory knows another one
            vm = dataclasses.replace(vm, image=container.image, saved=None)
        if container.spec.state_volume:
            vm = without_foreign_macs(vm, sandbox)
        vm = with_nics(vm, sandbox)
        if vm != known:
            self.vms.put(vm)
        if vm.saved is None:
            self.vms.discard(vm.disk)
        return vm


def _vm_disk(admitted: Admitted) -> str:
    """The name of the root disk of the VM that outlives its pods; "" if the VM does not."""
    key = admitted.sandbox.key
    vm = vm_name(admitted.options.vm, key)
    return vm_disk_name(key.namespace, vm, admitted.name.name) if vm else ""


def _refuse_second_pod(other: Container, owner: Sandbox | None) -> None:
    if other.phase in (ContainerPhase.RUNNING, ContainerPhase.UNKNOWN, ContainerPhase.REMOVING):
        where = f"pod {owner.key.namespace}/{owner.key.name}" if owner is not None else f"sandbox {other.sandbox_id}"
        raise AlreadyExists(
            f"annotation {VM_ANNOTATION}: virtual machine {other.spec.vm} runs in {where} (container {other.id}), and a VM "
            "runs in one pod at a time; delete that pod, or give this one another VM"
        )


def _lasting_uuid(admitted: Admitted) -> uuid.UUID | None:
    """The UUID that all attempts share; None if each attempt has its own."""
    options = admitted.options
    if options.system_uuid is None and (disk := _vm_disk(admitted)):
        return vm_uuid(disk)
    if options.system_uuid is None and options.hardware.tpm and options.keep_root_disk:
        return vm_uuid(disk_name(admitted.sandbox.key, admitted.name.name))
    return options.system_uuid
