"""Where the VM's devices are in the guest: as its root disk has known them, if that is older than the container."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from virtshim.domain.errors import AlreadyExists
from virtshim.domain.hardware.of_node import NodeHardware
from virtshim.domain.hardware.options import FirmwareFiles
from virtshim.domain.hardware.places import Places
from virtshim.domain.pod_disk import pod_hash
from virtshim.domain.vm import DeviceNumbers, DiskBus
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.disks import DiskPlaces, RootVolumes

# What numbers are of, as they are written down.
_KINDS: Final = {DiskBus.VIRTIO: "v", DiskBus.SCSI: "s", DiskBus.SATA: "a"}
_NICS: Final = "n"
# How many there can be, block volumes among the virtio disks. Of NICs: those that vmwrapper has slots for.
_DISKS: Final = {DiskBus.VIRTIO: 64, DiskBus.SCSI: 64, DiskBus.SATA: 6}
_MOST_NICS: Final = 10


def _cdroms(draft: Draft, bus: DiskBus) -> int:
    """At the end of that bus."""
    return 1 if draft.sysprep_iso and bus is DiskBus.SATA else 0


@dataclass(frozen=True, slots=True)
class KeptPlaces:
    """A root disk that goes with its container has none: its VM is defined once, and libvirt keeps what it then chose."""

    node: NodeHardware
    disks: DiskPlaces
    volumes: RootVolumes

    def of(self, draft: Draft, bus: DiskBus) -> tuple[str, DeviceNumbers]:
        """The machine type and the devices' numbers; on disk when it returns. "" for a type that is libvirt's to choose."""
        if not draft.kept_disk:
            return "", DeviceNumbers()
        before = self._read(draft)
        places = dataclasses.replace(before, machine=before.machine or self.node.machine_type())
        blocks = [f"volume {block.container_path}" for block in draft.container.granted.data_volumes]
        own = [disk.serial for disk in draft.disks]
        if bus is DiskBus.VIRTIO:  # all in one row
            places, numbers = places.of(_KINDS[bus], [*own, *blocks], _DISKS[bus])
            disks, volumes = numbers[: len(own)], numbers[len(own) :]
        else:
            places, disks = places.of(_KINDS[bus], own, _DISKS[bus] - _cdroms(draft, bus))
            places, volumes = places.of(_KINDS[DiskBus.VIRTIO], blocks, _DISKS[DiskBus.VIRTIO])
        network = draft.sandbox.network
        taps = [nic.name for nic in network.interfaces if not nic.function] if network else []
        places, nics = places.of(_NICS, taps, _MOST_NICS)
        if places != before:
            self._write(draft, places)
        return places.machine, DeviceNumbers(disks, volumes, nics)

    def firmware(self, draft: Draft) -> FirmwareFiles | None:
        """Which started the disk first, whatever its package has brought since: the variables are in that one's shape, and the
        guest has measured it. It is noted before that start, so a note alone says nothing: until there are variables it is the
        one that the node has now. None if there is nothing to keep, or libvirt alone knows which it would be."""
        kind, disk = draft.options.hardware.firmware, draft.container.spec.pod_disk
        if not kind.is_uefi or not disk:
            return None
        files = self.disks.firmware(disk, kind)
        if files is None and (files := self.node.firmware_of(kind)) is not None:
            self.disks.keep_firmware(disk, kind, files)
        return files

    def refuse_anothers_tpm(self, draft: Draft) -> None:
        """A TPM goes by its VM's UUID, which pods may choose: what that of another pod's disk remembers is nobody else's, also
        while that pod has no container."""
        domain = draft.container.domain_uuid
        if draft.options.hardware.tpm and self.disks.tpm_owners(domain) - {pod_hash(draft.sandbox.key)}:
            raise AlreadyExists(
                f"VirtletSystemUUID {domain}: the TPM of that UUID belongs to the disk of another pod, which is still on this "
                "node; choose another UUID, or try again when that pod is gone"
            )

    def owns_tpm(self, draft: Draft) -> bool:
        """Whether what a TPM of that UUID remembers would be the pod's: it was made for a disk of its."""
        owners = self.disks.tpm_owners(draft.container.domain_uuid) if draft.options.hardware.tpm else frozenset()
        return pod_hash(draft.sandbox.key) in owners

    def keep_tpm(self, draft: Draft) -> None:
        """It goes with the disk that it belongs to. Before the VM is started first, and makes it."""
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
