"""The fake, libvirt with its test driver and libvirt with QEMU, each as a `World` that the contract tests drive."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import libvirt
from fakes.hypervisor import FakeHypervisor
from fakes.memory_streams import FakeMemoryStreams
from fakes.readings import FakeReadings
from fakes.resizing import FakeResizing
from fakes.template_vms import FakeTemplateVms

from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.layout import Layout
from virtshim.model.usage import DomainUsage
from virtshim.model.vm import Disk, DiskBus, Power, VmSize, VmSpec
from virtshim.store.ports import VmInventory
from virtshim.templates.ports import TemplateVms
from virtshim.vm import qemu_process
from virtshim.vm.connection import Connection
from virtshim.vm.control import LibvirtControl, LibvirtUnplugging
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.driver import LibvirtHypervisor
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.inventory import LibvirtInventory
from virtshim.vm.memory_streams import LibvirtMemoryStreams
from virtshim.vm.pause import LibvirtPausing
from virtshim.vm.ports import Hypervisor, MemoryStreams, VmControl, VmPausing, VmReadings, VmResizing, VmUnplugging
from virtshim.vm.resize import LibvirtResizing
from virtshim.vm.statistics import BulkStats, LibvirtReadings, Stats, VmStatistics
from virtshim.vm.template_vms import LibvirtTemplateVms

QEMU = "/usr/bin/qemu-system-x86_64"
WAIT_LIMIT = 30.0
# Longer than a test may take: a test that waits for it fails.
AN_HOUR = 3600.0
A = ContainerId("a" * 64)

FOREIGN = """<domain type='{type}'><name>{name}</name><uuid>{uuid}</uuid>{metadata}<memory>65536</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""
OTHER_NODE = """<metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='other' container='{c}' sandbox='{c}'/>
</metadata>""".format(c="c" * 64)


# The port can be unplugged without the guest; the card only if the guest releases it.
SERIAL_PORT = """<channel type='pty'><target type='virtio' name='{alias}'/><alias name='{alias}'/></channel>"""
CARD = """<rng model='virtio'><backend model='builtin'/><alias name='{alias}'/></rng>"""

Connected = tuple[Connection, LibvirtHypervisor, LibvirtUnplugging]


@dataclasses.dataclass
class World:
    hypervisor: Hypervisor
    directory: Path
    add_foreign: Callable[[uuid.UUID, str], None]
    foreign_runs: Callable[[uuid.UUID], bool]
    add_other_node: Callable[[uuid.UUID, str], None]
    readings: VmReadings
    resizing: VmResizing
    pausing: VmPausing
    inventory: VmInventory
    unplugging: VmUnplugging
    plug_in: Callable[[uuid.UUID, str, str], None]
    # Adds a root port to the definition: our VMs have one for each host device only.
    add_root_port: Callable[[uuid.UUID], None]
    control: VmControl
    streams: MemoryStreams
    templates: TemplateVms
    # The number of queries to libvirt for statistics.
    questions: list[None] = dataclasses.field(default_factory=list)

    def usage_of(self, *specs: VmSpec) -> Mapping[uuid.UUID, DomainUsage]:
        return self.readings.usage({spec.uuid: spec.name for spec in specs})

    def spec(self, digit: str = "a", **changes: object) -> VmSpec:
        container = ContainerId(digit * 64)
        disk = self.directory / "disk.raw"
        if not disk.exists():
            disk.write_bytes(bytes(1 << 20))
        spec = VmSpec(
            uuid=container.domain_uuid(),
            name=f"virtshim-contract-{digit}",
            container_id=container,
            sandbox_id=SandboxId("5" * 64),
            size=VmSize(vcpus=1, memory_bytes=32 << 20),
            disk_bus=DiskBus.VIRTIO,
            disks=(Disk(str(disk), DiskFormat.RAW, "root"),),
            console_socket=str(self.directory / f"{digit}.sock"),
            console_log=str(self.directory / f"{digit}.log"),
            agent_socket=str(self.directory / f"{digit}.agent"),
        )
        return dataclasses.replace(spec, **changes)

    def running(self, digit: str = "a") -> uuid.UUID:
        spec = self.spec(digit)
        self.hypervisor.define(spec)
        self.hypervisor.start(spec.uuid)
        return spec.uuid


