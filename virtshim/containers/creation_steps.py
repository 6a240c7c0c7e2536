"""The steps of CreateContainer. Each step makes one part of the VM and can remove it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import structlog

from virtshim.annotations.hardware import INITRD, KERNEL
from virtshim.annotations.options import VmOptions
from virtshim.devices.claims import BorrowedDevices
from virtshim.devices.guest_view import guest_environment
from virtshim.disks.ports import DiskPlaces, EmptyDiskFiles, KernelFiles, RootDisks, RootVolumes
from virtshim.images.ports import BootFiles, ImageFiles
from virtshim.metrics import observed
from virtshim.model.container import Container
from virtshim.model.errors import AlreadyExists, InvalidRequest
from virtshim.model.hardware import FirmwareFiles, Places
from virtshim.model.image import NO_DISK, BootFile, Image
from virtshim.model.layout import Layout, kernel_of, nvram_of, share_socket, vnc_socket
from virtshim.model.network import Dns, nics_of, taps_of
from virtshim.model.sandbox import Sandbox, identity, owner_of, pod_hash
from virtshim.model.sizing import HostNodes, NodeHardware, NodeLimits, cells_for, limits_for
from virtshim.model.vm import Backing, DeviceNumbers, Disk, DiskBus, VmSpec
from virtshim.seed.ports import GuestSeeds, SeedRequest
from virtshim.store.ports import RecordCopies, StateRecords
from virtshim.system.live import Live
from virtshim.vm.ports import Hypervisor
from virtshim.volumes.pod_mounts import hosts_file
from virtshim.volumes.root_volume import must_be_written
from virtshim.volumes.sysprep import read_sysprep_files
from virtshim.volumes.volume_copies import VolumeCopies

# What a step is, and what it gets.


@dataclass(frozen=True, slots=True)
class Draft:
    """A container with a record but no defined VM yet, and what the steps have made for it so far."""

    container: Container
    # As recorded now: a step that changes the record passes on the changed sandbox.
    sandbox: Sandbox
    # The image under the root disk.
    image: Image
    # What the pod's annotations ask for.
    options: VmOptions
    # In the order of attachment; the boot disk is first.
    disks: tuple[Disk, ...] = ()
    # Identity of the root disk, 20 hex digits, if the disk outlives the container.
    kept_disk: str = ""
    # The file that Ignition reads through the firmware, "" for none.
    ignition_file: str = ""
    # The kernel that the firmware starts, and its initrd, "" for none.
    kernel_file: str = ""
    initrd_file: str = ""
    # The CD-ROM with Windows' answer file, "" for none.
    sysprep_iso: str = ""

    def with_disk(self, disk: Disk) -> Draft:
        return dataclasses.replace(self, disks=(*self.disks, disk))


class Step(Protocol):
    """One step. The container's record exists before the first step and after the last undo. CreateContainer runs the
    steps in the order that `app.assembly` lists, and undoes them in reverse."""

    measured_as: ClassVar[observed.Step]

    def make(self, draft: Draft) -> Draft:
        """Returns the draft with what this step made. If this raises, `undo` is called too."""

    def undo(self, container: Container) -> None:
        """Removes everything that this step made, however far `make` came. virtshim may have been restarted in
        between."""


# Device addresses in the guest. A root disk that outlives its container keeps those of its first start.

# The prefixes of the stored numbers.
_KINDS: Final = {DiskBus.VIRTIO: "v", DiskBus.SCSI: "s", DiskBus.SATA: "a"}
_NICS: Final = "n"
# The most devices of each kind. Block volumes count as virtio disks. vmwrapper's slots limit the NICs.
_DISKS: Final = {DiskBus.VIRTIO: 64, DiskBus.SCSI: 64, DiskBus.SATA: 6}
_MOST_NICS: Final = 10


def _cdroms(draft: Draft, bus: DiskBus) -> int:
    """How many CD-ROMs occupy the last places of that bus."""
    return 1 if draft.sysprep_iso and bus is DiskBus.SATA else 0


@dataclass(frozen=True, slots=True)
class KeptPlaces:
    """Where the devices of a lasting root disk are. A root disk that is removed with its container has no kept places:
    its VM is defined once, and libvirt keeps its choice."""

    node: NodeHardware
    disks: DiskPlaces
    volumes: RootVolumes

    def machine_and_numbers(self, draft: Draft, bus: DiskBus) -> tuple[str, DeviceNumbers]:
        """The machine type and the devices' numbers, which are stored on disk on return. "" lets libvirt choose the
        type."""
        if not draft.kept_disk:
            return "", DeviceNumbers()
        before = self._read(draft)
        places = dataclasses.replace(before, machine=before.machine or self.node.machine_type())
        blocks = [f"volume {block.container_path}" for block in draft.container.granted.data_volumes]
        own = [disk.serial for disk in draft.disks]
        if bus is DiskBus.VIRTIO:  # disks and volumes share the numbers
            places, numbers = places.numbered(_KINDS[bus], [*own, *blocks], _DISKS[bus])
            disks, volumes = numbers[: len(own)], numbers[len(own) :]
        else:
            places, disks = places.numbered(_KINDS[bus], own, _DISKS[bus] - _cdroms(draft, bus))
            places, volumes = places.numbered(_KINDS[DiskBus.VIRTIO], blocks, _DISKS[DiskBus.VIRTIO])
        taps = [nic.name for nic in taps_of(draft.sandbox.network)]
        places, nics = places.numbered(_NICS, taps, _MOST_NICS)
        if places != before:
            self._write(draft, places)
        return places.machine, DeviceNumbers(disks, volumes, nics)

    def firmware(self, draft: Draft) -> FirmwareFiles | None:
        """The firmware that first started the disk, even after an upgrade of its package: the UEFI variables have that
        firmware's format, and the guest has measured it. The note is written before the first start. A note without
        variables therefore proves nothing, and the node's current firmware is used. None if nothing is to be kept, or
        if only libvirt knows the firmware."""
        kind, disk = draft.options.hardware.firmware, draft.container.spec.pod_disk
        if not kind.is_uefi or not disk:
            return None
        files = self.disks.firmware(disk, kind)
        if files is None and (files := self.node.firmware_of(kind)) is not None:
            self.disks.keep_firmware(disk, kind, files)
        return files

    def refuse_anothers_tpm(self, draft: Draft) -> None:
        """Raises AlreadyExists if the TPM of this UUID belongs to another pod's disk. Pods may choose the UUID, so
        without this check a pod could read another pod's TPM, even while that pod has no container."""
        domain = draft.container.domain_uuid
        if draft.options.hardware.tpm and self.disks.tpm_owners(domain) - {_owner(draft)}:
            raise AlreadyExists(
                f"VirtletSystemUUID {domain}: the TPM of that UUID belongs to the disk of another pod, which is still on this "
                "node; choose another UUID, or try again when that pod is gone"
            )

    def owns_tpm(self, draft: Draft) -> bool:
        """Whether the TPM of this UUID was made for a disk of this pod."""
        owners = self.disks.tpm_owners(draft.container.domain_uuid) if draft.options.hardware.tpm else frozenset()
        return _owner(draft) in owners

    def keep_tpm(self, draft: Draft) -> None:
        """Notes that the TPM belongs to the disk, so that both are removed together. Called before the first start
        creates it."""
        if draft.options.hardware.tpm and (disk := draft.container.spec.pod_disk):
            self.disks.keep_tpm(disk, draft.container.domain_uuid)

    def _read(self, draft: Draft) -> Places:
        if (volume := draft.container.granted.root_volume) is not None:
            return self.volumes.look(volume.host_path).places
        return self.disks.read(draft.container.spec.pod_disk)

    def _write(self, draft: Draft, places: Places) -> None:
        if (volume := draft.container.granted.root_volume) is not None:
            self.volumes.keep_places(volume.host_path, places)
        else:
            self.disks.keep(draft.container.spec.pod_disk, places)


