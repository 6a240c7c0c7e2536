"""Composition root: which use case gets which adapters, and what runs for as long as the node is served."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from virtshim.app.adapters import Adapters, real_parts
from virtshim.app.parts import (
    Recovery,
    Starts,
    broadcaster,
    create_container,
    operator_server,
    operator_servicer,
    recovery,
    repair_runner,
    starts,
    usage,
)
from virtshim.app.reload import LiveSettings
from virtshim.config.settings import Settings
from virtshim.containers.checkpoint_container import CheckpointContainer
from virtshim.containers.exec import ExecCommand
from virtshim.containers.logs import ContainerLogs, ReopenContainerLog
from virtshim.containers.record_exit import ExitRecorder, VmEvents
from virtshim.containers.remove_container import RemoveContainer
from virtshim.containers.start_container import StartContainer
from virtshim.containers.stop_container import StopContainer
from virtshim.containers.termination_message import TerminationMessages
from virtshim.containers.update_resources import UpdateContainerResources, UpdateSandboxResources
from virtshim.cri.images import ImageServicer
from virtshim.cri.interceptors import subject_of
from virtshim.cri.operator.server import OperatorServer, OperatorServicer
from virtshim.cri.server import AdminServicer, CriServer, RuntimeServicer
from virtshim.cri.services import Services
from virtshim.devices.health import FunctionInspection
from virtshim.devices.services import DevicePorts, DeviceRules, DeviceServices, device_services
from virtshim.guest.boot_phases import BootProgress
from virtshim.guest.entrypoints import EntrypointRunner
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.set_up import GuestSetUp
from virtshim.guest.trouble_notices import TroubleNotices
from virtshim.images.service import ImageService
from virtshim.metrics.start_ups import StartUps
from virtshim.model.ids import SandboxId
from virtshim.pods.node_status import NodeStatus
from virtshim.pods.remove_sandbox import RemoveSandbox
from virtshim.pods.run_sandbox import RunSandbox
from virtshim.pods.stop_sandbox import StopSandbox
from virtshim.recovery.image_gc import ImageGc
from virtshim.recovery.repairs import RepairRunner, Repairs
from virtshim.recovery.watch_pods import WatchPods
from virtshim.system import machine
from virtshim.system.clock import Stamps
from virtshim.system.locks import Inflight, PodLocks
from virtshim.system.threads import lasting
from virtshim.vm.node_profile import systemd_cgroups
from virtshim.volumes.copy_watch import CopyWatch
from virtshim.volumes.pod_volumes import PodVolumes
from virtshim.volumes.volume_copies import VolumeCopies

# Seconds that a look which is under way gets when the daemon stops.
_JOIN_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class App:
    """The wired product. `serve.py` orders its start and stop."""

    adapters: Adapters
    services: Services
    images: ImageService
    recovery: Recovery
    events: VmEvents
    watch: WatchPods
    entrypoints: EntrypointRunner
    freezer: GuestFreezer
    devices: DeviceServices
    guest_set_up: GuestSetUp
    copy_watch: CopyWatch
    live: LiveSettings
    operator: OperatorServicer
    starts: Starts

    def server(self, settings: Settings) -> CriServer:
        # Abstract to the type checker: RPCs that are not defined are answered UNIMPLEMENTED at run time.
        runtime = RuntimeServicer(self.services)  # type: ignore[abstract]
        image = ImageServicer(
            self.images, self.adapters.files.containers_room.use, settings.cri.runtime_handlers, self.live.pulls
        )
        admin = AdminServicer(self.adapters.records, self.adapters.guest.operations, self.adapters.network.streaming)
        return CriServer(
            settings.cri_socket,
            settings.cri.max_calls,
            runtime,
            image,
            admin,
            partial(subject_of, self.adapters.records),
        )

    def operator_server(self, settings: Settings) -> OperatorServer:
        """The admin socket."""
        return operator_server(settings, self.operator)

    def recover(self) -> None:
        """Makes records and the world agree; remembers in which boot."""
        records = self.adapters.records
        boot = machine.boot_id()
        before = records.node_fact("boot")
        self.adapters.vm.hypervisor.on_power_event(self.guest_set_up.changed)
        self.adapters.vm.hypervisor.on_power_event(self.events.changed)  # first: what ends meanwhile must not be missed
        if before is None:  # new, or set aside and not recovered yet: VMs may be there all the same
            self.recovery.recover.run(rebooted=False, lost=True)
        else:
            self.recovery.recover.run(rebooted=before != boot)
        records.set_node_fact("boot", boot)

    def close(self) -> None:
        for part in (self.devices.releases, self.guest_set_up, self.entrypoints, self.freezer):
            part.close()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Pods are looked after inside the block, by threads of their own."""
        stopping = threading.Event()
        threads = []
        try:
            for name, run in (
                ("watch-pods", self.watch.run),
                ("reconcile", self.recovery.reconcile.run),
                ("watch-volumes", self.copy_watch.run),
            ):
                threads.append(lasting(partial(run, stopping), name))
            yield
        finally:
            stopping.set()
            for thread in threads:
                thread.join(_JOIN_TIMEOUT)