def fake_world(directory: Path) -> Iterator[World]:
    fake = FakeHypervisor()

    def plug_in(domain: uuid.UUID, device: str, alias: str) -> None:
        fake.domains[domain].plugged += (alias,)
        if device == CARD:
            fake.keeps_devices.add(domain)

    yield World(
        fake,
        directory,
        fake.add_foreign,
        lambda domain: fake.domains[domain].state.power is Power.RUNNING,
        fake.add_foreign,
        FakeReadings(fake, time.time_ns),
        FakeResizing(fake),
        fake,
        fake,
        fake,
        plug_in,
        add_root_port=lambda domain: None,
        control=fake,
        streams=FakeMemoryStreams(fake),
        templates=FakeTemplateVms(fake),
    )
    fake.close()


def profile(kind: DomainType) -> NodeProfile:
    return NodeProfile("this-node", kind, QEMU, QEMU, Cgroups.OFF)


@contextlib.contextmanager
def connected_to(uri: str, kind: DomainType) -> Iterator[Connected]:
    connection = Connection(uri)
    hypervisor = LibvirtHypervisor(connection, profile(kind))
    unplugging = LibvirtUnplugging(connection, profile(kind), hypervisor.watching)
    connection.start()
    assert connection.wait_open(WAIT_LIMIT), connection.trouble()
    yield connection, hypervisor, unplugging
    hypervisor.close()
    connection.close()


def libvirt_world(
    beside: libvirt.virConnect, kind: DomainType, connected: Connected, directory: Path
) -> Iterator[World]:
    connection, hypervisor, unplugging = connected
    uri = beside.getURI()
    there = {domain.UUIDString() for domain in beside.listAllDomains()}

    def add(metadata: str) -> Callable[[uuid.UUID, str], None]:
        def add(domain: uuid.UUID, name: str) -> None:
            beside.defineXML(FOREIGN.format(type=kind.value, name=name, uuid=domain, metadata=metadata)).create()

        return add

    def plug_in(domain: uuid.UUID, device: str, alias: str) -> None:
        beside.lookupByUUID(domain.bytes).attachDeviceFlags(device.format(alias=alias), libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def add_root_port(domain: uuid.UUID) -> None:
        definition = beside.lookupByUUID(domain.bytes).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
        beside.defineXML(definition.replace("</devices>", "<controller type='pci' model='pcie-root-port'/></devices>"))

    control = LibvirtControl(connection, profile(kind))
    statistics, questions = VmStatistics(connection, hypervisor.busy), []

    def asked(wanted: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Stats]:
        questions.append(None)
        return statistics.read(wanted)

    try:
        yield World(
            hypervisor,
            directory,
            add(""),
            lambda domain: bool(beside.lookupByUUID(domain.bytes).isActive()),
            add(OTHER_NODE),
            LibvirtReadings(BulkStats(asked), qemu_process.pid_directory(uri)),
            LibvirtResizing(connection, profile(kind)),
            LibvirtPausing(connection, profile(kind)),
            LibvirtInventory(connection, profile(kind)),
            unplugging,
            plug_in,
            add_root_port,
            control,
            LibvirtMemoryStreams(connection, profile(kind)),
            LibvirtTemplateVms(hypervisor, Layout(str(directory), str(directory)), QEMU),
            questions,
        )
    finally:
        control.close()
        for domain in beside.listAllDomains():
            if domain.UUIDString() not in there:
                if domain.isActive():
                    with contextlib.suppress(libvirt.libvirtError):  # it has just ended
                        domain.destroy()
                domain.undefine()


def missing() -> str:
    if os.geteuid() != 0:
        return "AREA guest NOT TESTED: needs root"
    return "" if os.path.exists(QEMU) else f"AREA guest NOT TESTED: needs {QEMU}; run make setup"
