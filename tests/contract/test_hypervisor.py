"""What every Hypervisor does: the fake, libvirt with its test driver, and libvirt's embedded driver with real QEMU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import libvirt
import pytest
from fakes.hypervisor import FakeHypervisor
from fakes.processes import hanging
from fakes.readings import FakeReadings
from fakes.resizing import FakeResizing
from podclient import wait_until

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.errors import AlreadyExists, DeadlineExceeded, InvalidRequest, NotFound, WrongState
from virtshim.model.hardware import Cache, Clock, DiskIo, HardwareOptions, Topology, Video
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.usage import DomainUsage
from virtshim.model.vm import Disk, DiskBus, NumaCell, OffReason, Power, PowerState, VmSize, VmSpec
from virtshim.store.ports import VmInventory
from virtshim.vm import embed, qemu_process
from virtshim.vm.connection import Connection
from virtshim.vm.control import LibvirtControl, LibvirtUnplugging
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.driver import LibvirtHypervisor
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.inventory import LibvirtInventory
from virtshim.vm.pause import LibvirtPausing
from virtshim.vm.ports import Hypervisor, VmControl, VmPausing, VmReadings, VmResizing, VmUnplugging
from virtshim.vm.resize import LibvirtResizing
from virtshim.vm.statistics import BulkStats, LibvirtReadings, Stats, VmStatistics

QEMU = "/usr/bin/qemu-system-x86_64"
WAIT_LIMIT = 30.0
# Longer than a test may take: who waits for it fails.
AN_HOUR = 3600.0
A = ContainerId("a" * 64)

FOREIGN = """<domain type='{type}'><name>{name}</name><uuid>{uuid}</uuid>{metadata}<memory>65536</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""
OTHER_NODE = """<metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='other' container='{c}' sandbox='{c}'/>
</metadata>""".format(c="c" * 64)


# A VM can lose such a port without its guest, and its card with its guest's consent alone.
SERIAL_PORT = """<channel type='pty'><target type='virtio' name='{alias}'/><alias name='{alias}'/></channel>"""
CARD = """<rng model='virtio'><backend model='builtin'/><alias name='{alias}'/></rng>"""

_Connected = tuple[Connection, LibvirtHypervisor, LibvirtUnplugging]


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
    # Into the definition: a VM of ours has one for each device of the host alone.
    add_root_port: Callable[[uuid.UUID], None]
    control: VmControl
    # How often libvirt was asked for numbers.
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


def _fake_world(directory: Path) -> Iterator[World]:
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
    )
    fake.close()


def _profile(kind: DomainType) -> NodeProfile:
    return NodeProfile("this-node", kind, QEMU, QEMU, Cgroups.OFF)


@contextlib.contextmanager
def _connected(uri: str, kind: DomainType) -> Iterator[_Connected]:
    connection = Connection(uri)
    hypervisor = LibvirtHypervisor(connection, _profile(kind))
    unplugging = LibvirtUnplugging(connection, _profile(kind), hypervisor.watching)
    connection.start()
    assert connection.wait_open(WAIT_LIMIT), connection.trouble()
    yield connection, hypervisor, unplugging
    hypervisor.close()
    connection.close()


def _libvirt_world(
    beside: libvirt.virConnect, kind: DomainType, connected: _Connected, directory: Path
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

    control = LibvirtControl(connection, _profile(kind))
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
            LibvirtResizing(connection, _profile(kind)),
            LibvirtPausing(connection, _profile(kind)),
            LibvirtInventory(connection, _profile(kind)),
            unplugging,
            plug_in,
            add_root_port,
            control,
            questions,
        )
    finally:
        control.close()
        for domain in beside.listAllDomains():
            if domain.UUIDString() not in there:
                if domain.isActive():
                    domain.destroy()
                domain.undefine()