def _owner(draft: Draft) -> str:
    """What a disk that outlives the container belongs to."""
    return owner_of(draft.container.spec.pod_disk) or pod_hash(draft.sandbox.key)


# Step: takes the granted devices from the host's drivers.


@dataclass(frozen=True, slots=True)
class HostDevices:
    measured_as: ClassVar[observed.Step] = observed.Step.DEVICES
    borrowed: BorrowedDevices

    def make(self, draft: Draft) -> Draft:
        self.borrowed.take(draft.container.granted)
        return draft

    def undo(self, container: Container) -> None:
        """Does nothing: the devices belong to the container while its record claims them. `ContainerRecords.forget`
        gives them back."""


# The kernel and initrd that a pod's VM starts from. They come from the image and are copied beside the root disk.


@dataclass(frozen=True, slots=True)
class Kernels:
    boot: BootFiles
    kernels: KernelFiles
    layout: Layout

    def refuse_missing(self, draft: Draft) -> None:
        """Called before anything is written: otherwise a lasting disk or a volume would hold an image that cannot
        start."""
        wanted, image = draft.options.hardware, draft.image
        if not wanted.kernel and image.boot and image.digest == NO_DISK:
            raise InvalidRequest(
                f"image {draft.container.config.image!r} has no disk to boot from; name the kernel to start in annotation "
                f"{KERNEL}; the image has {_listed(image)}"
            )
        for annotation, path in ((KERNEL, wanted.kernel), (INITRD, wanted.initrd)):
            if path and not self._is_kept(draft, path) and _in(image, path) is None:
                raise InvalidRequest(
                    f"annotation {annotation}: image {draft.container.config.image!r} has no file {path}; it has {_listed(image)}"
                )

    def beside(self, draft: Draft) -> Draft:
        """Copies kernel and initrd into the root disk's directory, which exists by now. They are removed with it."""
        wanted = draft.options.hardware
        return dataclasses.replace(
            draft, kernel_file=self._copied(draft, wanted.kernel), initrd_file=self._copied(draft, wanted.initrd)
        )

    def _copied(self, draft: Draft, path: str) -> str:
        """Each VM has its own copy: another VM's QEMU must not read it, and the image may be removed."""
        if not path:
            return ""
        final = kernel_of(self.layout, draft.container, path)
        if not self._is_kept(draft, path) and (found := _in(draft.image, path)) is not None:
            self.kernels.copy(self.boot.path(found.digest), final)
        return final

    def _is_kept(self, draft: Draft, path: str) -> bool:
        """Whether the lasting root disk already has this file: kernel and modules must stay those of one image, even if
        the image's name now means another one."""
        container = draft.container
        return bool(container.spec.pod_disk) and self.kernels.is_there(kernel_of(self.layout, container, path))


