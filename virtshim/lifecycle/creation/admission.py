"""Whether a container may be created, and with which VM: everything that CreateContainer refuses before it writes anything."""

from __future__ import annotations

import dataclasses
import os.path
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from virtshim.domain.annotations.from_cluster import with_data
from virtshim.domain.annotations.options import VmOptions
from virtshim.domain.annotations.parse import parse_vm_options
from virtshim.domain.container import Container, ContainerConfig, ContainerName
from virtshim.domain.devices import guest_links, guest_view
from virtshim.domain.devices.granted import BlockDevice, GrantedDevices, volume_of_both
from virtshim.domain.errors import InvalidRequest, ResourceExhausted, WrongState
from virtshim.domain.file_path import check_path
from virtshim.domain.hardware import annotations as hardware
from virtshim.domain.ids import SandboxId
from virtshim.domain.network import nics_of
from virtshim.domain.printable import escaped
from virtshim.domain.sandbox import Sandbox
from virtshim.domain.sizing import NodeLimits, memory_for, refuse_little_overhead, size_for
from virtshim.domain.vm import VmSize
from virtshim.domain.volumes import sysprep
from virtshim.domain.volumes.copies import CopiedVolume
from virtshim.domain.volumes.empty_disks import EmptyDisk, refuse_clashes, together
from virtshim.domain.volumes.hosts_file import says_hosts
from virtshim.domain.volumes.memory_volumes import MemoryVolume
from virtshim.domain.volumes.root_volume import refuse_unfit
from virtshim.domain.volumes.shares import Placed, SharedVolume
from virtshim.lifecycle.creation.data_volumes import anothers
from virtshim.lifecycle.creation.sole_container import refuse_another
from virtshim.lifecycle.volumes.image_volumes import ImageVolumes
from virtshim.lifecycle.volumes.pod_volumes import PodVolumes
from virtshim.lifecycle.volumes.volume_disks import VolumeDisks
from virtshim.passthrough.claims import DeviceClaims
from virtshim.ports.cluster import ClusterObjects
from virtshim.ports.records import Records
from virtshim.primitives.existing import existing_sandbox
from virtshim.primitives.live import Live

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that can be met, and what it comes to on this node."""

    sandbox: Sandbox
    name: ContainerName
    config: ContainerConfig
    options: VmOptions
    granted: GrantedDevices
    size: VmSize
    # Absolute path of the CRI log, "" if none is wanted.
    log_file: str
    volumes: tuple[SharedVolume, ...] = ()
    copies: tuple[CopiedVolume, ...] = ()
    empty_disks: tuple[EmptyDisk, ...] = ()
    memory_volumes: tuple[MemoryVolume, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    records: Records
    claims: DeviceClaims
    sizes: Live[NodeLimits]
    # Page size -> bytes that are free in such pages.
    free_hugepages: Callable[[int], int]
    volumes: PodVolumes
    volume_disks: VolumeDisks
    cluster: ClusterObjects
    image_volumes: ImageVolumes

    def ready_sandbox(self, sandbox_id: SandboxId) -> Sandbox:
        sandbox = existing_sandbox(self.records, sandbox_id)
        if not sandbox.is_ready:
            raise WrongState(f"pod sandbox {sandbox_id} is not ready ({sandbox.reason or sandbox.phase.value})")
        return sandbox

    def admit(self, sandbox: Sandbox, name: ContainerName, config: ContainerConfig) -> Admitted:
        """Raises NotYetFree if a device is about to be free, another ShimError for what cannot be met."""
        there = [other for other in self.records.containers.all() if other.sandbox_id == sandbox.id]
        own = self.claims.devices.own_containers(sandbox.key.namespace, sandbox.key.name)
        refuse_another(name, own, there)
        options = parse_vm_options(sandbox.vm_annotations)
        namespace = sandbox.key.namespace  # the pod's own, and no other
        options = with_data(options, namespace, lambda source: self.cluster.read(source, namespace))
        granted = self.claims.resolve(sandbox, name, config)
        share, images = options.share_kubelet_volumes, options.disk_images
        own_hosts = says_hosts(options)
        memory = self.volumes.in_memory(config, sandbox.key.uid, options.memory_volumes, self._memory(config))
        volumes, copies = self.volumes.admit(
            config,
            sandbox.key.uid,
            share=share,
            images=images,
            own_hosts=own_hosts,
            sysprep=options.sysprep,
            image_volumes=self.image_volumes.of(config),
            memory=memory,
        )
        granted = self._with_disk_images(granted, volumes, self.volume_disks.images(config, sandbox.key.uid, images))
        if granted.root_volume is None:  # what is on one may have been set up before
            _refuse_forgotten_answers(sandbox, name, config, own, there)
        refuse_unfit(granted, keep_root_disk=options.keep_root_disk)
        self._refuse_anothers_volume(granted)
        guest_links.refuse_odd(granted.data_volumes)
        _log_missing_nics(sandbox, name, granted)
        size = size_for(options, config.resources, self.sizes.now, pins_memory=granted.pins_memory)
        refuse_little_overhead(sandbox, config.resources, size)
        most = max(size.vcpus, size.max_vcpus)
        hardware.refuse_unfit(
            options.hardware,
            on_volume=granted.root_volume is not None,
            vcpus=most,
            screen=options.vnc,
            queues=options.nic_queues,
        )
        self.claims.check(granted, size)
        self._refuse_without_hugepages(size)
        log_file = _log_file(sandbox, config)
        mounted: list[Placed] = [*volumes, *copies, *memory]
        places = [volume.guest for volume in mounted]
        places += [volume.container_path for volume in granted.data_volumes]
        empty_disks = together([*options.empty_disks, *self.volume_disks.empty(config, sandbox.key.uid)])
        self._refuse_too_large(options, empty_disks)
        refuse_clashes(empty_disks, places, guest_view.serials(granted.data_volumes))
        return Admitted(sandbox, name, config, options, granted, size, log_file, volumes, copies, empty_disks, memory)

    def _memory(self, config: ContainerConfig) -> int:
        return memory_for(config.resources, self.sizes.now)

    def _refuse_too_large(self, options: VmOptions, empty_disks: Sequence[EmptyDisk]) -> None:
        most = self.sizes.now.max_root_volume
        if most and options.root_volume_bytes > most:
            raise InvalidRequest(
                f"VirtletRootVolumeSize: {options.root_volume_bytes} bytes are more than this node allows ({most}); "
                "ask for less, or raise vm.max_root_volume"
            )
        for disk in empty_disks:
            if most and disk.size_bytes > most:
                raise InvalidRequest(
                    f"{disk.field_name('.size')}: {disk.size_bytes} bytes are more than this node allows ({most}); ask for "
                    "less, or raise vm.max_root_volume"
                )

    def _with_disk_images(
        self, granted: GrantedDevices, volumes: Sequence[SharedVolume], images: tuple[BlockDevice, ...]
    ) -> GrantedDevices:
        for image in images:
            for volume in volumes:
                if posixpath.dirname(image.host_path) == posixpath.normpath(volume.host):
                    raise InvalidRequest(
                        f"{image.field_name}: the volume is shared at {escaped(volume.guest, 200)}, too, where the disk would be "
                        "written past the guest's own caches; mount it once"
                    )
        granted = dataclasses.replace(granted, blocks=(*granted.blocks, *images))
        guest_view.refuse_too_many(granted)
        return granted

    def _refuse_anothers_volume(self, granted: GrantedDevices) -> None:
        for other in self.records.containers.all() if granted.blocks else ():
            if other.is_running and (volume := volume_of_both(granted, other.granted)) is not None:
                raise WrongState(anothers(volume, other, self.records.sandboxes.get(other.sandbox_id)))

    def _refuse_without_hugepages(self, size: VmSize) -> None:
        free = self.free_hugepages(size.page_bytes) if size.page_bytes else size.memory_bytes
        if free < size.memory_bytes:
            raise ResourceExhausted(
                f"resources.limits.hugepages: the virtual machine needs {size.memory_bytes} bytes in huge pages of "
                f"{size.page_bytes}; this node has {free} free (vm.nr_hugepages, or hugepages= on the kernel command line)"
            )


def _refuse_forgotten_answers(
    sandbox: Sandbox,
    name: ContainerName,
    config: ContainerConfig,
    own: Sequence[str] | None,
    there: Sequence[Container],
) -> None:
    """InvalidRequest for a pod whose own annotation names a mount path that none of its containers has, when the last of them
    is made: its `own`, if kubelet says which that is. When it is made first (attempt 0), init containers before it have just
    ended and are on record. What has run once stays as it is."""
    pod = sandbox.key
    path = sysprep.parse(sandbox.config.annotations.get(sysprep.ANNOTATION, ""))
    if not path or name.attempt or name.name not in (own or ()):
        return
    configs = (config, *(other.config for other in there))
    if not any(sysprep.volume(one.mounts, one.annotations, pod.uid, path) for one in configs):
        raise InvalidRequest(sysprep.not_mounted(config.mounts, config.annotations, pod.uid, path))


def _log_file(sandbox: Sandbox, config: ContainerConfig) -> str:
    """Raises InvalidRequest for a path that leaves the directory."""
    if not config.log_path or not sandbox.config.log_directory:
        return ""
    directory = sandbox.config.log_directory
    if not os.path.isabs(directory):
        raise InvalidRequest(f"sandbox_config.log_directory must be absolute: {directory[:200]!r}")
    parts = config.log_path.split("/")
    outside = os.path.isabs(config.log_path) or ".." in parts or "\0" in config.log_path + directory
    if outside or os.path.normpath(config.log_path) == ".":
        raise InvalidRequest(f"config.log_path must name a file below the log directory: {config.log_path[:200]!r}")
    path = os.path.normpath(os.path.join(directory, config.log_path))
    check_path(path, "sandbox_config.log_directory and config.log_path")
    return path


def _log_missing_nics(sandbox: Sandbox, name: ContainerName, granted: GrantedDevices) -> None:
    """Usual for an init container, to which kubelet grants no device; a mistake for the one that asked for it."""
    there = nics_of(sandbox.network, granted)
    for nic in sandbox.network.interfaces if sandbox.network else ():
        if nic not in there:
            log.warning(
                "nic.not_granted", sandbox=sandbox.id.short, container=name.name, nic=nic.name, device=nic.function
            )
