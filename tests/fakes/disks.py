"""Root disks and cloud-init seeds in memory: one directory per container."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fakes.clock import START_NS

from virtshim.model.errors import InternalError, WrongState
from virtshim.model.hardware import Firmware, FirmwareFiles, Places, places_from_bytes
from virtshim.model.ids import ContainerId, ImageDigest
from virtshim.model.image import DiskFormat, FilesystemUsage, Image
from virtshim.model.sandbox import VMS
from virtshim.model.usage import DiskUsage
from virtshim.model.vm import Disk
from virtshim.seed.ports import SeedRequest
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.root_volume import DATA_AT, SECTOR, RootVolume, copying, header, parse, with_places


class FakeRootDisks:
    """Implements `virtshim.disks.ports.RootDisks`. `directories` holds the file names of each container."""

    def __init__(self) -> None:
        self.directories: dict[ContainerId, set[str]] = {}
        self.sizes: dict[ContainerId, int] = {}
        self.pod_disks: dict[str, ImageDigest] = {}
        self.pod_sizes: dict[str, int] = {}
        self.free = 1 << 40
        self.notes: dict[str, bytes] = {}
        self.tpms: dict[str, set[uuid.UUID]] = {}
        self.firmware: dict[tuple[str, Firmware], FirmwareFiles] = {}
        # The paths of UEFI's variables: of VMs that were started.
        self.variables: set[str] = set()

    def create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> Disk:
        self.half_create(container, base, base_path, size_bytes)
        self.directories[container].add("root.qcow2")
        self.sizes[container] = max(base.virtual_size, size_bytes)
        return Disk(f"/containers/{container}/root.qcow2", DiskFormat.QCOW2, "root")

    def half_create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> None:
        self.directories.setdefault(container, set())

    def make_directory(self, container: ContainerId) -> None:
        self.directories.setdefault(container, set())

    def create_pod_disk(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        if name in self.pod_disks:
            raise InternalError(f"pod disk {name} is there already")
        self.pod_disks[name] = base.digest
        self.pod_sizes[name] = max(base.virtual_size, size_bytes)
        return Disk(f"/pods/{name}.qcow2", DiskFormat.QCOW2, "root")

    def pod_disk(self, name: str) -> Disk | None:
        return Disk(f"/pods/{name}.qcow2", DiskFormat.QCOW2, "root") if name in self.pod_disks else None

    def delete_pod_disks(self, pod: str) -> None:
        for name in [name for name in self.pod_disks if name.startswith(f"{pod}/")]:
            del self.pod_disks[name]
            self.notes.pop(name, None)
            self.tpms.pop(name, None)
            self.firmware = {key: files for key, files in self.firmware.items() if key[0] != name}
            self.variables -= {path for path in self.variables if f"/{name}." in path}
            self.pod_sizes.pop(name, None)

    def pods_with_disks(self) -> frozenset[str]:
        return frozenset(name.split("/")[0] for name in self.pod_disks) - {VMS}

    def delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        if disk_alone:
            names = self.directories.get(container, set())
            names -= {name for name in names if name == "root.qcow2" or name.startswith("disk-")}
            return
        self.directories.pop(container, None)
        self.sizes.pop(container, None)

    def half_delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        if not disk_alone and container in self.directories:
            self.directories[container].clear()

    def free_bytes(self) -> int:
        return self.free

    def existing(self) -> frozenset[ContainerId]:
        return frozenset(self.directories)

    def use(self, container: ContainerId, pod_disk: str = "") -> DiskUsage | None:
        """The space in use; each file takes a mebibyte."""
        files = self.directories.get(container)
        if files is None:
            return None
        count = len(files) + (pod_disk in self.pod_disks)
        return DiskUsage(START_NS, "/state/containers", count << 20, 1 + count, 1 << 40, 1_000_000, 900_000)


class FakeDiskPlaces:
    """Implements `virtshim.disks.ports.DiskPlaces`; beside the pods' disks."""

    def __init__(self, disks: FakeRootDisks) -> None:
        self._disks = disks

    def read(self, disk: str) -> Places:
        return places_from_bytes(self._disks.notes.get(disk, b""))

    def keep(self, disk: str, places: Places) -> None:
        self._disks.notes[disk] = places.to_bytes()

    def firmware(self, disk: str, kind: Firmware) -> FirmwareFiles | None:
        name = f"{disk}{'.secure' if kind is Firmware.SECURE else ''}.nvram"
        began = any(path.endswith(f"/{name}") for path in self._disks.variables)
        return self._disks.firmware.get((disk, kind)) if began else None

    def keep_firmware(self, disk: str, kind: Firmware, files: FirmwareFiles) -> None:
        self._disks.firmware[disk, kind] = files

    def keep_tpm(self, disk: str, domain: uuid.UUID) -> None:
        self._disks.tpms.setdefault(disk, set()).add(domain)

    def tpm_owners(self, domain: uuid.UUID) -> frozenset[str]:
        return frozenset(disk.partition("/")[0] for disk, known in self._disks.tpms.items() if domain in known)


