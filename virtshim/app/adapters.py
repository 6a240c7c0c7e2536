"""Which adapter implements which port."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from virtshim.attach.console import Attachments, ConsoleAttach, ConsoleSizes
from virtshim.attach.entrypoint import EntrypointAttach
from virtshim.attach.screen import ScreenSockets, VncScreenshots
from virtshim.config.settings import Settings
from virtshim.containers.exec import AgentPort, PlugExecPort
from virtshim.devices.attachable import AttachChecker
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.driver_client import DeviceDriverClient
from virtshim.devices.function_health import AerCounts
from virtshim.devices.host_files import HostFiles
from virtshim.devices.ports import DeviceDrivers, DeviceErrorCounts, Devices
from virtshim.devices.resolve import NodeDevices, device_rules
from virtshim.disks import container_files
from virtshim.disks.checkpoint_archives import CheckpointArchives
from virtshim.disks.container_files import EmptyDiskStore, KernelFileStore, TerminationFileStore
from virtshim.disks.disk_places import DiskPlacesFiles
from virtshim.disks.ports import ContainersRoom, DiskPlaces, EmptyDiskFiles, KernelFiles, RootDisks, RootVolumes
from virtshim.disks.root_disks import RootDiskStore
from virtshim.disks.root_volumes import RootVolumeStore
from virtshim.guest.agents import AgentClients
from virtshim.guest.ports import EntrypointListeners, GuestAgents, GuestOperations, TerminationFiles
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.policy import DiskPath, Rule
from virtshim.images.ports import ImageNotes
from virtshim.images.verify import qemu_img_copy_to_device
from virtshim.kubeapi.events import KubeEvents
from virtshim.kubeapi.objects import KubeObjects
from virtshim.kubeapi.ports import ClusterObjects, PodEvents
from virtshim.kubelet.pod_resources import PodResourcesClient
from virtshim.logs.entrypoint_log import EntrypointLogFiles, RawBootOutput
from virtshim.logs.follower import ConsoleLogs
from virtshim.logs.ports import BootOutput, EntrypointLogs, WatchedConsoles
from virtshim.model.errors import Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout, share_dir
from virtshim.model.sizing import NodeHardware
from virtshim.moves.files import SavedVmFiles
from virtshim.moves.ports import SavedVms
from virtshim.peers.certificates import PeerFiles
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink, Peers
from virtshim.peers.server import PeerServer, by_operation
from virtshim.pods.cgroups import VmCgroupClient
from virtshim.pods.networks import PodNetworkClient
from virtshim.pods.ports import VmCgroups
from virtshim.pods.tapmanager_connection import SHARES, TapmanagerConnection
from virtshim.seed.iso import SeedStore
from virtshim.seed.ports import GuestSeeds
from virtshim.store.copies import ImageNoteFiles, RecordCopyFiles
from virtshim.store.opening import open_records
from virtshim.store.ports import KnownImageFiles, KnownNetworks, RecordCopies, VmInventory
from virtshim.store.records import SqliteRecords
from virtshim.streaming.ports import Streaming
from virtshim.streaming.room import StreamLimits
from virtshim.streaming.server import StreamingServer
from virtshim.system import machine
from virtshim.system.clock import Clock, SystemClock
from virtshim.system.live import Live
from virtshim.templates.files import TemplateFileStore
from virtshim.templates.ports import TemplateFiles, TemplateVms
from virtshim.vm import qemu_process
from virtshim.vm.connection import Connection
from virtshim.vm.control import LibvirtControl, LibvirtPorts, LibvirtUnplugging
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.driver import LibvirtHypervisor
from virtshim.vm.firmware import first_uefi, tpm_state_directory
from virtshim.vm.inventory import LibvirtInventory
from virtshim.vm.memory_streams import LibvirtMemoryStreams
from virtshim.vm.node_profile import group_of_vms, libvirt_uri, node_profile, own_groups
from virtshim.vm.pause import LibvirtPausing
from virtshim.vm.ports import (
    CheckpointFiles,
    Hypervisor,
    MemoryStreams,
    Screenshots,
    VmControl,
    VmPausing,
    VmReadings,
    VmResizing,
    VmUnplugging,
)
from virtshim.vm.qemu_process import pid_directory
from virtshim.vm.resize import LibvirtResizing
from virtshim.vm.statistics import BulkStats, LibvirtReadings, VmStatistics
from virtshim.vm.template_vms import LibvirtTemplateVms
from virtshim.volumes.disks_on_node import VolumeDisksOnNode
from virtshim.volumes.kubelet_volumes import KubeletVolumeFiles
from virtshim.volumes.ports import KubeletVolumes, VmShares, VolumeDiskFiles
from virtshim.volumes.share_client import VmShareClient

# Seconds that libvirt and tapmanager get to answer at start.
_START_LIMIT = 90.0


@dataclass(frozen=True, slots=True)
class VmParts:
    """The adapters that run, limit, read and change VMs."""

    hypervisor: Hypervisor
    inventory: VmInventory
    readings: VmReadings
    resizing: VmResizing
    unplugging: VmUnplugging
    pausing: VmPausing
    streams: MemoryStreams
    control: VmControl
    cgroups: VmCgroups
    screenshots: Screenshots
    node_hardware: NodeHardware
    templates: TemplateVms


@dataclass(frozen=True, slots=True)
class GuestParts:
    """The adapters for the guest's agent, its output and its logs."""

    agents: GuestAgents
    operations: GuestOperations
    entrypoint_listeners: EntrypointListeners
    entrypoint_logs: EntrypointLogs
    consoles: WatchedConsoles
    boot_output: BootOutput
    termination_files: TerminationFiles


