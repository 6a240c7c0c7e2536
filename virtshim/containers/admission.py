"""Everything that CreateContainer refuses before it writes anything: may this container be created, and with which
VM?"""

from __future__ import annotations

import dataclasses
import os.path
import posixpath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from virtshim.annotations.from_cluster import with_data
from virtshim.annotations.hardware import refuse_unfit_annotations
from virtshim.annotations.options import VmOptions
from virtshim.annotations.parse import parse_vm_options
from virtshim.devices.claims import DeviceClaims
from virtshim.devices.guest_view import guest_serials, refuse_odd_guest_links, refuse_too_many_functions
from virtshim.devices.values import BlockDevice, GrantedDevices, volume_of_both
from virtshim.kubeapi.ports import ClusterObjects
from virtshim.model.container import Container, ContainerConfig, ContainerName
from virtshim.model.errors import InvalidRequest, ResourceExhausted, WrongState
from virtshim.model.ids import SandboxId
from virtshim.model.network import nics_of
from virtshim.model.sandbox import Sandbox
from virtshim.model.sizing import NodeLimits, memory_for, refuse_little_overhead, size_for
from virtshim.model.text import check_path, escaped
from virtshim.model.vm import VmSize
from virtshim.moves.ports import StateVolumes
from virtshim.moves.values import refuse_unsavable
from virtshim.pods.lookup import existing_sandbox
from virtshim.store.ports import Records
from virtshim.system.live import Live
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.empty_disks import EmptyDisk, refuse_clashes, together
from virtshim.volumes.image_volumes import ImageVolumes
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.pod_mounts import mount_path, says_hosts, without_state_volume
from virtshim.volumes.pod_volumes import PodVolumes
from virtshim.volumes.root_volume import refuse_unfit
from virtshim.volumes.shares import Placed, SharedVolume
from virtshim.volumes.sysprep import SYSPREP_ANNOTATION, sysprep_not_mounted, sysprep_volume
from virtshim.volumes.volume_disks import VolumeDisks, anothers

# Which of a pod's containers may be its virtual machine now. A pod has one VM, so its containers run one after another.
# Pure.
#
# CRI does not say what kind a container is. kubelet's pod-resources list says part of it: before the sandbox is made,
# the list has the pod's own containers (regular ones and native sidecars), and it never has init containers or
# ephemeral ones. virtshim therefore neither guesses from the order of kubelet's calls nor remembers it. The order would
# mislead: kubelet starts with the first init container in each new sandbox, repeats all init containers in the same
# sandbox (RestartAllContainers), and may request an ephemeral container before an init container.

_INSTEAD = (
    "Put a second one (a sidecar, also an injected one) into a pod of its own, or run what it runs inside the guest"
)
_DEBUG = "use kubectl exec, or kubectl attach for the console"


def refuse_another(
    wanted: ContainerName, own: Sequence[str] | None, there: Iterable[Container], *, adopted: bool = False
) -> None:
    """Raises WrongState if the container cannot run in this pod, or cannot run now. `own`: the names that kubelet
    lists, None if unknown. `there`: the containers of this sandbox. `adopted`: another runtime runs the pod's ordinary
    containers, so only those on record here, and the requested one, are VMs."""
    name = _quoted(wanted.name)
    known = [other for other in there if not other.was_never_created]
    cannot = f"container {name} cannot run in this pod: a pod is one virtual machine"
    count, instead = "containers", _INSTEAD
    if adopted:
        cannot = f"container {name} cannot run in this pod: a pod has one virtual machine"
        count, instead = "containers with images of virtual machines", "Put the second one into a pod of its own"
        vms = {wanted.name, *(other.name.name for other in known)}
        own = None if own is None else [one for one in own if one in vms]
    if own is not None and len(own) > 1:
        raise WrongState(
            f"{cannot}, and this one has {len(own)} {count} ({', '.join(map(_quoted, own))}; native sidecars count, init "
            f"containers that end do not). {instead}"
        )
    running = next((other for other in known if other.is_running), None)
    if running is not None and running.name.name == wanted.name:
        raise WrongState(f"container {running.id} ({running.name}) runs in this pod; stop it first")
    is_own = own is not None and wanted.name in own
    if own is not None and not is_own:
        # While a sandbox has one of the pod's own containers on record, even an ended one, kubelet starts no init
        # container.
        before = running or next((other for other in known if other.name.name in own), None)
        if before is not None:
            what = "runs in it" if before.is_running else "is it"
            raise WrongState(
                f"{cannot}, and container {_quoted(before.name.name)} ({before.id}) {what}. {name} is an ephemeral container "
                f"(kubectl debug), or an init container that kubelet cannot start now: {_DEBUG}"
            )
    elif running is not None:
        beside = f"{cannot}, and container {_quoted(running.name.name)} ({running.id}) runs in it"
        if is_own:  # kubelet requests it after all init containers have ended, so the running one is ephemeral
            raise WrongState(
                f"{beside}, an ephemeral container (kubectl debug). Shut down its guest, or stop it with crictl stop; kubelet "
                f"then starts {name}"
            )
        raise WrongState(f"{beside}. {instead}; an ephemeral container (kubectl debug) cannot run: {_DEBUG}")