class FakeKernelFiles:
    """Implements `virtshim.disks.ports.KernelFiles`: the copies, and what they are of."""

    def __init__(self) -> None:
        self.copies: dict[str, str] = {}

    def is_there(self, path: str) -> bool:
        return path in self.copies

    def copy(self, source: str, path: str) -> None:
        self.copies[path] = source


class FakeContainersRoom:
    """Implements `virtshim.disks.ports.ContainersRoom`. Each file takes a mebibyte."""

    def __init__(self, disks: FakeRootDisks) -> None:
        self._disks = disks

    def filesystem_usage(self) -> FilesystemUsage:
        directories = self._disks.directories
        count = len(self._disks.pod_disks) + sum(map(len, directories.values()))
        return FilesystemUsage("/state", count << 20, len(directories) + count, START_NS)


class FakeRecordCopies:
    """Implements `virtshim.store.ports.RecordCopies`; writes into the directories of the disks."""

    def __init__(self, disks: FakeRootDisks) -> None:
        self.texts: dict[ContainerId, str] = {}
        self._disks = disks

    def keep(self, container: ContainerId, text: str) -> None:
        self.half_keep(container, text)
        self.texts[container] = text

    def half_keep(self, container: ContainerId, text: str) -> None:
        self._disks.directories[container].add("record.json")
        self.texts[container] = text[: len(text) // 2]

    def read(self, container: ContainerId) -> str:
        files = self._disks.directories.get(container, set())
        return self.texts[container] if "record.json" in files else ""


class FakeEmptyDisks:
    """Implements `virtshim.disks.ports.EmptyDiskFiles`; writes into the directories of the root disks."""

    def __init__(self, disks: FakeRootDisks) -> None:
        self._disks = disks

    def create(self, container: ContainerId, wanted: EmptyDisk) -> Disk:
        self._disks.directories[container].add(f"disk-{wanted.name}")
        return Disk(f"/containers/{container}/disk-{wanted.name}", wanted.format, wanted.name)


class FakeRootVolumes:
    """Implements `virtshim.disks.ports.RootVolumes`. `devices` holds the first bytes of each, `images` what was copied there."""

    def __init__(self, size: int = 1 << 30) -> None:
        self.size = size
        self.devices: dict[str, bytes] = {}
        self.images: dict[str, ImageDigest] = {}

    def look(self, device: str) -> RootVolume:
        return parse(self.devices.get(device, bytes(SECTOR)), self.size)

    def begin(self, device: str, container: ContainerId) -> None:
        self.devices[device] = copying(container)

    def copy(self, device: str, container: ContainerId, image: Image, image_path: str) -> None:
        self._refuse_unless_begun(device, container)
        self.images[device] = image.digest

    def half_copy(self, device: str, container: ContainerId, image: Image, image_path: str) -> None:
        self._refuse_unless_begun(device, container)
        self.images.pop(device, None)

    def seal(self, device: str, container: ContainerId, image: ImageDigest) -> None:
        self._refuse_unless_begun(device, container)
        self.devices[device] = header(image, container)

    def keep_places(self, device: str, places: Places) -> None:
        self.devices[device] = with_places(self.devices[device], places)

    def disk(self, device: str) -> Disk:
        room = (self.size - DATA_AT) // SECTOR * SECTOR
        return Disk(device, DiskFormat.RAW, "root", is_device=True, data_at=DATA_AT, data_bytes=room)

    def _refuse_unless_begun(self, device: str, container: ContainerId) -> None:
        if self.devices.get(device) != copying(container):
            raise WrongState(f"something else wrote to the volume {device} meanwhile")


class FakeGuestSeeds:
    """Implements `virtshim.seed.ports.GuestSeeds`; writes into the directories of the disks."""

    def __init__(self, disks: FakeRootDisks) -> None:
        self.requests: dict[ContainerId, SeedRequest] = {}
        self.ignition: dict[ContainerId, str] = {}
        self.sysprep: dict[ContainerId, dict[str, bytes]] = {}
        self._disks = disks

    def create(self, request: SeedRequest) -> Disk:
        self.requests[request.container] = request
        self._disks.directories.setdefault(request.container, set()).add("seed.iso")
        return Disk(f"/containers/{request.container}/seed.iso", DiskFormat.RAW, "seed", readonly=True, cdrom=True)

    def write_ignition(self, container: ContainerId, text: str) -> str:
        self._disks.directories[container].add("ignition.json")
        self.ignition[container] = text
        return f"/containers/{container}/ignition.json"

    def write_sysprep(self, container: ContainerId, files: Mapping[str, bytes]) -> str:
        self._disks.directories[container].add("sysprep.iso")
        self.sysprep[container] = dict(files)
        return f"/containers/{container}/sysprep.iso"