def _in(image: Image, path: str) -> BootFile | None:
    return next((one for one in image.boot if one.path == path), None)


def _listed(image: Image) -> str:
    return ", ".join(one.path for one in image.boot) or "none there, or none that a pull has kept (pull it again)"


# Step: makes the container's directory and the root disk, over the image or on a volume, with the kernel if one is set.

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RootDisk:
    measured_as: ClassVar[observed.Step] = observed.Step.DISK
    files: ImageFiles
    disks: RootDisks
    volumes: RootVolumes
    kernels: Kernels

    def make(self, draft: Draft) -> Draft:
        self.kernels.refuse_missing(draft)
        return self.kernels.beside(self._with_disk(draft))

    def _with_disk(self, draft: Draft) -> Draft:
        if (volume := draft.container.granted.root_volume) is not None:
            self.disks.make_directory(draft.container.id)
            return self._on_volume(draft, volume.host_path)
        disk = dataclasses.replace(self._disk(draft), backing=self._backing(draft))
        name = draft.container.spec.pod_disk
        return dataclasses.replace(draft.with_disk(disk), kept_disk=identity(name) if name else "")

    def undo(self, container: Container) -> None:
        """Removes the container's directory with everything in it. A disk that stays with its pod is elsewhere, and
        remains for the next attempt."""
        self.disks.delete(container.id)

    def _disk(self, draft: Draft) -> Disk:
        container, image = draft.container, draft.image
        path, size = self.files.path(image.digest), draft.options.root_volume_bytes
        if not container.spec.pod_disk:
            return self.disks.create(container.id, image, path, size)
        self.disks.make_directory(container.id)
        pod_disk = self.disks.pod_disk(container.spec.pod_disk)
        return pod_disk or self.disks.create_pod_disk(container.spec.pod_disk, image, path, size)

    def _on_volume(self, draft: Draft, device: str) -> Draft:
        """Continues where a killed call stopped. Undo does nothing here: the volume outlives the container, and the
        next call replaces an unfinished copy."""
        own, image = draft.container.id, draft.image
        found = self.volumes.look(device)
        kept_disk = found.identity
        if must_be_written(found, image, replace=draft.options.replace_root_disk):
            log.info("root_volume.written", container=own.short, device=device, image=image.digest.value)
            self.volumes.begin(device, own)
            self.volumes.copy(device, own, image, self.files.path(image.digest))
            self.volumes.seal(device, own, image.digest)
            kept_disk = own.short
        return dataclasses.replace(draft.with_disk(self.volumes.disk(device)), kept_disk=kept_disk)

    def _backing(self, draft: Draft) -> Backing:
        """The image under the disk. For a disk that stays with its pod, it is the image of the first attempt. The
        records decide, because the VM may have overwritten what the disk says."""
        container, image = draft.container, draft.image
        first = draft.sandbox.root_disks.get(container.name.name) if container.spec.pod_disk else None
        if first is None or first == image.digest:
            return Backing(self.files.path(image.digest), image.format)
        return Backing(self.files.path(first), self.files.format_of(first))


