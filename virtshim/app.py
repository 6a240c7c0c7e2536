"""Composition root: the only place that knows which adapter implements which port."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from virtshim import machine
from virtshim.attach.attachments import Attachments
from virtshim.attach.console import ConsoleAttach
from virtshim.attach.console_size import ConsoleSizes
from virtshim.attach.entrypoint import CommandAttach
from virtshim.config import Settings
from virtshim.cri.admin import PeopleServicer
from virtshim.cri.images import ImageServicer
from virtshim.cri.runtime import RuntimeServicer, Services
from virtshim.cri.server import CriServer
from virtshim.crilog.entrypoint_log import CommandLogFiles
from virtshim.crilog.follower import ConsoleLogs
from virtshim.devices.error_counts import AerCounts
from virtshim.devices.host_files import HostFiles
from virtshim.disks.checkpoint_archives import CheckpointArchives
from virtshim.disks.root_disks import RootDiskStore
from virtshim.disks.termination_file import TerminationFileStore
from virtshim.domain.errors import Unavailable
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.guestagent.clients import AgentClients
from virtshim.guestinit.iso import SeedStore
from virtshim.hypervisor.connection import Connection
from virtshim.hypervisor.driver import LibvirtHypervisor
from virtshim.hypervisor.inventory import LibvirtCensus
from virtshim.hypervisor.pause import LibvirtStandstill
from virtshim.hypervisor.plugging import LibvirtPorts
from virtshim.hypervisor.qemu_process import pid_directory
from virtshim.hypervisor.resize import LibvirtResizing
from virtshim.hypervisor.stats.bulk import BulkStats, read_all
from virtshim.hypervisor.stats.readings import LibvirtReadings
from virtshim.hypervisor.unplugging import LibvirtUnplugging
from virtshim.images.filestore import ImageFileStore
from virtshim.lifecycle.checkpoint_container import CheckpointContainer
from virtshim.lifecycle.container_logs import Logs
from virtshim.lifecycle.create_container import CreateContainer
from virtshim.lifecycle.entrypoints import ContainerCommands
from virtshim.lifecycle.exec_ports import PlugPort
from virtshim.lifecycle.exec_sync import ExecCommand
from virtshim.lifecycle.guest_freeze import CareForGuests
from virtshim.lifecycle.images import ImageUse
from virtshim.lifecycle.record_exit import Exits
from virtshim.lifecycle.remove_container import RemoveContainer
from virtshim.lifecycle.remove_sandbox import RemoveSandbox
from virtshim.lifecycle.reopen_container_log import ReopenLog
from virtshim.lifecycle.run_sandbox import RunSandbox
from virtshim.lifecycle.start_container import StartContainer
from virtshim.lifecycle.stop_container import StopContainer
from virtshim.lifecycle.stop_sandbox import StopSandbox
from virtshim.lifecycle.termination_message import LastWords
from virtshim.lifecycle.update_container_resources import ResizeContainer
from virtshim.lifecycle.update_sandbox_resources import ResizeSandbox
from virtshim.lifecycle.vm_events import VmEvents
from virtshim.metrics.usage import Usage
from virtshim.passthrough.assembly import DeviceCare, DeviceRules, Outside, device_care
from virtshim.passthrough.inspection import FunctionFacts
from virtshim.ports.cgroups import VmGroups
from virtshim.ports.clock import Clock
from virtshim.ports.consoles import CommandLogs, Consoles
from virtshim.ports.devices import DeviceDrivers, DeviceErrorCounts, Devices
from virtshim.ports.disks import RootDisks
from virtshim.ports.guests import CommandHearers, GuestAgents, GuestCare, TerminationFiles
from virtshim.ports.hypervisor import Hypervisor, VmReadings, VmResizing, VmUnplugging
from virtshim.ports.pause import CheckpointFiles, Standstill
from virtshim.ports.recovery import KnownImageFiles, KnownNetworks, VmCensus
from virtshim.ports.seeds import GuestSeeds
from virtshim.ports.streaming import Streaming
from virtshim.primitives.clock import Stamps, SystemClock
from virtshim.primitives.inflight import Inflight, PodLocks
from virtshim.queries.container_events import Announcer
from virtshim.queries.node_status import NodeStatus
from virtshim.queries.record_changes import PodChanges
from virtshim.recovery.assembly import Recovery, recovery, workbench
from virtshim.recovery.repairs import Repairs, Workbench
from virtshim.recovery.watch_pods import WatchPods
from virtshim.store.opening import open_records
from virtshim.store.records import SqliteRecords
from virtshim.streaming.server import StreamingServer
from virtshim.tapclient.cgroups import VmGroupClient
from virtshim.tapclient.drivers import DeviceDriverClient
from virtshim.tapclient.networks import PodNetworkClient
from virtshim.wiring.devices import node_devices
from virtshim.wiring.hypervisor import libvirt_uri, node_profile, own_groups, systemd_cgroups
from virtshim.wiring.images import image_settings
from virtshim.wiring.sizes import sizes_of

# GetContainerEvents streams at once: each holds a thread of the calls' pool, of which they may have a quarter at most.
_MOST_LISTENERS = 16

# Seconds that a look which is under way gets when the daemon stops.
_THREAD_END = 5.0

# Seconds that libvirt and tapmanager get to answer at start.
_START_LIMIT = 90.0


@dataclass(frozen=True, slots=True)
class Adapters:
    """Everything outside, each behind its port."""

    records: SqliteRecords
    hypervisor: Hypervisor
    census: VmCensus
    readings: VmReadings
    resizing: VmResizing
    unplugging: VmUnplugging
    standstill: Standstill
    networks: KnownNetworks
    groups: VmGroups
    files: KnownImageFiles
    disks: RootDisks
    archives: CheckpointFiles
    devices: Devices
    drivers: DeviceDrivers
    device_errors: DeviceErrorCounts
    seeds: GuestSeeds
    consoles: Consoles
    command_logs: CommandLogs
    guests: GuestAgents
    care: GuestCare
    hearers: CommandHearers
    last_words: TerminationFiles
    streaming: Streaming
    clock: Clock


@dataclass(frozen=True, slots=True)
class App:
    """The wired product. `serve.py` orders its start and stop."""

    adapters: Adapters
    services: Services
    images: ImageUse
    recovery: Recovery
    events: VmEvents
    watch: WatchPods
    announcer: Announcer
    commands: ContainerCommands
    care: CareForGuests

    def server(self, settings: Settings) -> CriServer:
        # Abstract to the type checker: RPCs that are not defined are answered UNIMPLEMENTED at run time.
        runtime = RuntimeServicer(self.services, self.announcer)  # type: ignore[abstract]
        image = ImageServicer(self.images, settings.cri.runtime_handlers)
        people = PeopleServicer(self.adapters.records, self.adapters.care, self.adapters.streaming)
        return CriServer(settings.cri_socket, settings.cri.max_calls, runtime, image, people)

    def recovered(self) -> None:
        """Makes records and the world agree; remembers in which boot."""
        records = self.adapters.records
        boot = machine.boot_id()
        before = records.node_fact("boot")
        self.adapters.hypervisor.on_power_event(self.events.changed)  # first: what ends meanwhile must not be missed
        if before is None:  # new, or set aside and not recovered yet: VMs may be there all the same
            self.recovery.recover.run(rebooted=False, lost=True)
        else:
            self.recovery.recover.run(rebooted=before != boot)
        records.set_node_fact("boot", boot)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Pods are looked after inside the block, by threads of their own."""
        stopping = threading.Event()
        threads = [
            threading.Thread(target=run, args=(stopping,), name=name, daemon=True)
            for name, run in (("watch-pods", self.watch.run), ("reconcile", self.recovery.reconcile.run))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopping.set()
            for thread in threads:
                thread.join(_THREAD_END)


def wire(settings: Settings, adapters: Adapters) -> App:
    """Connects services to ports; nothing runs yet."""
    a = adapters
    locks = PodLocks()
    bench = workbench()
    stamps = Stamps(a.clock, a.records.newest_stamp())
    images = ImageUse(a.records, a.files, a.clock)
    timeout = settings.cri.stop_timeout
    sizes = sizes_of(settings)
    logs = Logs(a.consoles, a.command_logs)
    devices = _devices(settings, a, locks)
    exits = Exits(a.records, a.hypervisor, logs, a.clock, locks, a.streaming, a.groups, timeout, devices.health)
    last_words = LastWords(a.records, a.care, a.last_words)
    stop_container = StopContainer(a.records, a.hypervisor, exits, a.clock, locks, last_words, devices.unplug)
    agent_timeout = settings.vm.agent_timeout
    commands = ContainerCommands(
        a.records, a.guests, a.command_logs, stop_container, a.clock, locks, agent_timeout, hearers=a.hearers
    )
    stop_sandbox = StopSandbox(a.records, a.networks, stop_container, a.clock, locks, timeout, a.streaming)
    remove_container = RemoveContainer(
        a.records, a.hypervisor, logs, a.disks, images, a.clock, locks, a.guests, a.groups, devices, timeout
    )
    care = CareForGuests(a.records, a.care, a.clock, locks)
    checkpoints = CheckpointContainer(a.records, a.standstill, a.archives, settings.layout(), a.clock, locks, care)
    services = Services(
        records=a.records,
        clock=a.clock,
        layout=settings.layout(),
        node=_node(settings, a, bench, devices),
        run_sandbox=RunSandbox(
            records=a.records,
            networks=a.networks,
            clock=a.clock,
            stamps=stamps,
            locks=locks,
            inflight=Inflight[SandboxId](),
            handlers=frozenset(settings.cri.runtime_handlers),
            undo_timeout=settings.cri.stop_timeout,
        ),
        stop_sandbox=stop_sandbox,
        remove_sandbox=RemoveSandbox(a.records, stop_sandbox, remove_container, a.disks, images, locks),
        create_container=_create_container(settings, a, images, stamps, locks, devices),
        start_container=StartContainer(
            a.records, a.hypervisor, logs, exits, a.clock, locks, a.groups, sizes, timeout, commands, devices.claims
        ),
        stop_container=stop_container,
        checkpoint_container=checkpoints,
        remove_container=remove_container,
        exec_command=ExecCommand(a.records, a.guests, most=max(1, settings.cri.max_calls // 2)),
        reopen_log=ReopenLog(logs),
        usage=Usage(a.records, a.readings, a.networks, a.disks, devices.health, a.clock),
        streaming=a.streaming,
        resize_container=ResizeContainer(a.records, a.resizing, a.groups, locks, sizes, timeout),
        resize_sandbox=ResizeSandbox(a.records, locks, sizes),
    )
    ending = (exits, remove_container, checkpoints, commands)
    repairs = Repairs(a.records, a.hypervisor, a.networks, logs, a.disks, *ending, a.clock, timeout)
    recovering = recovery(repairs, bench, a.census, images, locks, settings.cri.reconcile_interval)
    watch = _watch(a, exits, checkpoints, locks, care, timeout)
    announcer = _announcer(settings, a)
    return App(a, services, images, recovering, VmEvents(a.records, exits), watch, announcer, commands, care)


def _devices(settings: Settings, a: Adapters, locks: PodLocks) -> DeviceCare:
    tables = (a.records.borrowed, a.records.device_conditions)
    outside = Outside(a.hypervisor, a.unplugging, a.devices, a.drivers, a.device_errors, *tables)
    own = settings.devices
    rules = DeviceRules(own.bind, own.reset, own.unplug, settings.cri.stop_timeout)
    return device_care(a.records, outside, a.clock, locks, rules)


def _announcer(settings: Settings, a: Adapters) -> Announcer:
    most = min(_MOST_LISTENERS, settings.cri.max_calls // 4)
    announcer = Announcer(Stamps(a.clock, a.records.newest_stamp()), most)
    changes = PodChanges(a.records, announcer)
    a.records.sandboxes.on_change(changes.sandbox_changed)
    a.records.containers.on_change(changes.container_changed)
    return announcer


def _watch(
    a: Adapters,
    exits: Exits,
    checkpoints: CheckpointContainer,
    locks: PodLocks,
    care: CareForGuests,
    timeout: float,
) -> WatchPods:
    return WatchPods(
        records=a.records,
        hypervisor=a.hypervisor,
        standstill=a.standstill,
        networks=a.networks,
        disks=a.disks,
        exits=exits,
        checkpoints=checkpoints,
        clock=a.clock,
        locks=locks,
        care=care,
        devices=exits.devices,
        timeout=timeout,
    )


def _create_container(
    settings: Settings, a: Adapters, images: ImageUse, stamps: Stamps, locks: PodLocks, devices: DeviceCare
) -> CreateContainer:
    return CreateContainer(
        records=a.records,
        hypervisor=a.hypervisor,
        files=a.files,
        images=images,
        disks=a.disks,
        seeds=a.seeds,
        clock=a.clock,
        stamps=stamps,
        locks=locks,
        inflight=Inflight[ContainerId](),
        layout=settings.layout(),
        sizes=sizes_of(settings),
        tapmanager_socket=settings.tapmanager.socket,
        free_hugepages=machine.free_hugepages,
        run_commands=settings.vm.command == "run",
        claims=devices.claims,
        borrowed=devices.borrowed,
    )


def _node(settings: Settings, a: Adapters, bench: Workbench, devices: DeviceCare) -> NodeStatus:
    return NodeStatus(
        version=version("virtshim"),
        node_id=a.records.node_id(),
        handlers=settings.cri.runtime_handlers,
        systemd_cgroups=systemd_cgroups(settings),
        hypervisor=a.hypervisor,
        networks=a.networks,
        records=a.records,
        unfinished=bench.unfinished,
        broken_devices=devices.resets.broken,
        layout=settings.layout(),
        functions=FunctionFacts(a.drivers),
    )


@contextlib.contextmanager
def built(settings: Settings) -> Iterator[App]:
    """The product on its real parts. Waits until libvirt and tapmanager answer (they may still be starting); raises
    ShimError if they do not. On leaving, everything of this process is closed; VMs and pod networks stay."""
    layout = settings.layout()
    # Searchable, so that the QEMU user reaches its disks; not readable.
    for directory in (layout.state_dir, layout.containers, layout.images, layout.run_dir, layout.sockets):
        os.makedirs(directory, mode=0o711, exist_ok=True)
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        records = open_records(layout.database)
        stack.callback(records.close)
        uri = libvirt_uri(settings)
        connection = Connection(uri)
        stack.callback(connection.close)
        profile = node_profile(settings, records.node_id())
        hypervisor = LibvirtHypervisor(connection, profile, uri)
        stack.callback(hypervisor.close)
        connection.start()
        consoles = stack.enter_context(contextlib.closing(ConsoleLogs(layout, clock)))
        command_logs = stack.enter_context(contextlib.closing(CommandLogFiles(layout, clock)))
        guests = stack.enter_context(
            contextlib.closing(AgentClients(layout, PlugPort(records, LibvirtPorts(connection, profile), layout).plug))
        )
        networks = PodNetworkClient(settings.tapmanager.socket)
        sizes = stack.enter_context(contextlib.closing(ConsoleSizes(guests.care.resize_console)))
        own_commands = stack.enter_context(contextlib.closing(CommandAttach(guests.own_input)))
        streaming = StreamingServer(settings.streaming.address, settings.streaming.port, clock)
        stack.callback(streaming.stop)
        adapters = Adapters(
            records=records,
            hypervisor=hypervisor,
            census=LibvirtCensus(connection, profile),
            readings=LibvirtReadings(BulkStats(partial(read_all, connection)), pid_directory(settings.libvirt.uri)),
            resizing=LibvirtResizing(connection, profile),
            unplugging=LibvirtUnplugging(connection, profile, hypervisor.watching),
            standstill=LibvirtStandstill(connection, profile),
            networks=networks,
            groups=VmGroupClient(networks, own=own_groups(settings)),
            files=ImageFileStore(layout.images, image_settings(settings)),
            disks=RootDiskStore(layout),
            archives=CheckpointArchives(),
            devices=node_devices(settings, stack),
            drivers=DeviceDriverClient(networks),
            device_errors=AerCounts(HostFiles()),
            seeds=SeedStore(layout),
            consoles=consoles,
            command_logs=command_logs,
            guests=guests,
            care=guests.care,
            hearers=own_commands,
            last_words=TerminationFileStore(),
            streaming=streaming,
            clock=clock,
        )
        if not connection.wait_open(_START_LIMIT):
            raise Unavailable(connection.trouble())
        networks.await_answer(clock, _START_LIMIT)
        app = wire(settings, adapters)
        stack.callback(app.care.close)
        stack.callback(app.commands.close)
        streaming.start(Attachments(ConsoleAttach(layout, sizes), own_commands), app.services.exec_command)
        yield app
