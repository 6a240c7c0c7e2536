"""Containers' volumes on the node: checks that they can be provided, and serves them while the VM exists. Also starts and ends
passt, which carries the network of a VM with containers beside it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from virtshim.annotations.beside_containers import guest_ports, own_ports
from virtshim.annotations.parse import parse_vm_options
from virtshim.model.container import Container, ContainerConfig
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.model.troubles import Trouble, TroubleKind
from virtshim.store.ports import Records
from virtshim.system.locks import new_lock
from virtshim.vm.ports import Hypervisor
from virtshim.volumes import memory_volumes
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.pod_mounts import HOSTS, NO_IMAGES, image_mounts, is_empty_dir, volumes_of
from virtshim.volumes.ports import VmNetwork, VmShares
from virtshim.volumes.shares import SharedVolume, refuse_odd
from virtshim.volumes.sysprep import read_sysprep_files
from virtshim.volumes.volume_copies import VolumeCopies

_DAEMON_ENDED: Final = Trouble(
    TroubleKind.VOLUMES_GONE,
    "its volumes are gone: the daemon that served them (virtiofsd) has ended, and a running guest cannot get another one; "
    "restart the container",
)


@dataclass(slots=True)
class PodVolumes:
    """`timeout`: seconds for a call to the share program, which is not called for containers without volumes and passt."""

    records: Records
    hypervisor: Hypervisor
    shares: VmShares
    copies: VolumeCopies
    timeout: float
    _lock: threading.Lock = field(default_factory=new_lock)
    # A virtshim that has just started knows neither; until then the records decide.
    _unserved: frozenset[str] | None = None
    _in_guest: dict[str, tuple[Trouble, ...]] = field(default_factory=dict)

    def admit(
        self,
        config: ContainerConfig,
        pod_uid: str,
        *,
        share: bool,
        own_hosts: bool,
        images: Collection[str] = (),
        sysprep: str = "",
        image_volumes: Mapping[str, SharedVolume] = NO_IMAGES,
        memory: Sequence[MemoryVolume] = (),
    ) -> tuple[tuple[SharedVolume, ...], tuple[CopiedVolume, ...]]:
        """Returns the shared volumes, in the order of their numbers in the guest, and the copied ones. Raises ShimError
        if one cannot be provided. `share`: copy no volume. `own_hosts`: the pod defines /etc/hosts itself. `images`:
        mount paths of volumes that are disks, and `sysprep`: the one whose files become a CD-ROM; both are only
        checked. `image_volumes`: images, by mount path. `memory`: volumes in guest memory."""
        shared, copied = volumes_of(
            config.mounts,
            config.annotations,
            pod_uid,
            lambda path: self.copies.files.is_part(path, pod_uid),
            share=share,
            images=(*images, *(volume.guest for volume in memory)),
            left_out=sysprep,
            image_volumes=image_volumes,
        )
        if sysprep:
            read_sysprep_files(self.copies.files, config, pod_uid, sysprep)
        mounted = tuple(volume for volume in copied if not volume.written)
        others = {volume.guest for volume in shared} | {volume.guest for volume in mounted}
        wanted = not own_hosts and HOSTS not in others
        hosts = tuple(volume for volume in copied if volume.written and wanted and self._is_there(volume))
        copied = (*mounted, *hosts)
        refuse_odd((*shared, *copied, *memory))
        on_disks = [
            SharedVolume(mount.container_path, mount.host_path, mount.readonly)
            for mount, _ in image_mounts(config.mounts, config.annotations, pod_uid, images)
        ]
        if shared or on_disks:  # the share program looks, because a hanging volume then hangs only that program
            self.shares.check((*shared, *on_disks), self.timeout)
        self.copies.check(copied)
        return shared, copied

    def in_memory(
        self, config: ContainerConfig, pod_uid: str, places: Collection[str], memory_bytes: int
    ) -> tuple[MemoryVolume, ...]:
        """The volumes at these mount paths, which will be in guest memory and share its size. Raises ShimError with the
        field for a volume that is not an emptyDir with medium Memory, or that already has files."""
        found = []
        for mount, is_volume in image_mounts(config.mounts, config.annotations, pod_uid, places):
            guest, host = mount.container_path, mount.host_path
            where = f"annotation {memory_volumes.ANNOTATION}: config.mounts[{escaped(guest, 200)}]"
            try:
                if not is_volume or not is_empty_dir(host, pod_uid):
                    raise InvalidRequest(
                        "it is not an emptyDir with medium: Memory, or it is a subPath; remove the path from the annotation"
                    )
                tmpfs = self.copies.files.empty_tmpfs(host)
            except ShimError as exc:
                raise type(exc)(f"{where}: {exc}") from exc
            size = min(tmpfs.size_bytes or memory_bytes, memory_bytes)
            found.append(MemoryVolume(guest, host, replace(tmpfs, size_bytes=size), mount.readonly))
        return tuple(found)

    def _is_there(self, volume: CopiedVolume) -> bool:
        try:
            self.copies.files.read(volume)
        except ShimError:
            return False
        return True

    def start(self, container: Container, sandbox: Sandbox) -> None:
        """Called before the VM starts."""
        if container.spec.volumes or container.spec.passt_uid:
            network = _network_of(container, sandbox)
            self.shares.start(container, sandbox.config.cgroup_parent, self.timeout, network)

    def end(self, container: Container) -> None:
        """Called when the VM is off and before anybody learns of it, because kubelet then unmounts the volumes."""
        if awaits_libvirt(container):
            self.hypervisor.destroy(container.domain_uuid, container.id)
        if container.spec.volumes or container.spec.passt_uid:
            self.shares.end(container.id.short, self.timeout)
        with self._lock:
            self._in_guest.pop(container.id.short, None)

    def look(self) -> None:
        """Checks whether the volumes of running containers are served."""
        every = [c for c in self.records.containers.all() if c.is_running]
        running = [c.id.short for c in every if c.spec.volumes]
        served = self.shares.served(self.timeout) if running else {}
        with self._lock:
            self._unserved = frozenset(name for name in running if not served.get(name))
            self._in_guest = {c.id.short: self._in_guest[c.id.short] for c in every if c.id.short in self._in_guest}

    def cut_off(self) -> Sequence[Container]:
        """The running containers whose passt has ended. QEMU cannot get another one."""
        running = [c for c in self.records.containers.all() if c.is_running and c.spec.passt_uid]
        connected = self.shares.connected(self.timeout) if running else {}
        return [c for c in running if not connected.get(c.id.short)]

    def note(self, container: Container, troubles: tuple[Trouble, ...]) -> None:
        """Remembers what could not be set up in the guest: volumes and other parts of the set-up."""
        with self._lock:
            self._in_guest[container.id.short] = troubles

    def troubles(self, container: Container) -> tuple[Trouble, ...]:
        """What is wrong with the container's volumes, from memory."""
        name, recorded = container.id.short, container.status.troubles
        with self._lock:
            unserved, in_guest = self._unserved, self._in_guest.get(name)
        was_gone = any(one.kind is TroubleKind.VOLUMES_GONE for one in recorded)
        gone = was_gone if unserved is None else name in unserved
        if in_guest is None:
            in_guest = tuple(one for one in recorded if one.kind.is_of_set_up)
        return (_DAEMON_ENDED, *in_guest) if gone else in_guest


def awaits_libvirt(container: Container) -> bool:
    """Whether the container's end waits for libvirt, which uses the volumes until it has cleaned up the VM. Pure."""
    return container.granted.blocks != () or container.spec.pod_disk != ""


def end_takes_time(container: Container) -> bool:
    """Whether `end` calls other programs. Pure."""
    return awaits_libvirt(container) or container.spec.volumes != () or container.spec.passt_uid != 0


def _network_of(container: Container, sandbox: Sandbox) -> VmNetwork | None:
    if not container.spec.passt_uid or sandbox.network is None:
        return None
    options = parse_vm_options(sandbox.vm_annotations)
    declared = (*sandbox.config.port_mappings, *own_ports(container.config.annotations))
    return VmNetwork(sandbox.network, guest_ports(options, declared))
