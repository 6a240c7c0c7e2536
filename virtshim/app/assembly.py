"""Composition root: which use case gets which adapters, and which threads run while the node is served."""

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
    broadcaster,
    create_container,
    operator_servicer,
    recovery,
    repair_runner,
    starts,
    state_volumes,
    usage,
    vm_uids,
    warm_starts,
    watch_pods,
)
from virtshim.app.reload import LiveSettings
from virtshim.config.settings import Settings
from virtshim.containers.checkpoint_container import CheckpointContainer
from virtshim.containers.exec import ExecCommand
from virtshim.containers.logs import ContainerLogs, ReopenContainerLog
from virtshim.containers.parts import ContainerParts
from virtshim.containers.record_exit import ExitRecorder, VmEvents
from virtshim.containers.remove_container import RemoveContainer
from virtshim.containers.start_container import StartContainer
from virtshim.containers.stop_container import StopContainer, TerminationMessages
from virtshim.containers.update_resources import UpdateContainerResources, UpdateSandboxResources
from virtshim.cri.images import ImageServicer
from virtshim.cri.interceptors import subject_of
from virtshim.cri.operator_server import OperatorServer, OperatorServicer
from virtshim.cri.server import AdminServicer, CriServer, RuntimeServicer
from virtshim.cri.services import Services
from virtshim.devices.claims import BorrowedDevices, DeviceClaims
from virtshim.devices.health import DeviceHealth, FunctionInspection
from virtshim.devices.releases import DeviceReleases
from virtshim.devices.resets import DeviceResets
from virtshim.devices.services import DeviceServices
from virtshim.devices.unplug import UnplugDevices, UsbReprobe
from virtshim.guest.boot_phases import BootProgress, Starts
from virtshim.guest.entrypoint_runner import EntrypointRunner, GuestFollowers
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.set_up import GuestSetUp
from virtshim.guest.trouble_notices import TroubleNotices
from virtshim.images.service import ImageService
from virtshim.metrics.start_ups import StartUps
from virtshim.model.ids import ImageDigest, SandboxId
from virtshim.model.layout import admin_socket
from virtshim.moves.ports import SavedVms
from virtshim.moves.receiving import ReceiveVm
from virtshim.moves.renewing import RenewVm, VmStates
from virtshim.moves.restoring import RestoreVm
from virtshim.moves.saving import SaveVm
from virtshim.moves.sending import Departures, SendVm
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
from virtshim.templates.warm_start import WarmStarts
from virtshim.vm.node_profile import systemd_cgroups
from virtshim.volumes.copy_watch import CopyWatch
from virtshim.volumes.pod_volumes import PodVolumes
from virtshim.volumes.volume_copies import VolumeCopies