@dataclass(frozen=True, slots=True)
class FileParts:
    """The adapters for images, disks and seeds on the node, and for the copies of records beside them."""

    images: KnownImageFiles
    image_notes: ImageNotes
    disks: RootDisks
    empty_disks: EmptyDiskFiles
    root_volumes: RootVolumes
    disk_places: DiskPlaces
    vms: SavedVms
    kernels: KernelFiles
    seeds: GuestSeeds
    copies: RecordCopies
    archives: CheckpointFiles
    containers_room: ContainersRoom
    templates: TemplateFiles


@dataclass(frozen=True, slots=True)
class VolumeParts:
    """The adapters for volumes that kubelet has made for pods."""

    shares: VmShares
    kubelet: KubeletVolumes
    disks: VolumeDiskFiles


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """The adapters for the node's devices, their drivers and their error counts."""

    host: Devices
    drivers: DeviceDrivers
    errors: DeviceErrorCounts


@dataclass(frozen=True, slots=True)
class NetworkParts:
    """The adapters for pods' networks, streaming clients, the API server and other nodes."""

    pods: KnownNetworks
    streaming: Streaming
    cluster: ClusterObjects
    pod_events: PodEvents
    peers: Peers


@dataclass(frozen=True, slots=True)
class Adapters:
    """All adapters, grouped by subject."""

    records: SqliteRecords
    clock: Clock
    vm: VmParts
    guest: GuestParts
    files: FileParts
    volumes: VolumeParts
    devices: DeviceParts
    network: NetworkParts


@dataclass(frozen=True, slots=True)
class RealParts:
    """The adapters of a serving node, with what must start before the use cases may run."""

    adapters: Adapters
    attaches: Attachments
    screens: ScreenSockets
    connection: Connection
    networks: PodNetworkClient
    server: StreamingServer
    images: ImageFileStore
    cluster: KubeObjects
    pod_events: KubeEvents
    peer_addresses: Live[Mapping[str, str]]

    def use(self, settings: Settings) -> None:
        """Applies the settings that these adapters can change while they work."""
        self.images.change(image_settings(settings))
        self.server.allow(stream_limits(settings))
        self.cluster.use(settings.kubernetes.kubeconfig)
        self.pod_events.use(settings.kubernetes.kubeconfig)
        self.peer_addresses.now = settings.peers.addresses

    def wait(self) -> None:
        """Waits until libvirt and tapmanager answer, because they may still be starting. Raises ShimError if they do
        not."""
        if not self.connection.wait_open(_START_LIMIT):
            raise Unavailable(self.connection.trouble())
        self.networks.await_answer(self.adapters.clock, _START_LIMIT)


def _guests(
    layout: Layout, records: SqliteRecords, ports: LibvirtPorts, control: LibvirtControl, stack: contextlib.ExitStack
) -> AgentClients:
    def answers(container: ContainerId) -> None:
        if (found := records.containers.get(container)) is not None:
            control.agent_answers(found.domain_uuid)

    plug, is_open = PlugExecPort(records, ports, layout).plug, AgentPort(records, ports).is_open

    def known_as(container: ContainerId) -> ContainerId:
        found = records.containers.get(container)
        return container if found is None else found.guest_id

    return stack.enter_context(contextlib.closing(AgentClients(layout, plug, is_open, answers, known_as=known_as)))


