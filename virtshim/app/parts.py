"""Recovery at start-up, and the reconciler. Both use the same survey, the same repairs and one runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from virtshim.annotations.parse import VNC_ANNOTATION
from virtshim.app.adapters import Adapters
from virtshim.app.reload import LiveSettings
from virtshim.config.settings import Settings
from virtshim.containers.admission import Admission
from virtshim.containers.create_container import CreateContainer
from virtshim.containers.creation_steps import (
    Domain,
    EmptyDisks,
    HostDevices,
    KeptPlaces,
    Kernels,
    RootDisk,
    Seed,
    Step,
)
from virtshim.containers.new_record import ContainerRecords, VmUids
from virtshim.containers.operate import ActionLog, VmActions
from virtshim.containers.record_exit import ExitRecorder
from virtshim.cri.operator_server import OperatorServicer, OperatorServices
from virtshim.cri.services import Services
from virtshim.devices.services import DeviceServices
from virtshim.guest.boot_phases import BootPhases, Starts
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.set_up import GuestSetUp
from virtshim.images.service import ImageService
from virtshim.metrics.start_ups import StartUps
from virtshim.metrics.usage import Usage
from virtshim.model.container import Container
from virtshim.model.ids import ContainerId
from virtshim.moves.keeping import LastingVms
from virtshim.moves.ports import StateVolumes
from virtshim.moves.receiving import ReceiveVm
from virtshim.moves.renewing import VmStates
from virtshim.moves.state_volume import StateVolumeFiles
from virtshim.pods.adopt_sandbox import AdoptSandbox
from virtshim.pods.events import EventBroadcaster, RecordChanges
from virtshim.pods.inspection import Inspection
from virtshim.pods.run_sandbox import RunSandbox
from virtshim.recovery.image_gc import ImageGc
from virtshim.recovery.rebuild import Rebuild
from virtshim.recovery.reconcile import Reconcile
from virtshim.recovery.recover import Recover, Survey
from virtshim.recovery.repairs import RepairRunner, Repairs
from virtshim.recovery.watch_pods import WatchPods
from virtshim.store.ports import RecordCopies, Records, VmInventory
from virtshim.system import machine
from virtshim.system.clock import Stamps
from virtshim.system.live import Live
from virtshim.system.locks import Inflight
from virtshim.system.pod_places import PodPlaces
from virtshim.templates.keeping import Templates
from virtshim.templates.warm_start import WarmStarts
from virtshim.volumes.image_volumes import ImageVolumes
from virtshim.volumes.volume_disks import VolumeDisks

# CreateContainer: its checks, and its steps in their order.


def create_container(
    settings: Settings,
    live: LiveSettings,
    a: Adapters,
    images: ImageService,
    stamps: Stamps,
    exits: ExitRecorder,
    start_ups: StartUps,
    *,
    receiving: ReceiveVm,
    uids: VmUids,
) -> CreateContainer:
    """Makes CreateContainer with its checks and its steps, in their order."""
    locks, devices, volumes = exits.locks, exits.parts.devices, exits.parts.volumes
    places = KeptPlaces(a.vm.node_hardware, a.files.disk_places, a.files.root_volumes)
    steps: tuple[Step, ...] = (
        HostDevices(devices.borrowed),
        RootDisk(
            a.files.images,
            a.files.disks,
            a.files.root_volumes,
            Kernels(a.files.images.boot, a.files.kernels, settings.layout()),
        ),
        Seed(a.files.seeds, volumes.copies),
        EmptyDisks(a.files.empty_disks),
        Domain(
            hypervisor=a.vm.hypervisor,
            records=a.records,
            copies=a.files.copies,
            layout=settings.layout(),
            sizes=live.sizes,
            tapmanager_socket=settings.tapmanager.socket,
            places=places,
            host_nodes=a.vm.node_hardware.host_nodes,
        ),
    )
    return CreateContainer(
        records=a.records,
        clock=a.clock,
        locks=locks,
        inflight=Inflight[ContainerId](),
        admission=_admission(settings, live, a, images, exits),
        new_records=ContainerRecords(
            records=a.records,
            hypervisor=a.vm.hypervisor,
            images=images,
            disks=a.files.disks,
            claims=devices.claims,
            borrowed=devices.borrowed,
            stamps=stamps,
            uids=uids,
            vms=a.files.vms,
            state_volumes=state_volumes(settings, live, a),
            receiving=receiving,
            locks=exits.locks,
            run_commands=live.run_commands,
        ),
        steps=steps,
        start_ups=start_ups,
    )


def vm_uids(settings: Settings, a: Adapters) -> VmUids:
    own = settings.libvirt
    return VmUids(a.records, own.first_vm_uid, own.vm_uids, partial(_uids_in_use, settings))


def warm_starts(
    settings: Settings,
    live: LiveSettings,
    a: Adapters,
    exits: ExitRecorder,
    uids: VmUids,
) -> WarmStarts:
    templates = Templates(
        vms=a.vm.templates,
        files=a.files.templates,
        hypervisor=a.vm.hypervisor,
        pausing=a.vm.pausing,
        streams=a.vm.streams,
        guests=a.guest.operations,
        agents=a.guest.agents,
        clock=a.clock,
        locks=exits.locks,
        layout=settings.layout(),
        uid=uids.free,
        most=live.template_bytes,
        agent_timeout=live.agent_timeout,
    )
    return WarmStarts(
        templates=templates,
        vms=a.vm.templates,
        files=a.files.templates,
        hypervisor=a.vm.hypervisor,
        pausing=a.vm.pausing,
        streams=a.vm.streams,
        guests=a.guest.operations,
        agents=a.guest.agents,
        records=a.records,
        logs=exits.parts.logs,
        clock=a.clock,
    )


def state_volumes(settings: Settings, live: LiveSettings, a: Adapters) -> StateVolumes:
    return StateVolumeFiles(a.records.node_id, settings.layout(), a.files.vms, a.clock, live.saved)


def _admission(
    settings: Settings, live: LiveSettings, a: Adapters, images: ImageService, exits: ExitRecorder
) -> Admission:
    return Admission(
        records=a.records,
        claims=exits.parts.devices.claims,
        sizes=live.sizes,
        free_hugepages=machine.free_hugepages,
        volumes=exits.parts.volumes,
        volume_disks=VolumeDisks(a.volumes.disks),
        cluster=a.network.cluster,
        image_volumes=ImageVolumes(images, a.files.images),
        state_volumes=state_volumes(settings, live, a),
    )


def _uids_in_use(settings: Settings) -> frozenset[int]:
    layout = settings.layout()
    return machine.uids_in_use(layout.containers, layout.pod_disks, layout.vms, layout.templates)


# The admin socket, through which operators see and act on VMs, and the reports of pods' starts.


def starts(a: Adapters) -> Starts:
    ups = StartUps(a.clock)
    boots = BootPhases(a.records, a.clock, a.guest.boot_output, a.vm.control, ups)
    a.guest.consoles.on_news(boots.console_changed)
    a.vm.control.on_agent(boots.agent_answers)
    a.records.containers.on_change(boots.record_changed)
    return Starts(ups, boots)


def operator_servicer(
    live: LiveSettings,
    a: Adapters,
    services: Services,
    images: ImageService,
    freezer: GuestFreezer,
    exits: ExitRecorder,
    start_ups: StartUps,
    *,
    receiving: ReceiveVm,
) -> OperatorServicer:
    action_log = ActionLog(a.records, a.clock)
    return OperatorServicer(
        OperatorServices(
            records=a.records,
            clock=a.clock,
            actions=VmActions(
                records=a.records,
                hypervisor=a.vm.hypervisor,
                pausing=a.vm.pausing,
                control=a.vm.control,
                guests=a.guest.operations,
                freezer=freezer,
                locks=exits.locks,
                log=action_log,
                exits=exits,
                stopping=services.stop_container,
            ),
            action_log=action_log,
            control=a.vm.control,
            screenshots=a.vm.screenshots,
            has_screen=partial(_has_screen, a.records),
            streaming=a.network.streaming,
            images=images,
            inspection=Inspection(a.records, a.vm.hypervisor, services.node, start_ups),
            start_ups=start_ups,
            receiving=receiving,
            adopt_sandbox=_adopt_sandbox(services.run_sandbox, a),
            vms=LastingVms(
                records=a.records,
                vms=a.files.vms,
                disks=a.files.disks,
                hypervisor=a.vm.hypervisor,
                images=images,
                locks=exits.locks,
                limits=live.saved,
            ),
        )
    )


def _adopt_sandbox(run: RunSandbox, a: Adapters) -> AdoptSandbox:
    return AdoptSandbox(
        records=run.records,
        networks=run.networks,
        shares=a.volumes.shares,
        clock=run.clock,
        stamps=run.stamps,
        locks=run.locks,
        pod_handlers=run.pod_handlers,
        profiles=run.profiles,
        timeout=run.timeout,
        start_ups=run.start_ups,
        vms=run.vms,
    )


def _has_screen(records: Records, container: Container) -> bool:
    """A VM has a video card if its pod asked for one when it was made."""
    sandbox = records.sandboxes.get(container.sandbox_id)
    return sandbox is not None and sandbox.config.annotations.get(VNC_ANNOTATION) == "true"


# Usage of pods, their limits on commands, and their events.

# The number of GetContainerEvents streams. Each holds a thread of the calls' pool, so together they get at most a
# quarter of the pool.
_MAX_LISTENERS = 16


def usage(a: Adapters, devices: DeviceServices, commands: PodPlaces) -> Usage:
    def refused(pod: str) -> Mapping[str, int]:
        return {"commands": commands.refusals(pod), **a.network.streaming.refused(pod)}

    return Usage(
        records=a.records,
        clock=a.clock,
        readings=a.vm.readings,
        networks=a.network.pods,
        disks=a.files.disks,
        devices=devices.health,
        refused=refused,
    )


def broadcaster(settings: Settings, a: Adapters) -> EventBroadcaster:
    most = min(_MAX_LISTENERS, settings.cri.max_calls // 4)
    made = EventBroadcaster(Stamps(a.clock, a.records.newest_stamp()), most)
    changes = RecordChanges(a.records, made)
    a.records.sandboxes.on_change(changes.sandbox_changed)
    a.records.containers.on_change(changes.container_changed)
    return made


# Seconds for one repair, and for all hanging repairs of one round. The reconciler repeats what has not succeeded by
# then.
_LIMIT: Final = 15.0
_BUDGET: Final = 45.0


@dataclass(frozen=True, slots=True)
class Recovery:
    recover: Recover
    reconcile: Reconcile


def repair_runner() -> RepairRunner:
    return RepairRunner(_LIMIT, _BUDGET)


def watch_pods(
    a: Adapters,
    exits: ExitRecorder,
    services: Services,
    freezer: GuestFreezer,
    guest_set_up: GuestSetUp,
    states: VmStates,
    runner: RepairRunner,
) -> WatchPods:
    return WatchPods(
        records=a.records,
        clock=a.clock,
        locks=exits.locks,
        parts=exits.parts,
        networks=a.network.pods,
        pausing=a.vm.pausing,
        exits=exits,
        checkpoints=services.checkpoint_container,
        freezer=freezer,
        states=states,
        guest_set_up=guest_set_up,
        stop_sandbox=services.stop_sandbox,
        remove_sandbox=services.remove_sandbox,
        runner=runner,
    )


def recovery(
    repairs: Repairs,
    runner: RepairRunner,
    inventory: VmInventory,
    copies: RecordCopies,
    image_gc: ImageGc,
    interval: Live[float],
) -> Recovery:
    """`interval`: seconds between two looks of the reconciler."""
    records, networks = repairs.records, repairs.networks
    survey = Survey(
        records=records,
        inventory=inventory,
        networks=networks,
        disks=repairs.parts.disks,
        shares=repairs.shares,
        timeout=repairs.parts.timeout,
    )
    devices = repairs.parts.devices
    return Recovery(
        Recover(
            survey=survey,
            rebuild=Rebuild(records, inventory, copies, networks, repairs.states.saving.vms, repairs.parts.timeout),
            repairs=repairs,
            repair_runner=runner,
            images=image_gc.images,
            resets=devices.resets,
            releases=devices.releases,
        ),
        Reconcile(
            records=records,
            clock=repairs.clock,
            locks=repairs.locks,
            survey=survey,
            repairs=repairs,
            repair_runner=runner,
            images=image_gc.images,
            image_gc=image_gc,
            interval=interval,
            resets=devices.resets,
        ),
    )