def wire(settings: Settings, adapters: Adapters) -> App:
    """Connects services to ports; nothing runs yet."""
    a = adapters
    live = LiveSettings.of(settings)
    locks, runner = PodLocks(), repair_runner()
    stamps = Stamps(a.clock, a.records.newest_stamp())
    starting = starts(a)
    images = ImageService(a.records, a.files.images, a.files.image_notes, a.clock, live.pinned_images)
    timeout = settings.cri.stop_timeout
    logs = ContainerLogs(a.guest.consoles, a.guest.entrypoint_logs)
    devices = _devices(settings, a, locks)
    copies = VolumeCopies(a.volumes.kubelet)
    volumes = PodVolumes(a.records, a.vm.hypervisor, a.volumes.shares, copies, timeout)
    exits = _exits(a, logs, locks, devices, volumes, timeout)
    guest_set_up = _guest_set_up(live, a, exits, copies)
    copy_watch = CopyWatch(a.records, a.volumes.kubelet, guest_set_up, a.clock)
    freezer = GuestFreezer(a.records, a.guest.operations, a.clock, locks)
    stop_container = _stop_container(a, exits, locks, devices, freezer)
    entrypoints = _entrypoints(live, a, stop_container, exits, guest_set_up)
    guest_set_up.on_end(entrypoints.follow)
    stop_sandbox = StopSandbox(
        a.records,
        a.vm.hypervisor,
        a.network.pods,
        stop_container,
        a.clock,
        locks,
        timeout,
        a.network.streaming,
        devices,
    )
    remove_container = RemoveContainer(
        a.records,
        a.vm.hypervisor,
        logs,
        a.files.disks,
        images,
        a.clock,
        locks,
        a.guest.agents,
        a.vm.cgroups,
        devices,
        timeout,
        volumes,
    )
    checkpoints = CheckpointContainer(
        a.records, a.vm.pausing, a.files.archives, settings.layout(), a.clock, locks, freezer
    )
    services = Services(
        records=a.records,
        clock=a.clock,
        layout=settings.layout(),
        node=_node(settings, a, runner, devices),
        run_sandbox=_run_sandbox(settings, live, a, stamps, locks, starting.ups),
        stop_sandbox=stop_sandbox,
        remove_sandbox=RemoveSandbox(
            a.records, stop_sandbox, remove_container, a.files.disks, images, locks, starting.ups
        ),
        create_container=create_container(settings, live, a, images, stamps, exits, starting.ups),
        start_container=_start_container(live, a, exits, entrypoints, guest_set_up, starting),
        stop_container=stop_container,
        checkpoint_container=checkpoints,
        remove_container=remove_container,
        exec_command=ExecCommand(a.records, a.guest.agents, live.commands, a.clock, live.agent_timeout, guest_set_up),
        reopen_container_log=ReopenContainerLog(logs),
        usage=usage(a, devices, live.commands),
        streaming=a.network.streaming,
        events=broadcaster(settings, a),
        update_container_resources=UpdateContainerResources(
            a.records, a.vm.resizing, a.vm.cgroups, locks, live.sizes, timeout
        ),
        update_sandbox_resources=UpdateSandboxResources(a.records, locks, live.sizes),
    )
    ending = (exits, remove_container, checkpoints, entrypoints)
    guest = (guest_set_up, services.update_container_resources)
    repairs = Repairs(
        a.records,
        a.vm.hypervisor,
        a.network.pods,
        logs,
        a.files.disks,
        *ending,
        a.clock,
        timeout,
        a.volumes.shares,
        *guest,
    )
    gc = ImageGc(images, a.records, a.clock, live.image_watermarks)
    recovering = recovery(repairs, runner, a.vm.inventory, a.files.copies, gc, locks, live.reconcile_interval)
    watch = _watch(a, exits, checkpoints, locks, freezer, guest_set_up, timeout)
    events = VmEvents(a.records, exits)
    operator = operator_servicer(a, services.node, freezer, exits, starting.ups)
    parts = (recovering, events, watch, entrypoints, freezer, devices, guest_set_up, copy_watch, live)
    return App(a, services, images, *parts, operator, starting)


def _start_container(
    live: LiveSettings,
    a: Adapters,
    exits: ExitRecorder,
    entrypoints: EntrypointRunner,
    guest_set_up: GuestSetUp,
    starting: Starts,
) -> StartContainer:
    return StartContainer(
        records=a.records,
        hypervisor=a.vm.hypervisor,
        logs=exits.logs,
        exits=exits,
        clock=a.clock,
        locks=exits.locks,
        cgroups=a.vm.cgroups,
        sizes=live.sizes,
        timeout=exits.timeout,
        entrypoints=entrypoints,
        claims=exits.devices.claims,
        volumes=exits.volumes,
        guest_set_up=guest_set_up,
        start_ups=starting.ups,
        boots=starting.boots,
    )