def _libvirt(
    settings: Settings, records: SqliteRecords, stack: contextlib.ExitStack
) -> tuple[Connection, NodeProfile, LibvirtHypervisor, LibvirtControl]:
    """Connects to libvirt. The objects that must learn of each connection are made first."""
    uri = libvirt_uri(settings)
    connection = Connection(uri, group_of_vms(settings))
    stack.callback(connection.close)
    profile = node_profile(settings, records.node_id())
    hypervisor = LibvirtHypervisor(connection, profile, uri)
    stack.callback(hypervisor.close)
    control = stack.enter_context(contextlib.closing(LibvirtControl(connection, profile)))
    control.on_agent(hypervisor.agents.arrived)
    connection.start()
    return connection, profile, hypervisor, control


def real_parts(settings: Settings, stack: contextlib.ExitStack) -> RealParts:
    """Makes the adapters of a real node. `stack` closes them; VMs and pod networks stay."""
    layout, clock = settings.layout(), SystemClock()
    _make_directories(layout)
    records = stack.enter_context(contextlib.closing(open_records(layout.database)))
    connection, profile, hypervisor, control = _libvirt(settings, records, stack)
    consoles, entrypoint_logs = _logs(layout, clock, stack)
    guests = _guests(layout, records, LibvirtPorts(connection, profile), control, stack)
    tapmanager = TapmanagerConnection(settings.tapmanager.socket)
    networks = PodNetworkClient(tapmanager)
    sizes = stack.enter_context(contextlib.closing(ConsoleSizes(guests.operations.resize_console)))
    entrypoint_attach = stack.enter_context(contextlib.closing(EntrypointAttach(guests.entrypoint_input)))
    screens = ScreenSockets(layout, partial(_qemu_of, records, pid_directory(settings.libvirt.uri)))
    streaming = streaming_server(settings, clock)
    images = ImageFileStore(layout.images, image_settings(settings), partial(_readers, connection))
    stack.callback(streaming.stop)
    cluster, events = _cluster(settings, clock, stack)
    addresses: Live[Mapping[str, str]] = Live(settings.peers.addresses)
    adapters = Adapters(
        records=records,
        clock=clock,
        vm=VmParts(
            hypervisor=hypervisor,
            inventory=LibvirtInventory(connection, profile),
            readings=_readings(settings, connection, hypervisor),
            resizing=LibvirtResizing(connection, profile),
            unplugging=LibvirtUnplugging(connection, profile, hypervisor.watching),
            pausing=LibvirtPausing(connection, profile),
            streams=LibvirtMemoryStreams(connection, profile),
            control=control,
            cgroups=VmCgroupClient(tapmanager, own=own_groups(settings)),
            screenshots=VncScreenshots(screens),
            node_hardware=_node_hardware(hypervisor),
            templates=LibvirtTemplateVms(hypervisor, layout, settings.libvirt.emulator),
        ),
        guest=GuestParts(
            agents=guests,
            operations=guests.operations,
            entrypoint_listeners=entrypoint_attach,
            entrypoint_logs=entrypoint_logs,
            consoles=consoles,
            boot_output=RawBootOutput(layout),
            termination_files=TerminationFileStore(),
        ),
        files=_files(settings, images),
        volumes=_volumes(settings, connection, stack),
        devices=_devices(settings, tapmanager, stack),
        network=NetworkParts(networks, streaming, cluster, events, PeerClient(peer_files(settings), addresses)),
    )
    return RealParts(
        adapters=adapters,
        attaches=Attachments(ConsoleAttach(layout, sizes), entrypoint_attach),
        screens=screens,
        connection=connection,
        networks=networks,
        server=streaming,
        images=images,
        cluster=cluster,
        pod_events=events,
        peer_addresses=addresses,
    )


def _node_hardware(hypervisor: LibvirtHypervisor) -> NodeHardware:
    return NodeHardware(lambda: hypervisor.machine_type, first_uefi, machine.numa_nodes, machine.available_memory)


def _devices(settings: Settings, tapmanager: TapmanagerConnection, stack: contextlib.ExitStack) -> DeviceParts:
    return DeviceParts(
        host=node_devices(settings, stack), drivers=DeviceDriverClient(tapmanager), errors=AerCounts(HostFiles())
    )


def _files(settings: Settings, images: ImageFileStore) -> FileParts:
    layout = settings.layout()
    return FileParts(
        images=images,
        image_notes=ImageNoteFiles(f"{layout.images}/records"),
        disks=RootDiskStore(layout, tpm_state_directory(pid_directory(settings.libvirt.uri))),
        empty_disks=EmptyDiskStore(layout),
        root_volumes=RootVolumeStore(qemu_img_copy_to_device),
        disk_places=DiskPlacesFiles(layout),
        vms=SavedVmFiles(layout),
        kernels=KernelFileStore(),
        seeds=SeedStore(layout),
        copies=RecordCopyFiles(layout),
        archives=CheckpointArchives(),
        containers_room=container_files.ContainersRoom(layout),
        templates=TemplateFileStore(layout),
    )


