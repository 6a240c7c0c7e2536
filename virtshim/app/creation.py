"""CreateContainer, put together: its checks, its steps in their order."""

from __future__ import annotations

from functools import partial

from virtshim import machine
from virtshim.app.adapters import Adapters
from virtshim.app.live_settings import LiveSettings
from virtshim.config import Settings
from virtshim.domain.ids import ContainerId
from virtshim.lifecycle.create_container import CreateContainer
from virtshim.lifecycle.creation.admission import Admission
from virtshim.lifecycle.creation.devices import HostDevices
from virtshim.lifecycle.creation.disk import RootDisk
from virtshim.lifecycle.creation.empty_disks import EmptyDisks
from virtshim.lifecycle.creation.kernels import Kernels
from virtshim.lifecycle.creation.libvirt_domain import Domain
from virtshim.lifecycle.creation.places import KeptPlaces
from virtshim.lifecycle.creation.record import ContainerRecords
from virtshim.lifecycle.creation.seed import Seed
from virtshim.lifecycle.creation.step import Step
from virtshim.lifecycle.creation.uids import VmUids
from virtshim.lifecycle.images import ImageService
from virtshim.lifecycle.record_exit import ExitRecorder
from virtshim.lifecycle.volumes.image_volumes import ImageVolumes
from virtshim.lifecycle.volumes.volume_disks import VolumeDisks
from virtshim.primitives.clock import Stamps
from virtshim.primitives.inflight import Inflight
from virtshim.primitives.start_ups import StartUps


def create_container(
    settings: Settings,
    live: LiveSettings,
    a: Adapters,
    images: ImageService,
    stamps: Stamps,
    exits: ExitRecorder,
    start_ups: StartUps,
) -> CreateContainer:
    """With all that it does, in order."""
    locks, devices, volumes = exits.locks, exits.devices, exits.volumes
    limits = (live.sizes, machine.free_hugepages)
    places = KeptPlaces(a.node_hardware, a.disk_places, a.root_volumes)
    steps: tuple[Step, ...] = (
        HostDevices(devices.borrowed),
        RootDisk(a.files, a.disks, a.root_volumes, Kernels(a.files.boot, a.kernels, settings.layout())),
        Seed(a.seeds, volumes.copies),
        EmptyDisks(a.empty_disks),
        Domain(
            hypervisor=a.hypervisor,
            records=a.records,
            copies=a.copies,
            layout=settings.layout(),
            sizes=live.sizes,
            tapmanager_socket=settings.tapmanager.socket,
            places=places,
            host_nodes=a.node_hardware.host_nodes,
        ),
    )
    return CreateContainer(
        records=a.records,
        clock=a.clock,
        locks=locks,
        inflight=Inflight[ContainerId](),
        admission=Admission(
            a.records,
            devices.claims,
            *limits,
            volumes,
            VolumeDisks(a.volume_disks),
            a.cluster,
            ImageVolumes(images, a.files),
        ),
        new_records=ContainerRecords(
            records=a.records,
            hypervisor=a.hypervisor,
            images=images,
            disks=a.disks,
            claims=devices.claims,
            borrowed=devices.borrowed,
            stamps=stamps,
            uids=VmUids(
                a.records, settings.libvirt.first_vm_uid, settings.libvirt.vm_uids, partial(_uids_in_use, settings)
            ),
            run_commands=live.run_commands,
        ),
        steps=steps,
        start_ups=start_ups,
    )


def _uids_in_use(settings: Settings) -> frozenset[int]:
    layout = settings.layout()
    return machine.uids_in_use(layout.containers, layout.pod_disks)