@pytest.fixture(scope="session")
def embedded() -> Iterator[tuple[libvirt.virConnect, _Connected]]:
    """One for all tests: a process can have one root, and open it a few times only (libvirt's table of drivers fills up).
    Below /var/tmp, where QEMU's user may go."""
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/var/tmp") as root:
        uri = embed.prepare(root, embed.qemu_user())
        with _connected(uri, DomainType.QEMU) as connected:
            beside = libvirt.open(uri)
            yield beside, connected
            beside.close()


def _missing() -> str:
    if os.geteuid() != 0:
        return "AREA guest NOT TESTED: needs root"
    return "" if os.path.exists(QEMU) else f"AREA guest NOT TESTED: needs {QEMU}; run make setup"


@pytest.fixture(params=["fake", "test-driver", "qemu"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="hv-vm-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o711)
        if request.param == "fake":
            yield from _fake_world(directory)
        elif request.param == "test-driver":
            with _connected("test:///default", DomainType.TEST) as connected:
                beside = libvirt.open("test:///default")
                yield from _libvirt_world(beside, DomainType.TEST, connected, directory)
                beside.close()
        else:
            if why := _missing():
                pytest.skip(why)
            beside, connected = request.getfixturevalue("embedded")
            yield from _libvirt_world(beside, DomainType.QEMU, connected, directory)


def test_a_defined_vm_is_off_and_owned_by_this_node(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    assert world.hypervisor.power(spec.uuid) == PowerState(Power.OFF)
    (owned,) = world.hypervisor.owned()
    assert (owned.uuid, owned.name) == (spec.uuid, spec.name)
    assert (owned.container_id, owned.sandbox_id) == (spec.container_id, spec.sandbox_id)
    assert owned.state.power is Power.OFF


def test_an_unknown_vm_is_absent_and_may_be_destroyed(world: World) -> None:
    unknown = uuid.uuid4()
    assert world.hypervisor.power(unknown).power is Power.ABSENT
    world.hypervisor.ask_to_shut_down(unknown)
    world.hypervisor.destroy(unknown, A)
    world.hypervisor.undefine(unknown, A)
    with pytest.raises(NotFound):
        world.hypervisor.start(unknown)


def test_defining_a_vm_again_replaces_its_definition(world: World) -> None:
    world.hypervisor.define(world.spec())
    world.hypervisor.define(world.spec(size=VmSize(vcpus=2, memory_bytes=32 << 20)))
    world.hypervisor.define(world.spec(name="virtshim-contract-renamed"))
    assert [domain.name for domain in world.hypervisor.owned()] == ["virtshim-contract-renamed"]


def test_a_started_vm_runs_and_a_second_start_is_refused(world: World) -> None:
    domain = world.running()
    assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)
    assert world.hypervisor.owned()[0].state.power is Power.RUNNING
    with pytest.raises(WrongState):
        world.hypervisor.start(domain)


def test_destroy_reports_its_reason_and_may_be_called_twice(world: World) -> None:
    domain = world.running()
    world.hypervisor.destroy(domain, A)
    assert world.hypervisor.power(domain) == PowerState(Power.OFF, OffReason.DESTROYED)
    world.hypervisor.destroy(domain, A)
    world.hypervisor.ask_to_shut_down(domain)
    assert world.hypervisor.power(domain) == PowerState(Power.OFF, OffReason.DESTROYED)


def test_the_next_vm_starts_on_a_disk_as_soon_as_the_last_one_is_destroyed(world: World) -> None:
    for digit in "abab":
        spec = world.spec(digit)
        world.hypervisor.define(spec)
        world.hypervisor.start(spec.uuid)
        world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert {domain.state.power for domain in world.hypervisor.owned()} == {Power.OFF}


def test_a_vm_with_numa_nodes_runs_and_grows(world: World) -> None:
    cells = tuple(NumaCell(0, frozenset({0}), (vcpu, vcpu + 2), 32 << 20) for vcpu in range(2))
    size = VmSize(vcpus=2, max_vcpus=4, memory_bytes=32 << 20, max_memory_bytes=64 << 20)
    spec = world.spec(size=size, cells=cells)
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    world.resizing.add_vcpus(spec.uuid, 4)
    world.resizing.set_memory(spec.uuid, 64 << 20, WAIT_LIMIT, threading.Event())
    assert world.hypervisor.power(spec.uuid).power is Power.RUNNING


def test_undefine_needs_a_vm_that_is_off_and_may_be_called_twice(world: World) -> None:
    domain = world.running()
    with pytest.raises(WrongState):
        world.hypervisor.undefine(domain, A)
    assert world.hypervisor.power(domain).power is Power.RUNNING
    world.hypervisor.destroy(domain, A)
    world.hypervisor.undefine(domain, A)
    assert world.hypervisor.power(domain).power is Power.ABSENT
    world.hypervisor.undefine(domain, A)
    assert not world.hypervisor.owned()


def test_a_vm_of_another_container_with_the_same_uuid_is_left_alone(world: World) -> None:
    earlier = world.spec("a")
    world.hypervisor.define(earlier)
    later = world.spec("b", uuid=earlier.uuid)
    world.hypervisor.define(later)
    world.hypervisor.start(later.uuid)
    world.hypervisor.destroy(earlier.uuid, earlier.container_id)
    assert world.hypervisor.power(later.uuid).power is Power.RUNNING
    world.hypervisor.destroy(later.uuid, later.container_id)
    world.hypervisor.undefine(earlier.uuid, earlier.container_id)
    assert world.hypervisor.power(later.uuid).power is Power.OFF
    assert [domain.container_id for domain in world.hypervisor.owned()] == [later.container_id]


def test_a_running_vm_is_not_redefined(world: World) -> None:
    domain = world.running()
    with pytest.raises(WrongState):
        world.hypervisor.define(world.spec())
    assert world.hypervisor.power(domain).power is Power.RUNNING


def test_a_foreign_vm_with_a_known_uuid_is_never_touched(world: World) -> None:
    spec = world.spec()
    world.add_foreign(spec.uuid, "somebody-elses")
    with pytest.raises(AlreadyExists):
        world.hypervisor.define(spec)
    assert world.hypervisor.power(spec.uuid).power is Power.ABSENT
    world.hypervisor.ask_to_shut_down(spec.uuid)
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    world.hypervisor.undefine(spec.uuid, spec.container_id)
    with pytest.raises(NotFound):
        world.hypervisor.start(spec.uuid)
    assert world.foreign_runs(spec.uuid)
    assert not world.hypervisor.owned()


def test_the_name_of_a_foreign_vm_is_refused(world: World) -> None:
    spec = world.spec()
    world.add_foreign(uuid.uuid4(), spec.name)
    with pytest.raises(AlreadyExists):
        world.hypervisor.define(spec)
    assert not world.hypervisor.owned()


def test_another_nodes_vm_is_foreign(world: World) -> None:
    spec = world.spec()
    world.add_other_node(spec.uuid, "other-nodes")
    with pytest.raises(AlreadyExists):
        world.hypervisor.define(spec)
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert world.foreign_runs(spec.uuid)
    assert not world.hypervisor.owned()


def test_a_watcher_gets_events_of_its_own_vm_only(world: World) -> None:
    for digit in "ab":
        world.hypervisor.define(world.spec(digit))
    with (
        world.hypervisor.watching(world.spec("a").uuid) as first,
        world.hypervisor.watching(world.spec("a").uuid) as second,
        world.hypervisor.watching(world.spec("b").uuid) as other,
    ):
        # Definitions are events too, and may come late.
        for event in (first, second, other):
            event.wait(0.2)
            event.clear()
        world.hypervisor.start(world.spec("a").uuid)
        assert first.wait(WAIT_LIMIT)
        assert second.wait(WAIT_LIMIT)
        assert not other.wait(0.2)


def test_callbacks_run_on_other_threads_even_after_one_failed(world: World) -> None:
    seen: list[tuple[uuid.UUID, int]] = []
    off = threading.Event()
    spec = world.spec()

    def bad(domain: uuid.UUID) -> None:
        raise RuntimeError(f"bad callback for {domain}")

    def callback(domain: uuid.UUID) -> None:
        seen.append((domain, threading.get_ident()))
        if world.hypervisor.power(domain).power is Power.OFF and off_wanted.is_set():
            off.set()

    off_wanted = threading.Event()
    world.hypervisor.on_power_event(bad)
    world.hypervisor.on_power_event(callback)
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    off_wanted.set()
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert off.wait(WAIT_LIMIT)
    assert {domain for domain, _ in seen} == {spec.uuid}
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_text_that_xml_cannot_hold_is_refused_and_nothing_is_defined(
    world: World, request: pytest.FixtureRequest
) -> None:
    if "fake" in request.node.name:
        return  # a fake has no XML
    with pytest.raises(InvalidRequest):
        world.hypervisor.define(world.spec(title="tab\tand\x00zero"))
    assert not world.hypervisor.owned()


def test_a_working_hypervisor_reports_no_trouble(world: World) -> None:
    assert world.hypervisor.trouble() == ""


def test_statistics_have_only_running_vms_that_were_requested(world: World) -> None:
    running, off = world.spec("a"), world.spec("b")
    world.running("a")
    world.hypervisor.define(off)
    (world.directory / "disk.raw").rename(world.directory / "busy.raw")
    unasked = world.spec("c")
    world.running("c")
    before = time.time_ns()
    found = world.usage_of(running, off)
    assert list(found) == [running.uuid]
    counters = found[running.uuid].counters
    assert counters is not None
    assert before <= counters.taken_at <= time.time_ns()
    assert unasked.uuid in world.usage_of(unasked)


def test_an_ended_vm_has_no_statistics(world: World) -> None:
    spec = world.spec()
    world.running()
    assert spec.uuid in world.usage_of(spec)
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert world.usage_of(spec) == {}


def test_each_reading_has_new_cpu_time_memory_and_disk_numbers(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it knows states only
    spec = world.spec()
    world.running()
    first, second = (world.usage_of(spec)[spec.uuid] for _ in range(2))
    assert first.counters is not None
    assert second.counters is not None
    assert second.counters.taken_at > first.counters.taken_at
    assert first.counters.cpu is not None
    assert second.counters.cpu is not None
    assert 0 < first.counters.cpu <= second.counters.cpu
    assert first.counters.memory is not None
    assert first.counters.memory.maximum >= spec.size.memory_bytes
    assert [block.device for block in first.counters.blocks] == ["vda"]
    assert [vcpu.number for vcpu in first.counters.vcpus] == [0]
    assert first.process is not None
    assert first.process.resident > 1 << 20
    assert first.process.threads > 1
    assert first.process.descriptors > first.process.sockets > 0


def test_statistics_do_not_wait_for_a_vm_that_is_starting(world: World, request: pytest.FixtureRequest) -> None:
    if "qemu" not in request.node.name:
        return  # only a real start opens the console's log
    healthy = world.spec("a")
    world.running("a")
    (world.directory / "disk.raw").rename(world.directory / "busy.raw")
    starting = world.spec("b")
    os.mkfifo(starting.console_log)
    world.hypervisor.define(starting)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as reading:
        start = pool.submit(world.hypervisor.start, starting.uuid)
        try:
            # libvirt opens it for writing, and has the VM locked.
            wait_until(_somebody_waits_for_a_reader, WAIT_LIMIT, "the console's log is opened")
            found = world.usage_of(starting, healthy)
            assert not start.done()
        finally:
            reading.callback(os.close, os.open(starting.console_log, os.O_RDONLY | os.O_NONBLOCK))
            start.result(WAIT_LIMIT)
    assert list(found) == [healthy.uuid]
    assert found[healthy.uuid].counters is not None


def _somebody_waits_for_a_reader() -> bool:
    """A thread of this process, of a pipe with a name."""
    return any(task.read_text() == "wait_for_partner" for task in Path("/proc/self/task").glob("*/wchan"))


def test_a_hung_vm_does_not_fail_the_statistics_of_others(world: World, request: pytest.FixtureRequest) -> None:
    if "qemu" not in request.node.name:
        return  # only a real process can be stopped
    broken = world.spec("a")
    world.running("a")
    (world.directory / "disk.raw").rename(world.directory / "busy.raw")
    healthy = world.spec("b")
    world.running("b")
    process = world.usage_of(broken)[broken.uuid].process
    assert process is not None
    with hanging(process.pid):
        for _ in range(2):
            before = len(world.questions)
            found = world.usage_of(broken, healthy)
            whole = found[healthy.uuid].counters
            assert whole is not None
            assert whole.memory is not None
            assert whole.blocks
            # Of the broken one libvirt still knows what it need not ask QEMU.
            rest = found[broken.uuid]
            assert rest.process is not None
            assert rest.counters is not None
            assert rest.counters.cpu is not None
        assert len(world.questions) == before + 1, "the second list need not wait again"


# --- changes of a VM that exists


def test_a_vm_gets_vcpus_up_to_its_maximum_whether_on_or_off(world: World) -> None:
    spec = world.spec(size=VmSize(vcpus=1, max_vcpus=3, memory_bytes=32 << 20))
    world.hypervisor.define(spec)
    world.resizing.add_vcpus(spec.uuid, 2)
    world.hypervisor.start(spec.uuid)
    world.resizing.add_vcpus(spec.uuid, 3)
    world.resizing.add_vcpus(spec.uuid, 1)  # none is taken away, and that is no error
    with pytest.raises(WrongState, match="3 vCPUs, not 4"):
        world.resizing.add_vcpus(spec.uuid, 4)


def test_a_vm_that_is_off_takes_memory_up_to_its_maximum(world: World) -> None:
    spec = world.spec(size=VmSize(vcpus=1, memory_bytes=32 << 20, max_memory_bytes=64 << 20))
    world.hypervisor.define(spec)
    world.resizing.set_memory(spec.uuid, 48 << 20, WAIT_LIMIT, threading.Event())
    world.resizing.set_memory(spec.uuid, 32 << 20, WAIT_LIMIT, threading.Event())
    with pytest.raises(WrongState, match="not 134217728"):
        world.resizing.set_memory(spec.uuid, 128 << 20, WAIT_LIMIT, threading.Event())
    assert world.resizing.memory_in_use(spec.uuid, threading.Event()) is None
    world.hypervisor.start(spec.uuid)
    world.resizing.set_memory(spec.uuid, 64 << 20, WAIT_LIMIT, threading.Event())


def test_foreign_and_unknown_vms_are_not_resized(world: World) -> None:
    foreign = world.spec().uuid
    world.add_foreign(foreign, "somebody-elses")
    for domain in (foreign, uuid.uuid4()):
        for change in (
            lambda domain=domain: world.resizing.add_vcpus(domain, 1),
            lambda domain=domain: world.resizing.set_memory(domain, 32 << 20, WAIT_LIMIT, threading.Event()),
            lambda domain=domain: world.resizing.memory_in_use(domain, threading.Event()),
        ):
            with pytest.raises(NotFound):
                change()


def test_limits_are_left_alone_where_libvirt_manages_no_cgroups(world: World) -> None:
    domain = world.running()
    world.resizing.set_limits(domain, CgroupLimits(cpu_quota=50_000, memory=1 << 30))
    assert world.hypervisor.power(domain).power is Power.RUNNING


# --- VMs that stand still


def test_a_paused_vm_stays_paused_until_it_is_resumed(world: World) -> None:
    domain = world.running()
    world.pausing.pause(domain)
    assert world.hypervisor.power(domain) == PowerState(Power.PAUSED)
    with pytest.raises(WrongState):
        world.pausing.pause(domain)
    assert not world.pausing.out_of_space(domain)
    for _ in range(2):
        world.pausing.resume(domain)
        assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)


def test_only_running_vms_are_paused_and_resuming_others_does_nothing(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    with pytest.raises(WrongState):
        world.pausing.pause(spec.uuid)
    with pytest.raises(NotFound):
        world.pausing.pause(uuid.uuid4())
    for domain in (spec.uuid, uuid.uuid4()):
        world.pausing.resume(domain)
        assert not world.pausing.out_of_space(domain)


def test_a_foreign_vm_is_not_paused(world: World) -> None:
    foreign = uuid.uuid4()
    world.add_foreign(foreign, "somebody-elses")
    with pytest.raises(NotFound):
        world.pausing.pause(foreign)
    assert world.foreign_runs(foreign)


def test_a_reset_vm_keeps_running_and_a_vm_that_is_off_is_not_reset(
    world: World, request: pytest.FixtureRequest
) -> None:
    if "test-driver" in request.node.name:
        return  # it has no reset button
    domain = world.running()
    with world.hypervisor.watching(domain) as news:
        world.control.reset(domain)
        assert news.wait(WAIT_LIMIT), "it is told like any other restart"
    assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)
    world.hypervisor.destroy(domain, A)
    with pytest.raises(WrongState):
        world.control.reset(domain)


def test_a_definition_is_shown_without_the_network_key(world: World) -> None:
    spec = world.spec(fetch_key="s3cret", tapmanager_socket="/run/tapmanager.sock")
    world.hypervisor.define(spec)
    shown = world.control.definition(spec.uuid)
    assert spec.name in shown
    assert "s3cret" not in shown


def test_a_foreign_vm_is_neither_reset_nor_shown(world: World) -> None:
    foreign = uuid.uuid4()
    world.add_foreign(foreign, "somebody-elses")
    for call in (world.control.reset, world.control.definition):
        with pytest.raises(NotFound):
            call(foreign)
    assert world.foreign_runs(foreign)


def test_saving_memory_leaves_a_paused_vm_paused(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it has no memory
    domain = world.running()
    world.pausing.pause(domain)
    path = world.directory / "memory.save"
    world.pausing.save_memory(domain, str(path), WAIT_LIMIT)
    assert world.hypervisor.power(domain) == PowerState(Power.PAUSED)
    if "qemu" in request.node.name:
        assert path.read_bytes().startswith(b"LibvirtQemudSave")
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(DeadlineExceeded):
            world.pausing.save_memory(domain, str(world.directory / "late.save"), 0.0)
        assert not (world.directory / "late.save").exists()
    world.pausing.resume(domain)
    assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)


def test_a_definition_remembers_its_pod(world: World) -> None:
    spec = world.spec(title="default/web/vm")
    world.hypervisor.define(spec)
    found = world.inventory.domain_metadata(spec.uuid)
    assert (found.title, found.has_run) == (spec.title, False)


def test_a_definition_without_a_record_yields_no_record(world: World) -> None:
    world.hypervisor.define(world.spec())
    kept: list[str] = []
    world.inventory.take_records_out(lambda _, text: kept.append(text))
    assert kept == []


def test_only_this_nodes_vms_are_remembered(world: World) -> None:
    domain = uuid.uuid4()
    world.add_foreign(domain, "somebody-elses")
    with pytest.raises(NotFound):
        world.inventory.domain_metadata(domain)


def test_the_census_lists_only_this_nodes_vms(world: World) -> None:
    world.add_foreign(uuid.uuid4(), "somebody-elses")
    world.add_other_node(uuid.uuid4(), "another-nodes")
    domain = world.running()
    inventory = world.inventory.take()
    assert [(found.uuid, found.state.power) for found in inventory.owned] == [(domain, Power.RUNNING)]
    assert not inventory.unreadable


def test_unplug_does_nothing_for_a_vm_without_host_devices(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    assert not world.unplugging.unplug(spec.uuid, A, WAIT_LIMIT)
    world.hypervisor.start(spec.uuid)
    assert not world.unplugging.unplug(spec.uuid, A, WAIT_LIMIT)
    assert not world.unplugging.unplug(uuid.uuid4(), A, WAIT_LIMIT)
    assert world.hypervisor.power(spec.uuid).power is Power.RUNNING


def test_a_device_that_the_guest_releases_is_detached(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it plugs nothing
    domain = world.running()
    for alias in ("ua-host-pci1", "ua-host-pci2"):
        world.plug_in(domain, SERIAL_PORT, alias)
    assert not world.unplugging.unplug(domain, ContainerId("b" * 64), WAIT_LIMIT), "another container's"
    assert not world.unplugging.unplug(domain, A, AN_HOUR), "the guest is not waited for any longer"
    assert world.hypervisor.power(domain).power is Power.RUNNING


def test_unplug_gives_up_at_its_time_limit_if_the_guest_keeps_the_device(
    world: World, request: pytest.FixtureRequest
) -> None:
    if "test-driver" in request.node.name:
        return
    spec = world.spec()
    domain = spec.uuid
    world.hypervisor.define(spec)
    world.add_root_port(domain)
    world.hypervisor.start(domain)
    world.plug_in(domain, CARD, "ua-host-pci1")
    for _ in range(2):  # asked again before it has answered
        assert list(world.unplugging.unplug(domain, A, 0.2)) == ["ua-host-pci1"]
    world.hypervisor.destroy(domain, A)
    assert not world.unplugging.unplug(domain, A, AN_HOUR)


def test_unplug_does_not_ask_a_paused_guest(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return
    domain = world.running()
    world.plug_in(domain, SERIAL_PORT, "ua-host-pci1")
    world.pausing.pause(domain)
    assert list(world.unplugging.unplug(domain, A, AN_HOUR)) == ["ua-host-pci1"]
    world.pausing.resume(domain)
    assert not world.unplugging.unplug(domain, A, WAIT_LIMIT)


@pytest.mark.parametrize("ended", [False, pytest.param(True, marks=pytest.mark.full)])
def test_unplug_does_not_wait_for_a_hung_vm(world: World, request: pytest.FixtureRequest, *, ended: bool) -> None:
    """`ended`: and is destroyed, for which libvirt takes ten seconds."""
    if "qemu" not in request.node.name:
        return  # only a real process can be stopped
    spec = world.spec()
    domain = world.running()
    world.plug_in(domain, SERIAL_PORT, "ua-host-pci1")
    process = world.usage_of(spec)[domain].process
    assert process is not None
    with hanging(process.pid):
        assert list(world.unplugging.unplug(domain, A, 0.5)) == ["ua-host-pci1"]
        if ended:
            world.hypervisor.destroy(domain, A)
    assert world.hypervisor.power(domain).is_on != ended


def test_a_vm_keeps_the_machine_type_that_its_guest_knows(world: World) -> None:
    """Only QEMU's driver has machines of several versions."""
    spec = world.spec(machine="pc-q35-6.2")
    world.hypervisor.define(spec)
    if isinstance(world.hypervisor, LibvirtHypervisor) and world.hypervisor.machine_type:
        assert re.fullmatch(r"pc-q35-[0-9.]+", world.hypervisor.machine_type)
        assert "pc-q35-6.2" in world.control.definition(spec.uuid)


def test_a_vm_starts_with_all_hardware_that_a_pod_may_request(world: World) -> None:
    """Beside UEFI and TPM, which the real Debian guest has."""
    hardware = HardwareOptions(
        cache=Cache.DIRECTSYNC, io=DiskIo.NATIVE, video=Video.VIRTIO, watchdog=True, topology=Topology(1, 1, 1),
        hyperv=True, clock=Clock.LOCALTIME, tablet=True,
    )  # fmt: skip
    screen = str(world.directory / "vnc" / "vnc.sock")
    spec = world.spec(disk_bus=DiskBus.SATA, vnc_socket=screen, hardware=hardware)
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    assert world.hypervisor.power(spec.uuid).power is Power.RUNNING