def _logs(layout: Layout, clock: Clock, stack: contextlib.ExitStack) -> tuple[ConsoleLogs, EntrypointLogFiles]:
    consoles, entrypoints = ConsoleLogs(layout, clock), EntrypointLogFiles(layout, clock)
    for logs in (consoles, entrypoints):
        stack.callback(logs.close)
    return consoles, entrypoints


def _cluster(settings: Settings, clock: Clock, stack: contextlib.ExitStack) -> tuple[KubeObjects, KubeEvents]:
    kubeconfig = settings.kubernetes.kubeconfig
    return KubeObjects(kubeconfig), stack.enter_context(contextlib.closing(KubeEvents(kubeconfig, clock)))


def _make_directories(layout: Layout) -> None:
    """Makes the directories searchable, so that the QEMU user reaches its disks, but not readable."""
    for directory in (layout.state_dir, layout.containers, layout.images, layout.vms, layout.run_dir, layout.sockets):
        os.makedirs(directory, mode=0o711, exist_ok=True)


def _readers(connection: Connection) -> int | None:
    qemu = connection.qemu_ids()
    return None if qemu is None else qemu.readers


def _readings(settings: Settings, connection: Connection, hypervisor: LibvirtHypervisor) -> LibvirtReadings:
    bulk = BulkStats(VmStatistics(connection, hypervisor.busy).read)
    return LibvirtReadings(bulk, pid_directory(settings.libvirt.uri))


def _volumes(settings: Settings, connection: Connection, stack: contextlib.ExitStack) -> VolumeParts:
    def qemu_user() -> int:
        qemu = connection.qemu_ids()
        return 0 if qemu is None else qemu.uid

    program = TapmanagerConnection(settings.shares.socket, SHARES)
    return VolumeParts(
        shares=VmShareClient(program, share_dir(settings.layout()), qemu_user),
        kubelet=stack.enter_context(contextlib.closing(KubeletVolumeFiles())),
        disks=VolumeDisksOnNode(),
    )


def _qemu_of(records: SqliteRecords, directory: str, container: ContainerId) -> int | None:
    """The process id of the container's QEMU, from libvirt's pid file."""
    found = records.containers.get(container)
    return None if found is None else qemu_process.find(directory, found.domain_name, found.domain_uuid)


def node_devices(settings: Settings, stack: contextlib.ExitStack) -> NodeDevices:
    """Makes the resolver of the node's devices. It connects to kubelet at the first request; `stack` closes the
    connection."""
    files, socket = HostFiles(), settings.devices.pod_resources_socket
    kubelet = PodResourcesClient(socket) if socket else None
    if kubelet is not None:
        stack.callback(kubelet.close)
    cdi = CdiDirectories(settings.devices.cdi_dirs, files)
    return NodeDevices(files, cdi, kubelet, AttachChecker(files, device_rules(settings, files)))


def streaming_server(settings: Settings, clock: Clock) -> StreamingServer:
    own = settings.streaming
    return StreamingServer(own.address, own.port, clock, limits=stream_limits(settings))


def stream_limits(settings: Settings) -> StreamLimits:
    own = settings.streaming
    return StreamLimits(
        pod_sessions=own.pod_sessions,
        sessions=own.sessions,
        pod_connections=own.pod_connections,
        pod_bytes=own.pod_bytes,
    )


def peer_files(settings: Settings) -> PeerFiles:
    own = settings.peers
    return PeerFiles(own.certificate, own.key, own.ca)


def peer_server(settings: Settings, handlers: Mapping[str, Callable[[PeerLink, dict[str, Any]], None]]) -> PeerServer:
    return PeerServer(settings.peers.listen, peer_files(settings), by_operation(handlers))


def image_settings(settings: Settings) -> ImageSettings:
    images = settings.images
    return ImageSettings(
        translations_dir=images.translations_dir,
        registry_hosts_dir=images.registry_hosts_dir,
        download_protocol=images.download_protocol,
        insecure_registries=images.insecure_registries,
        max_bytes=images.max_bytes,
        progress_timeout=images.progress_timeout,
        min_rate=images.min_rate,
        pull_timeout=images.pull_timeout,
        forbidden_networks=images.forbidden_networks,
        parser_user=images.parser_user,
        file_dirs=images.file_dirs,
        disk_paths=tuple(DiskPath(one.prefix, one.path) for one in images.disk_paths),
        policy=tuple(Rule(one.prefix, one.require, one.keys) for one in images.policy),
    )
