"""One node for tests: the real services over real records in SQLite; everything outside is a fake behind a journal."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fakes.statements  # noqa: F401 (databases opened from now on share their compiled statements)
from fakes.archives import FakeArchives
from fakes.boot_output import FakeBootOutput
from fakes.cgroups import FakeVmCgroups
from fakes.clock import FakeClock
from fakes.cluster import FakeClusterObjects, FakePodEvents
from fakes.consoles import FakeConsoles, FakeEntrypointLogs
from fakes.devices import FakeDeviceDrivers, FakeDeviceErrors, FakeDevices
from fakes.disks import (
    FakeContainersRoom,
    FakeDiskPlaces,
    FakeEmptyDisks,
    FakeGuestSeeds,
    FakeKernelFiles,
    FakeRecordCopies,
    FakeRootDisks,
    FakeRootVolumes,
)
from fakes.guests import FakeEntrypointListeners, FakeGuests, FakeTerminationFiles
from fakes.images import FakeImageFiles
from fakes.journal import Journal, watched
from fakes.kubelet_volumes import FakeKubeletVolumes
from fakes.memory_streams import FakeMemoryStreams
from fakes.networks import FakePodNetworks
from fakes.readings import FakeReadings
from fakes.resizing import FakeResizing
from fakes.screenshots import FakeScreenshots
from fakes.shares import FakeVmShares
from fakes.streaming import FakeStreaming
from fakes.template_vms import FakeTemplateVms, TemplateFilesBesideFakes
from fakes.vms import FakeVms
from fakes.volume_disks import FakeVolumeDisks

from virtshim.app.adapters import (
    Adapters,
    DeviceParts,
    FileParts,
    GuestParts,
    NetworkParts,
    VmParts,
    VolumeParts,
)
from virtshim.app.assembly import App, wire
from virtshim.config.settings import Paths, Settings
from virtshim.images.service import stored_images
from virtshim.model.container import Container, ContainerConfig, ContainerName
from virtshim.model.deadline import Deadline
from virtshim.model.hardware import Firmware, FirmwareFiles
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.layout import Layout
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig, pod_hash
from virtshim.model.sizing import NodeHardware
from virtshim.moves.files import SavedVmFiles
from virtshim.moves.fingerprints import Fingerprint
from virtshim.moves.ports import SavedVms
from virtshim.peers.certificates import PeerFiles
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import Peers
from virtshim.store.copies import ImageNoteFiles
from virtshim.store.records import SqliteRecords
from virtshim.system.live import Live
from virtshim.vm.ports import VmControl, VmPausing

IMAGE = "registry.test/vm/guest:1"
# A fixed size, so that no test depends on the memory of its machine.
NODE_MEMORY = 1 << 46
LOG_DIRECTORY = "/var/log/pods/default_web_uid"


@functools.cache
def _empty_database() -> bytes:
    """A migrated database without rows, cached: copying it is fast."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "state.db")
        SqliteRecords(str(path)).close()
        return path.read_bytes()


def _watched_records(records: SqliteRecords, journal: Journal) -> SqliteRecords:
    """The same records, with their writes in the journal."""
    silent = ("get", "all", "on_change")
    view = copy.copy(records)
    view.sandboxes = watched("records.sandboxes", records.sandboxes, journal, silent)
    view.containers = watched("records.containers", records.containers, journal, silent)
    view.images = watched("records.images", records.images, journal, silent)
    view.borrowed = watched("records.borrowed", records.borrowed, journal, silent)
    view.device_conditions = watched("records.device_conditions", records.device_conditions, journal, silent)
    return view