# Step: makes the empty disks that the pod asks for, in the container's directory.


@dataclass(frozen=True, slots=True)
class EmptyDisks:
    measured_as: ClassVar[observed.Step] = observed.Step.EMPTY_DISKS
    disks: EmptyDiskFiles

    def make(self, draft: Draft) -> Draft:
        """Attaches the empty disks after the seed, because guests expect the seed at a fixed position."""
        for wanted in draft.container.spec.empty_disks:
            draft = draft.with_disk(self.disks.create(draft.container.id, wanted))
        return draft

    def undo(self, container: Container) -> None:
        """Does nothing: the disks are in the container's directory, which `RootDisk` removes."""


# Step: writes what configures the guest at its first boot: the cloud-init seed ISO, the Ignition file, or the CD-ROM
# for Windows' setup.


@dataclass(frozen=True, slots=True)
class Seed:
    measured_as: ClassVar[observed.Step] = observed.Step.SEED
    seeds: GuestSeeds
    copies: VolumeCopies

    def make(self, draft: Draft) -> Draft:
        copied = self.copies.seed(draft.container.spec.copies)
        draft = draft.with_disk(self.seeds.create(_request(draft, copied)))
        own, options = draft.container.id, draft.options
        if options.ignition:
            path = self.seeds.write_ignition(own, options.ignition)
            draft = dataclasses.replace(draft, ignition_file=path)
        if options.sysprep:
            config, pod = draft.container.config, draft.sandbox.key.uid
            files = read_sysprep_files(self.copies.files, config, pod, options.sysprep)
            if files:
                draft = dataclasses.replace(draft, sysprep_iso=self.seeds.write_sysprep(own, files))
            else:  # an init container, or kubelet was not asked about this pod
                log.warning("sysprep.not_mounted", container=own.short, path=options.sysprep)
        return draft

    def undo(self, container: Container) -> None:
        """Does nothing: the files are in the container's directory, which `RootDisk` removes."""