def _quoted(name: str) -> str:
    return repr(name[:80])


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that virtshim can satisfy, with what it needs on this node."""

    sandbox: Sandbox
    name: ContainerName
    config: ContainerConfig
    options: VmOptions
    granted: GrantedDevices
    size: VmSize
    # Absolute path of the CRI log, "" for no log.
    log_file: str
    volumes: tuple[SharedVolume, ...] = ()
    copies: tuple[CopiedVolume, ...] = ()
    empty_disks: tuple[EmptyDisk, ...] = ()
    memory_volumes: tuple[MemoryVolume, ...] = ()
    # The path on the node of the volume for the state of a VM that outlives its pods, "" for none.
    state_volume: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    records: Records
    claims: DeviceClaims
    sizes: Live[NodeLimits]
    # Page size -> free bytes in pages of that size.
    free_hugepages: Callable[[int], int]
    volumes: PodVolumes
    volume_disks: VolumeDisks
    cluster: ClusterObjects
    image_volumes: ImageVolumes
    state_volumes: StateVolumes

    def ready_sandbox(self, sandbox_id: SandboxId) -> Sandbox:
        sandbox = existing_sandbox(self.records, sandbox_id)
        if not sandbox.is_ready:
            raise WrongState(f"pod sandbox {sandbox_id} is not ready ({sandbox.reason or sandbox.phase.value})")
        return sandbox

    def admit(self, sandbox: Sandbox, name: ContainerName, config: ContainerConfig) -> Admitted:
        """Raises NotYetFree if a device will soon be free, and another ShimError for a request that cannot be
        satisfied."""
        there = [other for other in self.records.containers.all() if other.sandbox_id == sandbox.id]
        own = self.claims.devices.own_containers(sandbox.key.namespace, sandbox.key.name)
        refuse_another(name, own, there, adopted=sandbox.adopted is not None)
        options = parse_vm_options(sandbox.vm_annotations)
        namespace = sandbox.key.namespace  # only objects of the pod's own namespace are read
        options = with_data(options, namespace, lambda source: self.cluster.read(source, namespace))
        granted = self.claims.resolve(sandbox, name, config)
        share, images = options.share_kubelet_volumes, options.disk_images
        state_volume, shown = without_state_volume(config, sandbox.key.uid, options.state_volume)
        own_hosts = says_hosts(options)
        memory = self.volumes.in_memory(shown, sandbox.key.uid, options.memory_volumes, self._memory(config))
        volumes, copies = self.volumes.admit(
            shown,
            sandbox.key.uid,
            share=share,
            images=images,
            own_hosts=own_hosts,
            sysprep=options.sysprep,
            image_volumes=self.image_volumes.shared_volumes(shown),
            memory=memory,
        )
        granted = self._with_disk_images(granted, volumes, self.volume_disks.images(shown, sandbox.key.uid, images))
        if granted.root_volume is None:  # a root volume may hold a guest that was set up earlier
            _refuse_forgotten_answers(sandbox, name, config, own, there)
        refuse_unfit(granted, keep_root_disk=options.keep_root_disk)
        self._refuse_anothers_volume(granted)
        refuse_odd_guest_links(granted.data_volumes)
        _log_missing_nics(sandbox, name, granted)
        size = size_for(options, config.resources, self.sizes.now, pins_memory=granted.pins_memory)
        refuse_little_overhead(sandbox, config.resources, size)
        most = max(size.vcpus, size.max_vcpus)
        refuse_unfit_annotations(
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
        empty_disks = together([*options.empty_disks, *self.volume_disks.empty(shown, sandbox.key.uid)])
        self._refuse_too_large(options, empty_disks)
        refuse_clashes(empty_disks, places, guest_serials(granted.data_volumes))
        if options.save_on_stop:
            refuse_unsavable(granted, volumes, empty_disks)
        if state_volume:
            self.state_volumes.check()
        return Admitted(
            sandbox, name, config, options, granted, size, log_file, volumes, copies, empty_disks, memory, state_volume
        )

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
                        f"{image.field_name}: the volume is shared at {escaped(volume.guest, 200)}, too; writes to the disk "
                        "there would bypass the guest's caches; mount it once"
                    )
        granted = dataclasses.replace(granted, blocks=(*granted.blocks, *images))
        refuse_too_many_functions(granted)
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
    """Raises InvalidRequest if the pod's annotation names a mount path that none of its containers has. Only the pod's
    `own` last container is checked, if kubelet lists it, and only on its first attempt (0): the init containers before
    it are on record then. A container that has run once is not refused later."""
    pod = sandbox.key
    path = mount_path(sandbox.config.annotations.get(SYSPREP_ANNOTATION, ""))
    if not path or name.attempt or name.name not in (own or ()):
        return
    configs = (config, *(other.config for other in there))
    if not any(sysprep_volume(one.mounts, one.annotations, pod.uid, path) for one in configs):
        raise InvalidRequest(sysprep_not_mounted(config.mounts, config.annotations, pod.uid, path))


def _log_file(sandbox: Sandbox, config: ContainerConfig) -> str:
    """Raises InvalidRequest for a path outside the log directory."""
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
    """A missing NIC is normal for an init container, because kubelet grants it no device. For the container that
    requested the device it is a mistake."""
    there = nics_of(sandbox.network, granted)
    for nic in sandbox.network.interfaces if sandbox.network else ():
        if nic not in there:
            log.warning(
                "nic.not_granted", sandbox=sandbox.id.short, container=name.name, nic=nic.name, device=nic.function
            )