def _exits(
    a: Adapters, logs: ContainerLogs, locks: PodLocks, devices: DeviceServices, volumes: PodVolumes, timeout: float
) -> ExitRecorder:
    return ExitRecorder(
        records=a.records,
        hypervisor=a.vm.hypervisor,
        logs=logs,
        clock=a.clock,
        locks=locks,
        streaming=a.network.streaming,
        cgroups=a.vm.cgroups,
        timeout=timeout,
        devices=devices,
        disks=a.files.disks,
        volumes=volumes,
        notices=TroubleNotices(a.records, logs, a.network.pod_events, a.clock),
    )


def _guest_set_up(live: LiveSettings, a: Adapters, exits: ExitRecorder, copies: VolumeCopies) -> GuestSetUp:
    return GuestSetUp(
        records=a.records,
        guests=a.guest.agents,
        volumes=exits.volumes,
        copies=copies,
        clock=a.clock,
        agent_timeout=live.agent_timeout,
        locks=exits.locks,
        exits=exits,
        must_confirm=live.must_confirm,
    )


def _entrypoints(
    live: LiveSettings, a: Adapters, stop: StopContainer, exits: ExitRecorder, guest_set_up: GuestSetUp
) -> EntrypointRunner:
    return EntrypointRunner(
        a.records,
        a.guest.agents,
        a.guest.entrypoint_logs,
        stop,
        a.clock,
        exits.locks,
        live.agent_timeout,
        entrypoint_listeners=a.guest.entrypoint_listeners,
        guest_set_up=guest_set_up,
        exits=exits,
    )


def _stop_container(
    a: Adapters, exits: ExitRecorder, locks: PodLocks, devices: DeviceServices, freezer: GuestFreezer
) -> StopContainer:
    return StopContainer(
        a.records,
        a.vm.hypervisor,
        exits,
        a.clock,
        locks,
        termination_messages=TerminationMessages(a.records, a.guest.operations, a.guest.termination_files),
        devices=devices,
        boots=BootProgress(a.vm.readings, a.guest.boot_output, a.clock),
        guests=a.guest.agents,
        pausing=a.vm.pausing,
        freezer=freezer,
    )


def _devices(settings: Settings, a: Adapters, locks: PodLocks) -> DeviceServices:
    tables = (a.records.borrowed, a.records.device_conditions)
    outside = DevicePorts(
        a.vm.hypervisor, a.vm.unplugging, a.devices.host, a.devices.drivers, a.devices.errors, *tables
    )
    own = settings.devices
    rules = DeviceRules(own.bind, own.reset, own.unplug, settings.cri.stop_timeout)
    return device_services(a.records, outside, a.clock, locks, rules)


def _watch(
    a: Adapters,
    exits: ExitRecorder,
    checkpoints: CheckpointContainer,
    locks: PodLocks,
    freezer: GuestFreezer,
    guest_set_up: GuestSetUp,
    timeout: float,
) -> WatchPods:
    return WatchPods(
        records=a.records,
        hypervisor=a.vm.hypervisor,
        pausing=a.vm.pausing,
        networks=a.network.pods,
        disks=a.files.disks,
        exits=exits,
        checkpoints=checkpoints,
        clock=a.clock,
        locks=locks,
        freezer=freezer,
        devices=exits.devices,
        volumes=exits.volumes,
        guest_set_up=guest_set_up,
        timeout=timeout,
    )


def _run_sandbox(
    settings: Settings, live: LiveSettings, a: Adapters, stamps: Stamps, locks: PodLocks, start_ups: StartUps
) -> RunSandbox:
    return RunSandbox(
        records=a.records,
        networks=a.network.pods,
        clock=a.clock,
        stamps=stamps,
        locks=locks,
        inflight=Inflight[SandboxId](),
        handlers=frozenset(settings.cri.runtime_handlers),
        profiles=live.profiles,
        require_overhead=live.require_overhead,
        timeout=settings.cri.stop_timeout,
        start_ups=start_ups,
    )


def _node(settings: Settings, a: Adapters, runner: RepairRunner, devices: DeviceServices) -> NodeStatus:
    return NodeStatus(
        version=version("virtshim"),
        node_id=a.records.node_id(),
        handlers=settings.cri.runtime_handlers,
        systemd_cgroups=systemd_cgroups(settings),
        hypervisor=a.vm.hypervisor,
        networks=a.network.pods,
        records=a.records,
        unfinished=runner.unfinished,
        broken_devices=devices.resets.broken,
        layout=settings.layout(),
        functions=FunctionInspection(a.devices.drivers),
    )


@contextlib.contextmanager
def open_app(settings: Settings) -> Iterator[App]:
    """The product on its real parts. Waits until libvirt and tapmanager answer (they may still be starting); raises
    ShimError if they do not. On leaving, everything of this process is closed; VMs and pod networks stay."""
    with contextlib.ExitStack() as stack:
        parts = real_parts(settings, stack)
        parts.wait()
        app = wire(settings, parts.adapters)
        app.live.others.append(parts.use)
        stack.callback(app.close)
        parts.server.start(parts.attaches, app.services.exec_command, parts.screens)
        yield app