def _request(draft: Draft, copied: bytes) -> SeedRequest:
    container, sandbox, network = draft.container, draft.sandbox, draft.sandbox.network
    return SeedRequest(
        container=container.id,
        pod=sandbox.key,
        hostname=sandbox.config.hostname or sandbox.key.name,
        options=draft.options,
        interfaces=nics_of(network, container.granted),
        dns=network.dns if network else Dns(),
        hosts_file=hosts_file(container.config.mounts, container.config.annotations),
        envs=guest_environment(container.config.envs, container.granted),
        blocks=container.granted.data_volumes,
        kept_disk=draft.kept_disk,
        volumes=container.spec.volumes,
        sysctls=sandbox.config.sysctls,
        copies=container.spec.copies,
        copied=copied,
        empty_disks=container.spec.empty_disks,
        memory_volumes=container.spec.memory_volumes,
    )


@dataclass(frozen=True, slots=True)
class Domain:
    measured_as: ClassVar[observed.Step] = observed.Step.DEFINE
    hypervisor: Hypervisor
    records: StateRecords
    copies: RecordCopies
    layout: Layout
    sizes: Live[NodeLimits]
    tapmanager_socket: str
    places: KeptPlaces
    host_nodes: Callable[[], HostNodes]

    def make(self, draft: Draft) -> Draft:
        # If the VM loses its record, this copy identifies the VM.
        self.copies.keep(draft.container.id, self.records.to_text(draft.sandbox, draft.container))
        self.places.refuse_anothers_tpm(draft)
        self.hypervisor.define(self._vm(draft))
        # Only after `define`, which refuses the UUID of a foreign VM: removing the pod removes the TPM that is noted
        # here.
        self.places.keep_tpm(draft)
        return draft

    def undo(self, container: Container) -> None:
        self.hypervisor.undefine(container.domain_uuid, container.id)

    def _vm(self, draft: Draft) -> VmSpec:
        container, sandbox, options = draft.container, draft.sandbox, draft.options
        size, firmware = container.status.size, options.hardware.firmware
        network = sandbox.network
        disk_bus = options.disk_bus or sandbox.disk_bus
        machine, numbers = self.places.machine_and_numbers(draft, disk_bus)
        return VmSpec(
            uuid=container.domain_uuid,
            name=container.domain_name,
            container_id=container.id,
            sandbox_id=sandbox.id,
            size=size,
            disk_bus=disk_bus,
            disks=draft.disks,
            console_socket=self.layout.console_socket(container.id),
            console_log=self.layout.console_log(container.id),
            agent_socket=self.layout.agent_socket(container.id),
            exec_sockets=tuple(self.layout.exec_socket(container.id, n) for n in range(options.exec_ports)),
            shares_socket=share_socket(self.layout, container.id) if container.spec.volumes else "",
            vnc_socket=vnc_socket(self.layout, container.id) if options.vnc else "",
            limits=limits_for(container.resources, sandbox.overhead, size, self.sizes.now),
            cgroup_parent=container.spec.cgroup_parent,
            cells=cells_for(container.resources, size, self.host_nodes),
            cpu_model=options.cpu_model,
            cpu_details=options.cpu_details,
            smbios_uuid=options.system_uuid is not None,
            generation_id=container.spec.warm_start and not container.spec.vm,  # a restored guest is no copy
            title=f"{sandbox.key.namespace}/{sandbox.key.name}/{container.name.name}",
            fetch_key=network.fetch_key if network else "",
            tapmanager_socket=self.tapmanager_socket if network else "",
            granted=container.granted,
            uid=container.spec.uid,
            ignition_file=draft.ignition_file,
            sysprep_iso=draft.sysprep_iso,
            kernel_file=draft.kernel_file,
            initrd_file=draft.initrd_file,
            machine=machine,
            numbers=numbers,
            hardware=options.hardware,
            nvram=nvram_of(self.layout, container, firmware) if firmware.is_uefi else "",
            firmware_files=self.places.firmware(draft),
            keeps_tpm=container.spec.pod_disk != "",
            owns_tpm=self.places.owns_tpm(draft),
        )