# When the daemon stops, a running look may take this many more seconds.
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
    receiving: ReceiveVm
    sending: SendVm
    warm: WarmStarts

    def server(self, settings: Settings) -> CriServer:
        # Abstract to the type checker: RPCs that are not defined are answered UNIMPLEMENTED at run time.
        runtime = RuntimeServicer(self.services)  # type: ignore[abstract]
        image = ImageServicer(
            self.images,
            self.adapters.files.containers_room.filesystem_usage,
            {*settings.cri.runtime_handlers, *settings.proxy.pod_handlers},
            self.live.pulls,
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
        return OperatorServer(admin_socket(settings.layout()), self.operator)

    def recover(self) -> None:
        """Makes the records agree with what exists on the node, and records the boot in which it did so."""
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
        self.warm.templates.remove_leftovers()

    def close(self) -> None:
        for part in (
            self.receiving,
            self.devices.releases,
            self.guest_set_up,
            self.entrypoints,
            self.freezer,
            self.warm.templates,
        ):
            part.close()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches pods within the block, on separate threads."""
        stopping = threading.Event()
        threads = []
        try:
            for name, run in (
                ("watch-pods", self.watch.run),
                ("reconcile", self.recovery.reconcile.run),
                ("watch-volumes", self.copy_watch.run),
                ("watch-agents", self.starts.boots.run),
            ):
                threads.append(lasting(partial(run, stopping), name))
            yield
        finally:
            stopping.set()
            for thread in threads:
                thread.join(_JOIN_TIMEOUT)


def wire(settings: Settings, adapters: Adapters) -> App:
    """Connects the use cases with the adapters. Starts nothing."""
    a = adapters
    live = LiveSettings.from_settings(settings)
    locks, runner, starting = PodLocks(), repair_runner(), starts(a)
    stamps, uids = Stamps(a.clock, a.records.newest_stamp()), vm_uids(settings, a)
    images = _images(a, live)
    parts = _container_parts(settings, a, locks)
    exits = _exits(a, locks, parts)
    guest_set_up = _guest_set_up(live, a, exits)
    freezer = GuestFreezer(a.records, a.guest.operations, a.clock, locks)
    states = _states(settings, live, a, exits, freezer)
    receiving = states.receiving
    warm = warm_starts(settings, live, a, exits, uids)
    stop_container = _stop_container(a, exits, freezer, states)
    guest = GuestFollowers(_entrypoints(live, a, stop_container, exits, guest_set_up), guest_set_up)
    guest_set_up.on_end(guest.entrypoints.follow)
    stop_sandbox = _stop_sandbox(a, exits, stop_container, states.saving)
    remove_container = RemoveContainer(a.records, a.clock, locks, parts, images, a.guest.agents)
    services = Services(
        records=a.records,
        clock=a.clock,
        layout=settings.layout(),
        node=_node(settings, a, runner, parts.devices, warm),
        run_sandbox=_run_sandbox(settings, live, a, stamps, locks, starting.ups, receiving=receiving),
        stop_sandbox=stop_sandbox,
        remove_sandbox=_remove_sandbox(a, images, stop_sandbox, remove_container, starting.ups),
        create_container=create_container(
            settings, live, a, images, stamps, exits, starting.ups, receiving=receiving, uids=uids
        ),
        start_container=_start_container(live, exits, guest, starting, receiving, warm),
        stop_container=stop_container,
        checkpoint_container=_checkpoints(settings, a, locks, freezer),
        remove_container=remove_container,
        exec_command=_exec_command(live, a, guest_set_up),
        reopen_container_log=ReopenContainerLog(parts.logs),
        usage=usage(a, parts.devices, live.commands),
        streaming=a.network.streaming,
        events=broadcaster(settings, a),
        update_container_resources=_update_resources(live, a, exits),
        update_sandbox_resources=UpdateSandboxResources(a.records, locks, live.sizes),
    )
    return App(
        adapters=a,
        services=services,
        images=images,
        recovery=_recovery(a, live, images, runner, _repairs(a, exits, guest, services, states, warm)),
        events=VmEvents(a.records, exits),
        watch=watch_pods(a, exits, services, freezer, guest_set_up, states, runner),
        entrypoints=guest.entrypoints,
        freezer=freezer,
        devices=parts.devices,
        guest_set_up=guest_set_up,
        copy_watch=CopyWatch(a.records, a.volumes.kubelet, guest_set_up, a.clock),
        live=live,
        operator=operator_servicer(live, a, services, images, freezer, exits, starting.ups, receiving=receiving),
        starts=starting,
        receiving=receiving,
        sending=_sending(settings, a, states, stop_container),
        warm=warm,
    )


def _images(a: Adapters, live: LiveSettings) -> ImageService:
    of_vms = partial(_vm_images, a.files.vms)
    return ImageService(a.records, a.files.images, a.files.image_notes, a.clock, live.pinned_images, of_vms)


def _recovery(
    a: Adapters, live: LiveSettings, images: ImageService, runner: RepairRunner, repairs: Repairs
) -> Recovery:
    gc = _gc(a, images, live)
    return recovery(repairs, runner, a.vm.inventory, a.files.copies, gc, live.reconcile_interval)


def _gc(a: Adapters, images: ImageService, live: LiveSettings) -> ImageGc:
    return ImageGc(images, a.records, a.clock, live.image_watermarks)


def _sending(settings: Settings, a: Adapters, states: VmStates, stop_container: StopContainer) -> SendVm:
    return SendVm(
        departures=states.departures,
        streams=a.vm.streams,
        places=a.files.disk_places,
        layout=settings.layout(),
        alone=stop_container.instead_of_stops,
    )


def _container_parts(settings: Settings, a: Adapters, locks: PodLocks) -> ContainerParts:
    timeout = settings.cri.stop_timeout
    return ContainerParts(
        hypervisor=a.vm.hypervisor,
        cgroups=a.vm.cgroups,
        logs=ContainerLogs(a.guest.consoles, a.guest.entrypoint_logs),
        disks=a.files.disks,
        devices=_devices(settings, a, locks),
        volumes=PodVolumes(
            records=a.records,
            hypervisor=a.vm.hypervisor,
            shares=a.volumes.shares,
            copies=VolumeCopies(a.volumes.kubelet),
            timeout=timeout,
        ),
        timeout=timeout,
    )


def _start_container(
    live: LiveSettings,
    exits: ExitRecorder,
    guest: GuestFollowers,
    starting: Starts,
    receiving: ReceiveVm,
    warm: WarmStarts,
) -> StartContainer:
    return StartContainer(
        records=exits.records,
        clock=exits.clock,
        locks=exits.locks,
        parts=exits.parts,
        guest=guest,
        exits=exits,
        sizes=live.sizes,
        starts=starting,
        receiving=receiving,
        warm=warm,
    )


def _vm_images(vms: SavedVms) -> frozenset[ImageDigest]:
    """Raises InternalError for an unreadable record, because its image is not known."""
    return frozenset(vm.image for vm in vms.all(strict=True) if not vm.has_left)


def _states(
    settings: Settings, live: LiveSettings, a: Adapters, exits: ExitRecorder, freezer: GuestFreezer
) -> VmStates:
    volumes = state_volumes(settings, live, a)
    saving = SaveVm(
        records=a.records,
        vms=a.files.vms,
        hypervisor=a.vm.hypervisor,
        pausing=a.vm.pausing,
        guests=a.guest.operations,
        logs=a.guest.entrypoint_logs,
        exits=exits,
        clock=a.clock,
        locks=exits.locks,
        limits=live.saved,
        state_volumes=volumes,
        streams=a.vm.streams,
        layout=settings.layout(),
    )
    restoring = RestoreVm(
        records=a.records,
        vms=a.files.vms,
        hypervisor=a.vm.hypervisor,
        pausing=a.vm.pausing,
        logs=exits.parts.logs,
        copies=a.files.copies,
        freezer=freezer,
        clock=a.clock,
        locks=exits.locks,
        layout=settings.layout(),
        state_volumes=volumes,
    )
    receiving = ReceiveVm(
        peers=a.network.peers,
        vms=a.files.vms,
        streams=a.vm.streams,
        places=a.files.disk_places,
        disks=a.files.disks,
        exits=exits,
        restoring=restoring,
        layout=settings.layout(),
        hardware=a.vm.node_hardware,
    )
    departures = Departures(saving, a.files.disks)
    return VmStates(saving, restoring, RenewVm(saving, restoring, live.sizes), receiving, departures)


def _exits(a: Adapters, locks: PodLocks, parts: ContainerParts) -> ExitRecorder:
    return ExitRecorder(
        records=a.records,
        clock=a.clock,
        locks=locks,
        parts=parts,
        streaming=a.network.streaming,
        notices=TroubleNotices(a.records, parts.logs, a.network.pod_events, a.clock),
    )


def _guest_set_up(live: LiveSettings, a: Adapters, exits: ExitRecorder) -> GuestSetUp:
    return GuestSetUp(
        records=a.records,
        clock=a.clock,
        locks=exits.locks,
        guests=a.guest.agents,
        volumes=exits.parts.volumes,
        exits=exits,
        agent_timeout=live.agent_timeout,
        must_confirm=live.must_confirm,
    )


def _entrypoints(
    live: LiveSettings, a: Adapters, stop: StopContainer, exits: ExitRecorder, guest_set_up: GuestSetUp
) -> EntrypointRunner:
    return EntrypointRunner(
        records=a.records,
        clock=a.clock,
        locks=exits.locks,
        guests=a.guest.agents,
        logs=a.guest.entrypoint_logs,
        listeners=a.guest.entrypoint_listeners,
        guest_set_up=guest_set_up,
        stop=stop,
        exits=exits,
        agent_timeout=live.agent_timeout,
    )


def _stop_container(a: Adapters, exits: ExitRecorder, freezer: GuestFreezer, states: VmStates) -> StopContainer:
    return StopContainer(
        records=a.records,
        clock=a.clock,
        locks=exits.locks,
        parts=exits.parts,
        exits=exits,
        termination_messages=TerminationMessages(a.records, a.guest.operations, a.guest.termination_files),
        boots=BootProgress(a.vm.readings, a.guest.boot_output, a.clock),
        guests=a.guest.agents,
        pausing=a.vm.pausing,
        freezer=freezer,
        states=states,
    )


def _exec_command(live: LiveSettings, a: Adapters, guest_set_up: GuestSetUp) -> ExecCommand:
    return ExecCommand(
        records=a.records,
        clock=a.clock,
        guests=a.guest.agents,
        guest_set_up=guest_set_up,
        places=live.commands,
        agent_timeout=live.agent_timeout,
    )


def _stop_sandbox(a: Adapters, exits: ExitRecorder, stop_container: StopContainer, saving: SaveVm) -> StopSandbox:
    return StopSandbox(
        records=a.records,
        clock=a.clock,
        locks=exits.locks,
        parts=exits.parts,
        networks=a.network.pods,
        streaming=a.network.streaming,
        stop_container=stop_container,
        saving=saving,
    )


def _remove_sandbox(
    a: Adapters,
    images: ImageService,
    stop_sandbox: StopSandbox,
    remove_container: RemoveContainer,
    start_ups: StartUps,
) -> RemoveSandbox:
    return RemoveSandbox(
        records=a.records,
        locks=remove_container.locks,
        disks=a.files.disks,
        images=images,
        stop_sandbox=stop_sandbox,
        remove_container=remove_container,
        start_ups=start_ups,
    )


def _checkpoints(settings: Settings, a: Adapters, locks: PodLocks, freezer: GuestFreezer) -> CheckpointContainer:
    return CheckpointContainer(
        records=a.records,
        clock=a.clock,
        locks=locks,
        pausing=a.vm.pausing,
        files=a.files.archives,
        layout=settings.layout(),
        freezer=freezer,
    )


def _update_resources(live: LiveSettings, a: Adapters, exits: ExitRecorder) -> UpdateContainerResources:
    return UpdateContainerResources(
        records=a.records,
        locks=exits.locks,
        resizing=a.vm.resizing,
        cgroups=a.vm.cgroups,
        sizes=live.sizes,
        timeout=exits.parts.timeout,
    )


def _repairs(
    a: Adapters,
    exits: ExitRecorder,
    guest: GuestFollowers,
    services: Services,
    states: VmStates,
    warm: WarmStarts,
) -> Repairs:
    return Repairs(
        records=a.records,
        clock=a.clock,
        locks=exits.locks,
        parts=exits.parts,
        networks=a.network.pods,
        shares=a.volumes.shares,
        guest=guest,
        exits=exits,
        remove_container=services.remove_container,
        checkpoints=services.checkpoint_container,
        states=states,
        update_container_resources=services.update_container_resources,
        warm=warm,
    )


def _devices(settings: Settings, a: Adapters, locks: PodLocks) -> DeviceServices:
    own, drivers, errors = settings.devices, a.devices.drivers, a.devices.errors
    timeout = settings.cri.stop_timeout
    resets = DeviceResets(a.records, a.records.device_conditions, drivers, errors, a.clock, timeout)
    releases = DeviceReleases(a.records, resets, UsbReprobe(drivers, timeout), locks, timeout, own.reset)
    return DeviceServices(
        claims=DeviceClaims(a.records, a.vm.hypervisor, a.devices.host, resets, releases),
        borrowed=BorrowedDevices(a.records, a.records.borrowed, drivers, timeout, own.bind),
        health=DeviceHealth(a.records, errors, resets),
        resets=resets,
        releases=releases,
        unplug=UnplugDevices(a.records, a.vm.unplugging, a.clock, locks, own.unplug),
    )


def _run_sandbox(
    settings: Settings,
    live: LiveSettings,
    a: Adapters,
    stamps: Stamps,
    locks: PodLocks,
    start_ups: StartUps,
    receiving: ReceiveVm,
) -> RunSandbox:
    return RunSandbox(
        records=a.records,
        networks=a.network.pods,
        clock=a.clock,
        stamps=stamps,
        locks=locks,
        inflight=Inflight[SandboxId](),
        handlers=frozenset(settings.cri.runtime_handlers),
        pod_handlers=settings.proxy.pod_handlers,
        profiles=live.profiles,
        require_overhead=live.require_overhead,
        timeout=settings.cri.stop_timeout,
        start_ups=start_ups,
        vms=a.files.vms,
        state_volumes=state_volumes(settings, live, a),
        receiving=receiving,
    )


def _node(
    settings: Settings, a: Adapters, runner: RepairRunner, devices: DeviceServices, warm: WarmStarts
) -> NodeStatus:
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
        templates=warm.templates.facts,
        layout=settings.layout(),
        functions=FunctionInspection(a.devices.drivers),
    )


@contextlib.contextmanager
def open_app(settings: Settings) -> Iterator[App]:
    """Opens the product with its real adapters. Waits until libvirt and tapmanager answer, because they may still be
    starting. Raises ShimError if they do not. At the end of the block, closes everything of this process; VMs and pod
    networks stay."""
    with contextlib.ExitStack() as stack:
        parts = real_parts(settings, stack)
        parts.wait()
        app = wire(settings, parts.adapters)
        app.live.others.append(parts.use)
        stack.callback(app.close)
        parts.server.start(parts.attaches, app.services.exec_command, parts.screens)
        yield app