@dataclass
class Outside:
    """The outside world, which exists whether or not a daemon runs."""

    clock: FakeClock = field(default_factory=FakeClock)
    networks: FakePodNetworks = field(default_factory=FakePodNetworks)
    cgroups: FakeVmCgroups = field(default_factory=FakeVmCgroups)
    shares: FakeVmShares = field(default_factory=FakeVmShares)
    kubelet_volumes: FakeKubeletVolumes = field(default_factory=FakeKubeletVolumes)
    volume_disks: FakeVolumeDisks = field(default_factory=FakeVolumeDisks)
    files: FakeImageFiles = field(default_factory=FakeImageFiles)
    kernels: FakeKernelFiles = field(default_factory=FakeKernelFiles)
    disks: FakeRootDisks = field(default_factory=FakeRootDisks)
    root_volumes: FakeRootVolumes = field(default_factory=FakeRootVolumes)
    archives: FakeArchives = field(default_factory=FakeArchives)
    cluster: FakeClusterObjects = field(default_factory=FakeClusterObjects)
    pod_events: FakePodEvents = field(default_factory=FakePodEvents)
    devices: FakeDevices = field(default_factory=FakeDevices)
    device_errors: FakeDeviceErrors = field(default_factory=FakeDeviceErrors)
    drivers: FakeDeviceDrivers = field(default_factory=FakeDeviceDrivers)
    consoles: FakeConsoles = field(default_factory=FakeConsoles)
    boot_output: FakeBootOutput = field(default_factory=FakeBootOutput)
    entrypoint_logs: FakeEntrypointLogs = field(default_factory=FakeEntrypointLogs)
    streaming: FakeStreaming = field(default_factory=FakeStreaming)
    entrypoint_listeners: FakeEntrypointListeners = field(default_factory=FakeEntrypointListeners)
    termination_files: FakeTerminationFiles = field(default_factory=FakeTerminationFiles)
    guests: FakeGuests = field(default_factory=FakeGuests)
    journal: Journal = field(default_factory=Journal)
    pausing: VmPausing | None = None  # the VMs, unless a test says otherwise
    control: VmControl | None = None  # the same
    peers: Peers = field(default_factory=lambda: PeerClient(PeerFiles("", "", ""), Live({})))
    screenshots: FakeScreenshots = field(default_factory=FakeScreenshots)
    # How often something beside a guest wrote to its disk, by the disk's path in the pod.
    written: dict[str, int] = field(default_factory=dict)
    # Puts real parts in the place of some of the fakes.
    dressed: Callable[[Adapters, Layout], Adapters] = lambda adapters, _: adapters

    def __post_init__(self) -> None:
        self.vms = FakeVms(self.clock)
        self.vms.variables = self.disks.variables
        self.vms.cgroups = self.cgroups
        self.memory_streams = FakeMemoryStreams(self.vms)
        self.template_vms = FakeTemplateVms(self.vms)
        self.readings = FakeReadings(self.vms, self.clock.now_ns)
        self.resizing = FakeResizing(self.vms)
        self.seeds = FakeGuestSeeds(self.disks)
        self.copies = FakeRecordCopies(self.disks)


class _SavedVmFiles(SavedVmFiles):
    """The real files, beside disks that are fakes. `written`: how often a disk was written to, by its path in the pod."""

    def __init__(self, layout: Layout, written: Mapping[str, int]) -> None:
        super().__init__(layout)
        self._written = written

    def fingerprints(
        self, container: Container, seconds: float, leave_off: threading.Event
    ) -> Mapping[str, Fingerprint]:
        paths = ["", *(block.container_path for block in container.granted.blocks)]
        return {path: self._fingerprint(path) for path in paths}

    def root_fingerprint(self, disk: str) -> Fingerprint:
        return self._fingerprint("")

    def _fingerprint(self, path: str) -> Fingerprint:
        return Fingerprint(1 << 30, "", self._written.get(path, 0), "")


