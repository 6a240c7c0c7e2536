"""Composition root: the only place that knows which adapter implements which port."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from virtshim.config import Settings
from virtshim.console.follower import ConsoleLogs
from virtshim.cri.image import ImageServicer
from virtshim.cri.runtime import RuntimeServicer, Services
from virtshim.cri.server import CriServer
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.guestinit.iso import SeedStore
from virtshim.hypervisor.driver import LibvirtHypervisor
from virtshim.images.filestore import ImageFileStore
from virtshim.podnet.client import PodNetworkClient
from virtshim.ports import Clock, Consoles, GuestSeeds, Hypervisor, ImageFiles, PodNetworks, RootDisks
from virtshim.services.clock import Stamps, SystemClock
from virtshim.services.create_container import CreateContainer, Sizes
from virtshim.services.exits import Exits
from virtshim.services.images import ImageUse
from virtshim.services.inflight import Inflight, PodLocks
from virtshim.services.node_status import NodeStatus
from virtshim.services.recover import Recover
from virtshim.services.remove_container import RemoveContainer
from virtshim.services.remove_sandbox import RemoveSandbox
from virtshim.services.run_sandbox import RunSandbox
from virtshim.services.start_container import StartContainer
from virtshim.services.stop_container import StopContainer
from virtshim.services.stop_sandbox import StopSandbox
from virtshim.services.vm_events import VmEvents
from virtshim.store.records import SqliteRecords
from virtshim.volumes.root import RootDiskStore


@dataclass(frozen=True, slots=True)
class Adapters:
    """Everything outside, each behind its port."""

    records: SqliteRecords
    hypervisor: Hypervisor
    networks: PodNetworks
    files: ImageFiles
    disks: RootDisks
    seeds: GuestSeeds
    consoles: Consoles
    clock: Clock


@dataclass(frozen=True, slots=True)
class App:
    """The wired product. `serve.py` orders its start and stop."""

    adapters: Adapters
    services: Services
    images: ImageUse
    recover: Recover
    events: VmEvents

    def server(self, settings: Settings) -> CriServer:
        return CriServer(
            settings.cri_socket, settings.cri.max_calls, RuntimeServicer(self.services), ImageServicer(self.images)
        )

    def recovered(self) -> None:
        """Makes records and the world agree; remembers in which boot."""
        records = self.adapters.records
        boot = boot_id()
        before = records.node_fact("boot")
        self.adapters.hypervisor.on_power_event(self.events.changed)  # first: what ends meanwhile must not be missed
        self.recover.run(rebooted=before is not None and before != boot)
        records.set_node_fact("boot", boot)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def wire(settings: Settings, adapters: Adapters) -> App:
    """Connects services to ports; nothing runs yet."""
    layout = settings.layout()
    a = adapters
    locks = PodLocks()
    stamps = Stamps(a.clock, a.records.newest_stamp())
    images = ImageUse(a.records, a.files, a.clock)
    exits = Exits(a.records, a.hypervisor, a.consoles, a.clock, locks)
    stop_container = StopContainer(a.records, a.hypervisor, exits, a.clock, locks)
    remove_container = RemoveContainer(a.records, a.hypervisor, a.consoles, a.disks, images, locks)
    stop_sandbox = StopSandbox(a.records, a.networks, stop_container, a.clock, locks, settings.cri.stop_timeout)
    services = Services(
        records=a.records,
        clock=a.clock,
        node=NodeStatus(
            version=version("virtshim"),
            node_id=a.records.node_id(),
            handlers=settings.cri.runtime_handlers,
            systemd_cgroups=_systemd_cgroups(settings),
            hypervisor=a.hypervisor,
            networks=a.networks,
            layout=layout,
        ),
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
        remove_sandbox=RemoveSandbox(a.records, stop_sandbox, remove_container, locks),
        create_container=CreateContainer(
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
            layout=layout,
            sizes=Sizes(settings.vm.default_memory, settings.vm.min_memory, settings.vm.max_vcpus),
            tapmanager_socket=settings.tapmanager_socket,
        ),
        start_container=StartContainer(a.records, a.hypervisor, a.consoles, exits, a.clock, locks),
        stop_container=stop_container,
        remove_container=remove_container,
    )
    recover = Recover(
        records=a.records,
        hypervisor=a.hypervisor,
        networks=a.networks,
        consoles=a.consoles,
        disks=a.disks,
        images=images,
        exits=exits,
        remove_container=remove_container,
        clock=a.clock,
        timeout=settings.cri.stop_timeout,
    )
    return App(a, services, images, recover, VmEvents(a.records, exits))


def _systemd_cgroups(settings: Settings) -> bool:
    """`auto`: what sd_booted(3) says."""
    if settings.cri.cgroup_driver == "auto":
        return os.path.isdir("/run/systemd/system")
    return settings.cri.cgroup_driver == "systemd"


def build(settings: Settings) -> App:
    """Opens the real parts. The state and run directories are made if missing: searchable by the QEMU user, readable by root
    only."""
    layout = settings.layout()
    for directory in (layout.state_dir, layout.containers, layout.images, layout.run_dir, layout.sockets):
        os.makedirs(directory, mode=0o711, exist_ok=True)
    raise NotImplementedError(
        ImageFileStore, LibvirtHypervisor, PodNetworkClient, RootDiskStore, SeedStore, ConsoleLogs, SystemClock
    )
