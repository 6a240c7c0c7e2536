"""The volumes of containers, on the node's side: whether they can be had; served as long as the VM is there."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from virtshim.model.container import Container, ContainerConfig
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.model.troubles import Trouble, TroubleKind
from virtshim.store.ports import Records
from virtshim.vm.ports import Hypervisor
from virtshim.volumes import memory_volumes
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.pod_mounts import HOSTS, NO_IMAGES, image_mounts, is_empty_dir, volumes_of
from virtshim.volumes.ports import VmShares
from virtshim.volumes.shares import SharedVolume, refuse_odd
from virtshim.volumes.sysprep import sysprep_files_sysprep_files
from virtshim.volumes.volume_copies import VolumeCopies

_DAEMON_ENDED: Final = Trouble(
    TroubleKind.VOLUMES_GONE,
    "its volumes are gone: the daemon that served them (virtiofsd) has ended, and a guest cannot be given another one; restart "
    "the container",
)


@dataclass(slots=True)
class PodVolumes:
    """`timeout`: seconds for a call to the share program. Nothing is asked for containers without volumes."""

    records: Records
    hypervisor: Hypervisor
    shares: VmShares
    copies: VolumeCopies
    timeout: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Neither is known of a virtshim that has just been started: until it is, the records have the last word.
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
        """Those that are shared, as they will be numbered in the guest, and those that are copied. Raises ShimError for those
        that it cannot have. `share`: no volume is copied. `own_hosts`: the pod says what /etc/hosts is to be. `images`: places of
        those that are disks: whether they can be had. `sysprep`: that of one whose files are a CD-ROM, the same.
        `image_volumes`: images, by their places. `memory`: those that are the guest's own."""
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
            sysprep_files_sysprep_files(self.copies.files, config, pod_uid, sysprep)
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
        if shared or on_disks:  # a volume that hangs, hangs the share program
            self.shares.check((*shared, *on_disks), self.timeout)
        self.copies.check(copied)
        return shared, copied

    def in_memory(
        self, config: ContainerConfig, pod_uid: str, places: Collection[str], memory_bytes: int
    ) -> tuple[MemoryVolume, ...]:
        """Those at these mount paths, which the guest has in its own memory, and of that no more than there is. Raises ShimError
        with the field for what is no emptyDir with medium Memory, or has files that would be hidden."""
        found = []
        for mount, is_volume in image_mounts(config.mounts, config.annotations, pod_uid, places):
            guest, host = mount.container_path, mount.host_path
            where = f"annotation {memory_volumes.ANNOTATION}: config.mounts[{escaped(guest, 200)}]"
            try:
                if not is_volume or not is_empty_dir(host, pod_uid):
                    raise InvalidRequest(
                        "it is no emptyDir with medium: Memory, or a subPath of one; remove the path from the annotation"
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
        """Before its VM starts."""
        if container.spec.volumes:
            self.shares.start(container, sandbox.config.cgroup_parent, self.timeout)

    def end(self, container: Container) -> None:
        """When its VM is off, and before anybody is told: kubelet unmounts them then."""
        if awaits_libvirt(container):
            self.hypervisor.destroy(container.domain_uuid, container.id)
        if container.spec.volumes:
            self.shares.end(container.id.short, self.timeout)
        with self._lock:
            self._in_guest.pop(container.id.short, None)

    def look(self) -> None:
        """Whether those of running containers are served."""
        every = [c for c in self.records.containers.all() if c.is_running]
        running = [c.id.short for c in every if c.spec.volumes]
        served = self.shares.served(self.timeout) if running else {}
        with self._lock:
            self._unserved = frozenset(name for name in running if not served.get(name))
            self._in_guest = {c.id.short: self._in_guest[c.id.short] for c in every if c.id.short in self._in_guest}

    def note(self, container: Container, troubles: tuple[Trouble, ...]) -> None:
        """What could not be set up in the guest, they or what else was to be."""
        with self._lock:
            self._in_guest[container.id.short] = troubles

    def troubles(self, container: Container) -> tuple[Trouble, ...]:
        """From memory."""
        name, recorded = container.id.short, container.status.troubles
        with self._lock:
            unserved, in_guest = self._unserved, self._in_guest.get(name)
        was_gone = any(one.kind is TroubleKind.VOLUMES_GONE for one in recorded)
        gone = was_gone if unserved is None else name in unserved
        if in_guest is None:
            in_guest = tuple(one for one in recorded if one.kind.is_of_set_up)
        return (_DAEMON_ENDED, *in_guest) if gone else in_guest


def awaits_libvirt(container: Container) -> bool:
    """Whether its end waits for libvirt, which has them in hand until it is through with the VM. Pure."""
    return container.granted.blocks != () or container.spec.pod_disk != ""


def end_takes_time(container: Container) -> bool:
    """Whether `end` asks others. Pure."""
    return awaits_libvirt(container) or container.spec.volumes != ()