class World:
    """A daemon over an `Outside`. `restarted` returns the next daemon over the same outside world; the old daemon must
    not be used then."""

    def __init__(self, directory: Path, outside: Outside | None = None, **sections: Any) -> None:
        self.directory = directory
        self.outside = outside or Outside()
        self.sections = sections
        self.settings = Settings(paths=Paths(state_dir=str(directory), run_dir="/run/virtshim"), **sections)
        database = directory / "state.db"
        if not database.exists():
            database.write_bytes(_empty_database())
            # As long as a real reserve but sparse, because there are thousands of these directories.
            with Path(f"{database}.reserve").open("wb") as reserve:
                reserve.truncate(5 << 20)
        self.records = SqliteRecords(str(database))
        self.journal = self.outside.journal
        adapters = self.outside.dressed(self._adapters(), self.settings.layout())
        self.app: App = wire(self.settings, adapters)
        sizes = self.app.live.sizes
        sizes.now = dataclasses.replace(sizes.now, memory=NODE_MEMORY)
        self.do = self.app.services
        self.images = self.app.images
        self.outside.vms.on_power_event(self.app.events.changed)

    def _firmware_of(self, kind: Firmware) -> FirmwareFiles | None:
        """The hypervisor's firmware, looked up on demand: real libvirt, which may replace the fake, has none."""
        return self.outside.vms.firmware_of(kind)

    def _adapters(self) -> Adapters:
        out, journal = self.outside, self.journal
        return Adapters(
            records=_watched_records(self.records, journal),
            clock=out.clock,
            vm=self._vm(),
            guest=GuestParts(
                agents=out.guests,
                operations=watched("guest_operations", out.guests, journal),
                entrypoint_listeners=out.entrypoint_listeners,
                entrypoint_logs=out.entrypoint_logs,
                consoles=watched("consoles", out.consoles, journal, ("on_news",)),
                boot_output=out.boot_output,
                termination_files=out.termination_files,
            ),
            files=self._files(),
            volumes=VolumeParts(
                shares=watched("shares", out.shares, journal),
                kubelet=out.kubelet_volumes,
                disks=out.volume_disks,
            ),
            devices=DeviceParts(
                host=watched("devices", out.devices, journal),
                drivers=watched("drivers", out.drivers, journal),
                errors=out.device_errors,
            ),
            network=NetworkParts(
                pods=watched("networks", out.networks, journal, ("trouble",)),
                streaming=out.streaming,
                cluster=out.cluster,
                pod_events=watched("pod_events", out.pod_events, journal),
                peers=out.peers,
            ),
        )

    def _vm(self) -> VmParts:
        out, journal = self.outside, self.journal
        out.template_vms.containers = self.settings.layout().containers
        return VmParts(
            hypervisor=watched("vms", out.vms, journal, ("watching", "on_power_event", "trouble")),
            inventory=watched("vms", out.vms, journal),
            readings=out.readings,
            resizing=watched("resizing", out.resizing, journal, ("memory_in_use",)),
            unplugging=watched("vms", out.vms, journal),
            pausing=watched("vms", out.pausing or out.vms, journal),
            streams=watched("streams", out.memory_streams, journal),
            control=watched("vms", out.control or out.vms, journal, ("on_agent", "look_for_agent")),
            cgroups=watched("cgroups", out.cgroups, journal),
            screenshots=out.screenshots,
            node_hardware=NodeHardware(
                lambda: out.vms.machine_type, self._firmware_of, lambda: out.vms.host_nodes, lambda: out.vms.free_memory
            ),
            templates=watched("template_vms", out.template_vms, journal, ("qemu", "definition")),
        )

    def _files(self) -> FileParts:
        out, journal = self.outside, self.journal
        return FileParts(
            images=watched("files", out.files, journal, ("path", "format_of")),
            image_notes=ImageNoteFiles(f"{self.settings.layout().images}/records"),
            disks=watched("disks", out.disks, journal),
            empty_disks=watched("empty_disks", FakeEmptyDisks(out.disks), journal),
            root_volumes=watched("root_volumes", out.root_volumes, journal, ("look",)),
            disk_places=watched("disk_places", FakeDiskPlaces(out.disks), journal, ("read", "firmware", "tpm_owners")),
            kernels=watched("kernels", out.kernels, journal, ("is_there",)),
            seeds=watched("seeds", out.seeds, journal),
            copies=watched("copies", out.copies, journal),
            vms=self._saved_vms(),
            archives=watched("archives", out.archives, journal),
            containers_room=FakeContainersRoom(out.disks),
            templates=watched(
                "template_files",
                TemplateFilesBesideFakes(self.settings.layout(), str(self.directory)),
                journal,
                ("has_own_disk_aside",),
            ),
        )

    def _saved_vms(self) -> SavedVms:
        """The real files, which survive a restart."""
        layout = self.settings.layout()
        Path(layout.vms).mkdir(exist_ok=True)
        silent = ("get", "all", "memory", "disk_bytes", "free_bytes")
        return watched("saved_vms", _SavedVmFiles(layout, self.outside.written), self.journal, silent)

    def close(self) -> None:
        self.app.close()
        self.records.close()

    def damage_database(self) -> None:
        """Damages the database while the daemon runs, and lets the daemon check it. The daemon remembers what it has
        written."""
        database = self.directory / "state.db"
        Path(f"{database}-wal").unlink(missing_ok=True)
        database.write_bytes(b"no database any more" * 1000)
        self.app.adapters.records.check()

    def restarted(self, *, rebooted: bool = False) -> World:
        """The next daemon, without the old daemon's memory. Recovery is up to the caller."""
        self.close()
        self.outside.consoles.forget()
        self.outside.entrypoint_logs.forget()
        self.outside.vms.forget()
        self.journal.revive()
        if rebooted:
            self.outside.vms.reboot_host()
            self.outside.networks.lose()
            self.outside.cgroups.cgroups.clear()
            self.outside.shares.shares.clear()
        return World(self.directory, self.outside, **self.sections)

    def recovered(self, *, rebooted: bool = False) -> World:
        """The next daemon after recovery."""
        world = self.restarted(rebooted=rebooted)
        world.app.recovery.recover.run(rebooted=rebooted)
        return world

    # --- use cases with everything that does not matter filled in

    def deadline(self, seconds: float = 60.0) -> Deadline:
        return Deadline.after(self.outside.clock.monotonic(), seconds)

    def pull(self, name: str = IMAGE, content: bytes = b"a disk") -> ImageDigest:
        if name not in self.outside.files.published:
            self.outside.files.publish(name, content)
        return self.images.pull(name, None, threading.Event()).digest

    def run(self, pod: str = "web", attempt: int = 0, config: SandboxConfig | None = None) -> SandboxId:
        return self.do.run_sandbox.run(pod_key(pod, attempt), config or sandbox_config(), self.deadline())

    def create(
        self, sandbox: SandboxId, name: str = "vm", attempt: int = 0, config: ContainerConfig | None = None
    ) -> ContainerId:
        return self.do.create_container.create(
            sandbox, ContainerName(name, attempt), config or container_config(), self.deadline()
        )

    def start(self, container: ContainerId) -> None:
        self.do.start_container.start(self.container(container))

    def stop(self, container: ContainerId, grace: float = 0.0) -> None:
        self.do.stop_container.stop(self.container(container), grace)

    def remove(self, container: ContainerId) -> None:
        self.do.remove_container.remove(self.container(container))

    def stop_sandbox(self, sandbox: SandboxId) -> None:
        self.do.stop_sandbox.stop(self.sandbox(sandbox), self.deadline())

    def remove_sandbox(self, sandbox: SandboxId) -> None:
        self.do.remove_sandbox.remove(self.sandbox(sandbox), self.deadline())

    def running(self, pod: str = "web") -> tuple[SandboxId, ContainerId]:
        """Creates a pod with a running VM."""
        if not self.records.images.all():
            self.pull()
        sandbox = self.run(pod)
        container = self.create(sandbox)
        self.start(container)
        return sandbox, container

    def deliver(self) -> None:
        """Delivers all power events so far and waits for their effects."""
        self.outside.vms.deliver()
        for container in self.records.containers.all():
            self.app.devices.releases.try_to_finish(container.id)

    # --- what is there

    def sandbox(self, sandbox: SandboxId) -> Sandbox:
        found = self.records.sandboxes.get(sandbox)
        assert found is not None, f"no record of sandbox {sandbox}"
        return found

    def container(self, container: ContainerId) -> Container:
        found = self.records.containers.get(container)
        assert found is not None, f"no record of container {container}"
        return found

    def domain(self, container: ContainerId) -> uuid.UUID:
        return self.container(container).domain_uuid

    def everything(self) -> list[str]:
        """All existing objects except images, records included. Empty when all pods are removed."""
        out = self.outside
        return [
            *(f"sandbox record {s.id.short} ({s.phase.value})" for s in self.records.sandboxes.all()),
            *(f"container record {c.id.short} ({c.phase.value})" for c in self.records.containers.all()),
            *(f"network of {s.short}" for s in out.networks.networks),
            *(f"address of {s.short}" for s in out.networks.leases),
            *(f"VM {domain.name}" for domain in out.vms.owned()),
            *(f"cgroup {path}" for path in out.cgroups.cgroups),
            *(f"volumes of {name}" for name in out.shares.shares),
            *(f"directory of {c.short}" for c in out.disks.directories),
            *(f"pod disk {name}" for name in out.disks.pod_disks),
            *(f"unfinished checkpoint {path}" for path in out.archives.directories),
            *(f"console of {c.short}" for c in out.consoles.following),
        ]

    def leftovers(self) -> list[str]:
        """External objects that no record accounts for, and image files that nothing needs."""
        sandboxes = {s.id for s in self.records.sandboxes.all()}
        containers = {c.id for c in self.records.containers.all()}
        needed = {digest for i in self.records.images.all() for digest in (i.digest, i.tree)}
        needed |= {digest for c in self.records.containers.all() for digest in stored_images(c)}
        needed |= {digest for s in self.records.sandboxes.all() for digest in s.root_disks.values()}
        out = self.outside
        return [
            *(f"network of {s.short}" for s in out.networks.networks if s not in sandboxes),
            *(f"address of {s.short}" for s in out.networks.leases if s not in sandboxes),
            *(f"VM {domain.name}" for domain in out.vms.owned() if domain.container_id not in containers),
            *(f"cgroup {path}" for path, group in out.cgroups.cgroups.items() if group.container not in containers),
            *(f"directory of {c.short}" for c in out.disks.directories if c not in containers),
            *(
                f"disks of pod {pod}"
                for pod in out.disks.pods_with_disks() - {pod_hash(s.key) for s in self.records.sandboxes.all()}
            ),
            *(f"console of {c.short}" for c in out.consoles.following if c not in containers),
            *(f"image file {d}" for d in out.files.stored() if d not in needed),
            *(f"unfinished download of {name}" for name in out.files.unfinished),
        ]


def pod_key(pod: str = "web", attempt: int = 0) -> PodKey:
    return PodKey("default", pod, f"uid-of-{pod}", attempt)


def sandbox_config(**changes: Any) -> SandboxConfig:
    return SandboxConfig(**{"hostname": "web", "log_directory": LOG_DIRECTORY} | changes)


def container_config(**changes: Any) -> ContainerConfig:
    return ContainerConfig(**{"image": IMAGE, "user_image": IMAGE, "log_path": "vm/0.log"} | changes)
